"""Text to token numbers and back: bytes, BPE trained on the corpus, any Hugging Face file.

Every tokenizer has an end-of-document token, and a padding token whose positions are masked. No
text encodes to them; a file of which that is not true is warned of. Vocabulary sizes are rounded up
to a multiple of 64, which suits matrix units and sharding; numbers above `size` are never used.
"""

import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers as hf

from lowcomm_jax.data.cache import open_or_build
from lowcomm_jax.data.config import UNUSABLE
from lowcomm_jax.data.corpora.base import fingerprint_of
from lowcomm_jax.data.documents import Documents, Progress, counted
from lowcomm_jax.refused import refuse

log = logging.getLogger(__name__)

_MULTIPLE = 64
_EOS, _PAD = "<|end|>", "<|pad|>"
_USUAL_EOS = (_EOS, "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
_USUAL_PAD = (_PAD, "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")
# BPE statistics settle long before this; a longer corpus would only cost time.
_TRAINING_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to int32 tokens and back, by a tokenizer of Hugging Face.

    Special tokens written out in a text are encoded as plain text. What its template adds to a text
    (a token that begins it, or ends it) is left out.

    Attributes:
        name: as written in the config.
        backend: end and padding are special tokens of it.
        size: numbers in use are below it.
        eos_id: end of document.
        pad_id: padding.
        digest: changes when the encoding of any text may change.
    """

    name: str
    backend: hf.Tokenizer
    size: int
    eos_id: int
    pad_id: int
    digest: str

    @property
    def vocab_size(self) -> int:
        """`size` rounded up to a multiple of 64; the model's vocabulary."""
        return -(-self.size // _MULTIPLE) * _MULTIPLE

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int32 [n], without end token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of every text."""
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, np.int32) for item in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; end, padding and unused numbers give nothing."""
        left_out = (self.eos_id, self.pad_id)
        kept = [t for t in map(int, tokens) if t < self.size and t not in left_out]
        return self.backend.decode(kept, skip_special_tokens=True)


class ByteTokenizer(Tokenizer):
    """One token a UTF-8 byte; 256 ends a document, 257 pads; vocabulary 320.

    Bytes that are not UTF-8 (a sample cut inside a character) decode to U+FFFD.
    """

    def __init__(self) -> None:
        backend = hf.Tokenizer(hf.models.BPE(vocab=_byte_alphabet(), merges=[]))
        backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = hf.decoders.ByteLevel()
        backend.add_special_tokens([_EOS, _PAD])
        super().__init__("bytes", backend, 258, 256, 257, "bytes-1")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As the backend does, in a hundredth of the time."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def _byte_alphabet() -> dict[str, int]:
    """The printable character by which byte-level tokenizers write each byte -> the byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as they are; others from 256 on
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def open_tokenizer(
    name: str,
    documents: Documents,
    cache: Path,
    eos_token: str | None = None,
    progress: Progress | None = None,
) -> Tokenizer:
    """Return the tokenizer a config names; `bpe:VOCAB` is trained on `documents` at first use.

    Args:
        name: `bytes`, `bpe:VOCAB` or `file:PATH`, checked by `DataConfig.violations`.
        documents: that BPE is trained on: all of them, validation too, at most the first 64 MiB.
            The vocabulary then depends on the corpus alone, not on a seed.
        cache: folder that holds trained tokenizers, by corpus digest and vocabulary size.
        eos_token: end-of-document token of a file; None = found by its usual names.
        progress: told of the documents that BPE has read; see `load`.

    Raises:
        ValueError: the file is no tokenizer, or has no end-of-document token.
    """
    kind, _, rest = name.partition(":")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "file":
        return _open_file(name, Path(os.path.expanduser(rest)), eos_token)
    key = fingerprint_of("bpe-1", hf.__version__, documents.digest, int(rest))[:32]

    def build(folder: Path) -> None:
        _train_bpe(documents, int(rest), progress).save(str(folder / "tokenizer.json"))

    folder = open_or_build(cache, f"tokenizers/{key}", build)
    return _open_file(name, folder / "tokenizer.json", _EOS)


def _train_bpe(documents: Documents, vocab_size: int, progress: Progress | None) -> hf.Tokenizer:
    backend = hf.Tokenizer(hf.models.BPE())
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_EOS, _PAD],
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    last = int(np.searchsorted(documents.offset_E, _TRAINING_BYTES, side="right"))
    count = min(max(last - 1, 1), len(documents))
    texts = (documents.text(i) for i in range(count))
    texts = counted(texts, "reads text for the tokenizer", count, progress, lambda _: 1)
    backend.train_from_iterator(texts, trainer)
    return backend


def _open_file(name: str, path: Path, eos_token: str | None) -> Tokenizer:
    """Read a `tokenizer.json`; ValueError where it is none, or has no end-of-document token."""
    try:
        raw = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"tokenizer={name!r}: {path} is no text ({error})") from error
    try:
        backend = hf.Tokenizer.from_str(raw)
    except Exception as error:  # the package raises bare Exception for every fault of a file
        raise ValueError(f"tokenizer={name!r}: {path} is no tokenizer.json ({error})") from error
    # Without this a text that spells out a special token could end its own document.
    backend.encode_special_tokens = True
    backend.no_padding()
    backend.no_truncation()
    eos_names = _USUAL_EOS if eos_token is None else (eos_token,)
    eos_id = _first_id(backend, eos_names)
    if eos_id is None:
        refuse(
            UNUSABLE,
            [
                f"tokenizer={name!r} has no token {' or '.join(eos_names)}; "
                "set eos_token to its end-of-document token"
            ],
        )
    pad_id = _first_id(backend, _USUAL_PAD)
    ends = {backend.id_to_token(i): i for i in (eos_id, pad_id) if i is not None}
    # Without what the file's template adds to every text, as `encode` does.
    spelt = [x for x, i in ends.items() if i in backend.encode(x, add_special_tokens=False).ids]
    if spelt:
        log.warning(
            "tokenizer=%r: a text that spells %s ends or leaves out a part of its document (as "
            "with Unigram models, and added tokens that are not special)",
            name,
            " or ".join(spelt),
        )
    size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(
        name=name,
        backend=backend,
        size=size,
        eos_id=eos_id,
        pad_id=eos_id if pad_id is None else pad_id,
        digest=hashlib.sha256(f"{eos_id} {hf.__version__} {raw}".encode()).hexdigest(),
    )


def _first_id(backend: hf.Tokenizer, names: Iterable[str]) -> int | None:
    numbers = (backend.token_to_id(name) for name in names)
    return next((number for number in numbers if number is not None), None)
