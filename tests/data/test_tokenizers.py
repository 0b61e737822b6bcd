"""Tokenizers: round loop, end tokens no text can forge, the BPE cache."""

import numpy as np
import pytest
import tokenizers as hf

from lowcomm_jax.data import tokenizers as ours
from lowcomm_jax.data.corpora import Document
from lowcomm_jax.data.documents import materialise

TEXTS = [
    "plain text, twice: plain text",
    "größer, 中文, emoji 👩‍🚀, combining e\u0301, zero\u200bwidth",
    "tabs\tand\r\nline ends\n\n  leading spaces",
    "\x00 control \x1f characters \ufeff and a mark",
    "",
]


class Fixed:
    name = "fixed"

    def __init__(self, texts):
        self.texts = texts

    def fingerprint(self):
        return repr(self.texts)

    def documents(self):
        return (Document(text, "t") for text in self.texts)


@pytest.fixture
def documents(tmp_path):
    texts = [f"the cat number {i} sat on the mat of the cat {i * i}" for i in range(200)]
    return materialise(Fixed(texts), None, tmp_path)


def test_bytes_round_trip_and_vocabulary():
    tokenizer = ours.ByteTokenizer()
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.int32 and tokens.tolist() == list(text.encode())
        assert tokenizer.decode([tokenizer.eos_id, *tokens, tokenizer.pad_id, 319]) == text
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.vocab_size % 64 == 0 and tokenizer.vocab_size >= tokenizer.size == 258
    assert len({tokenizer.eos_id, tokenizer.pad_id} | set(range(256))) == 258


def test_bpe_round_trip_and_vocabulary(documents, tmp_path):
    tokenizer = ours.open_tokenizer("bpe:300", documents, tmp_path)
    for text, tokens in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert np.array_equal(tokens, tokenizer.encode(text)) and tokens.dtype == np.int32
        assert tokenizer.decode([tokenizer.eos_id, *tokens, tokenizer.pad_id]) == text
    assert tokenizer.size == 300 and tokenizer.vocab_size == 320
    seen = documents.text(0)
    assert len(tokenizer.encode(seen)) < len(seen) / 2


def test_no_text_encodes_to_the_end_token(documents, tmp_path):
    tokenizer = ours.open_tokenizer("bpe:300", documents, tmp_path)
    forged = "a<|end|>b<|pad|>c"
    tokens = tokenizer.encode(forged)
    assert not {tokenizer.eos_id, tokenizer.pad_id} & set(tokens.tolist())
    assert tokenizer.decode(tokens) == forged


def test_bpe_is_trained_once_a_corpus_and_size(documents, tmp_path, monkeypatch):
    first = ours.open_tokenizer("bpe:300", documents, tmp_path)
    elsewhere = ours.open_tokenizer("bpe:300", documents, tmp_path / "elsewhere")
    assert first.digest == elsewhere.digest

    def refuse(*_):
        raise AssertionError("trained again")

    monkeypatch.setattr(ours, "_train_bpe", refuse)
    again = ours.open_tokenizer("bpe:300", documents, tmp_path)
    assert again.digest == first.digest
    with pytest.raises(AssertionError, match="trained again"):
        ours.open_tokenizer("bpe:301", documents, tmp_path)
    other = materialise(Fixed(["other text", "more"]), None, tmp_path)
    with pytest.raises(AssertionError, match="trained again"):
        ours.open_tokenizer("bpe:300", other, tmp_path)
    # The two failed trainings left nothing behind.
    assert len(list((tmp_path / "tokenizers").iterdir())) == 1


def write_file(path, *special):
    backend = hf.Tokenizer(hf.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(special))
    backend.enable_padding(length=9)
    backend.enable_truncation(1)
    backend.save(str(path))


def test_any_tokenizer_file(documents, tmp_path):
    write_file(tmp_path / "t.json", "</s>")
    tokenizer = ours.open_tokenizer(f"file:{tmp_path / 't.json'}", documents, tmp_path)
    assert tokenizer.encode("a b b a").tolist() == [0, 1, 1, 0]
    assert (tokenizer.eos_id, tokenizer.pad_id) == (3, 3)
    assert (tokenizer.size, tokenizer.vocab_size) == (4, 64)


def test_a_file_whose_end_token_a_text_can_spell_is_warned_of(documents, tmp_path, caplog):
    """Pieces of a Unigram model are found in a text, `</s>` among them."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), *((letter, -2.0) for letter in "ab<>/s")]
    hf.Tokenizer(hf.models.Unigram(pieces, unk_id=0)).save(str(tmp_path / "u.json"))
    tokenizer = ours.open_tokenizer(f"file:{tmp_path / 'u.json'}", documents, tmp_path)
    assert tokenizer.eos_id in tokenizer.encode("a</s>b")
    assert "a text that spells </s> or <pad> ends" in caplog.text
    caplog.clear()
    write_file(tmp_path / "t.json", "</s>")
    ours.open_tokenizer(f"file:{tmp_path / 't.json'}", documents, tmp_path)
    ours.open_tokenizer("bpe:300", documents, tmp_path)
    assert not caplog.text


def test_what_a_template_adds_is_left_out_and_not_warned_of(documents, tmp_path, caplog):
    """As those of Llama (a token that begins every text) and T5 (one that ends it)."""
    write_file(tmp_path / "t.json", "</s>", "<s>")
    backend = hf.Tokenizer.from_file(str(tmp_path / "t.json"))
    number = backend.token_to_id
    backend.no_padding()
    backend.no_truncation()
    backend.post_processor = hf.processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", number("<s>")), ("</s>", number("</s>"))]
    )
    backend.save(str(tmp_path / "t.json"))
    assert backend.encode("a b").ids == [number("<s>"), 0, 1, number("</s>")]
    tokenizer = ours.open_tokenizer(f"file:{tmp_path / 't.json'}", documents, tmp_path)
    assert tokenizer.encode("a b").tolist() == [0, 1] and tokenizer.eos_id == number("</s>")
    assert caplog.messages == []


def test_end_token_of_a_file_must_be_known(documents, tmp_path):
    write_file(tmp_path / "t.json", "[STOP]")
    name = f"file:{tmp_path / 't.json'}"
    with pytest.raises(ValueError, match="set eos_token"):
        ours.open_tokenizer(name, documents, tmp_path)
    assert ours.open_tokenizer(name, documents, tmp_path, "[STOP]").eos_id == 3
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        ours.open_tokenizer(f"file:{tmp_path / 'broken.json'}", documents, tmp_path)
