"""From config to data: one message for all faults, a cold start and a warm one."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from lowcomm_jax.data import DataConfig, documents, load
from lowcomm_jax.data.cache import cache_folder
from lowcomm_jax.data.corpora.files import FileCorpus


@pytest.fixture
def config(tmp_path):
    texts = tmp_path / "texts"
    for topic in "abc":
        (texts / topic).mkdir(parents=True)
        for k in range(5):
            (texts / topic / f"{k}.txt").write_text(f"{topic}{k} größer 👩‍🚀 " * 20)
    (texts / "a" / "blank.txt").write_text(" \n")
    return DataConfig(
        corpus=f"text:{texts}", seq_len=32, val_fraction=0.2, cache_dir=tmp_path / "cache"
    )


def test_all_violations_in_one_message():
    bad = DataConfig(
        corpus="text:/no/such/place",
        tokenizer="bpe:7",
        seq_len=0,
        seed=-1,
        split_seed=1 << 64,
        regions=0,
        trainers=0,
        sharding="some",
        alpha=0.0,
        val_fraction=1.0,
        packing="some",
        limit=1,
    )
    with pytest.raises(ValueError) as raised:
        load(bad)
    lines = str(raised.value).splitlines()[1:]
    names = ("corpus=", "tokenizer=", "seq_len=", "seed=", "split_seed=", "regions=", "trainers=")
    names += ("sharding=", "alpha=", "val_fraction=", "packing=", "limit=")
    for name in names:
        assert sum(line.startswith(f"- {name}") for line in lines) == 1, name
    assert len(lines) == len(names)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"regions": 4, "sharding": "topic"}, "only 3 topics"),
        ({"regions": 90}, "training documents"),
        ({"regions": 2, "trainers": 12}, "trainers=12"),
        ({"tokenizer": "words"}, "bytes, bpe:VOCAB"),
        ({"tokenizer": "file:/no/such.json"}, "no such file"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"corpus": [np.arange(9)], "tokenizer": None}, "(?s)tokenizer=None.*corpus is no string"),
    ],
)
def test_single_violations(config, change, says):
    with pytest.raises(ValueError, match=says):
        load(dataclasses.replace(config, **change))


def test_a_corpus_needs_two_different_documents(tmp_path):
    (tmp_path / "t").mkdir()
    spec = DataConfig(corpus=f"text:{tmp_path / 't'}", cache_dir=tmp_path / "c")
    with pytest.raises(ValueError, match="no documents"):
        load(spec)
    for name in "ab":
        (tmp_path / "t" / name).write_text("the same")
    with pytest.raises(ValueError, match=r"1 different document\(s\).*cut at blank lines, 2000"):
        load(spec)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_warm_start_reads_no_corpus_and_gives_the_same(config, tokenizer, monkeypatch):
    config = dataclasses.replace(config, tokenizer=tokenizer, regions=3, sharding="topic")
    cold = load(config)

    def refuse(self):
        raise AssertionError("read again")

    monkeypatch.setattr(FileCorpus, "documents", refuse)
    warm = load(config)
    assert warm[0].identity == cold[0].identity and warm[0].summary == cold[0].summary
    first, again = cold[0].samples(0, 50), warm[0].samples(0, 50)
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_a_changed_file_is_read_again(config):
    before = load(config)[0].summary
    path = config.corpus.removeprefix("text:")
    with open(f"{path}/b/2.txt", "a") as file:
        file.write("more")
    after = load(config)[0].summary
    assert after["corpus_digest"] != before["corpus_digest"]
    assert after["bytes"] == before["bytes"] + 4


def test_files_that_are_not_utf8_are_counted_and_named(config):
    folder = Path(config.corpus.removeprefix("text:"))
    (folder / "c" / "latin.txt").write_bytes("größer".encode("latin1"))
    (folder / "c" / "utf16.txt").write_bytes("text".encode("utf-16"))
    for _ in range(2):  # from the corpus, and from the cache
        found = load(config)[0].summary
        assert found["unreadable_left_out"] == 2 and found["documents"] == 15
        assert found["unreadable_names"] == [
            "c/latin.txt: not UTF-8 (invalid start byte at byte 2)",
            "c/utf16.txt: not UTF-8 (invalid start byte at byte 0)",
        ]
    for file in folder.rglob("*.txt"):
        file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"no documents \(18 left out, as a/0.txt: not UTF-8"):
        load(config)


def test_summary_counts(config):
    train, evaluation, tokenizer = load(dataclasses.replace(config, regions=3, sharding="topic"))
    s = train.summary
    assert s["documents"] == 15 and s["blank_documents_dropped"] == 1
    assert s["topics"] == ["a", "b", "c"] and s["vocab_size"] == tokenizer.vocab_size
    assert s["tokens"] == s["bytes"] + 15
    assert sum(s["region_documents"]) + s["validation_documents"] == 15
    assert evaluation.documents == s["validation_documents"]
    matrix = np.array(s["region_topic_tokens"])
    assert (np.count_nonzero(matrix, axis=0) == 1).all()
    assert matrix.sum(1).tolist() == s["region_tokens"]


def test_unicode_survives_the_whole_way(config):
    train, _, tokenizer = load(config)
    text = tokenizer.decode(train.samples(0, train.epoch_size(0))["tokens"][0, :, 1:].reshape(-1))
    assert "größer 👩‍🚀" in text


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / "lowcomm_jax"
    assert cache_folder(tmp_path / "x") == tmp_path / "x"


@pytest.mark.filterwarnings("default")
def test_streams_have_a_default_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "set").mkdir()
    rows = pa.table({"text": [f"row {i}" for i in range(30)]})
    pq.write_table(rows, tmp_path / "set/train-00000.parquet")
    spec = DataConfig(corpus=f"hf:{tmp_path / 'set'}", seq_len=8, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(sys.modules["lowcomm_jax.data.load"], "HF_DEFAULT_LIMIT", 11)
    assert load(spec)[0].summary["documents"] == 11
    assert load(dataclasses.replace(spec, limit=13))[0].summary["documents"] == 13


def test_progress_tells_of_what_is_not_in_the_cache(config, monkeypatch):
    monkeypatch.setattr(documents, "_TELL_SECONDS", 0)
    config = dataclasses.replace(config, tokenizer="bpe:300")
    told = []
    load(config, progress=lambda *now: told.append(now))
    by_kind = {what: [now for now in told if now[0] == what] for what, *_ in told}
    assert list(by_kind) == ["reads documents", "reads text for the tokenizer", "tokenizes"]
    # 15 documents hold text; how many a corpus has is not known before it is read.
    assert by_kind["reads documents"][-1][1:] == (16, None)
    assert by_kind["tokenizes"][-1][1:] == (15, 15)
    told.clear()
    load(config, progress=lambda *now: told.append(now))
    assert not told
