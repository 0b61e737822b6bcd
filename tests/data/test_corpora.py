"""Corpora: order, topics, cutting, what is left out, and the generated ones' known entropy."""

import importlib.util
import itertools
import math
import os
import random
import re

import numpy as np
import pytest

from lowcomm_jax.data import DataConfig, open_corpus
from lowcomm_jax.data.corpora.base import Document, UnreadableFile
from lowcomm_jax.data.corpora.files import (
    LONGEST_SECTION,
    LONGEST_WHOLE_FILE,
    SECTION,
    cut_into_sections,
)
from lowcomm_jax.data.documents import materialise


def entropy_per_character(corpus):
    """Nats per character of the source, averaged over topics: no model's loss is lower.

    Apart from the first symbol, the end of the document and the unknown topic.
    """
    length_S, rates = np.array([len(symbol) for symbol in corpus.symbols], np.float64), []
    for p_SxS in corpus.transitions() / (1 << 16):
        pi_S = np.full(len(corpus.symbols), 1.0 / len(corpus.symbols))
        for _ in range(1_000):
            pi_S = pi_S @ p_SxS
        entropy_S = -(p_SxS * np.log(p_SxS)).sum(-1)
        rates.append((pi_S @ entropy_S) / (pi_S @ length_S))
    return float(np.mean(rates))


def read(spec, **columns):
    corpus, found = open_corpus(DataConfig(spec, **columns))
    assert found == []
    return list(corpus.documents())


def fault(spec):
    corpus, found = open_corpus(DataConfig(spec))
    assert corpus is None
    return " ".join(found)


@pytest.mark.parametrize("seed", range(20))
def test_sections_join_to_the_text(seed):
    rng = random.Random(seed)
    text = "".join(rng.choices(["word ", "\n", "\n\n", "x" * 900, "é"], k=rng.randrange(1, 400)))
    sections = cut_into_sections(text)
    assert "".join(sections) == text
    assert all(SECTION < len(part) <= LONGEST_SECTION for part in sections[:-1])


def test_sections_end_at_blank_lines_else_at_the_longest_length():
    paragraph = "p" * 1_500 + "\n \n"
    assert cut_into_sections(paragraph * 4) == [paragraph * 2, paragraph * 2]
    assert list(map(len, cut_into_sections("x" * 20_000))) == [8_000, 8_000, 4_000]


def test_folder_order_topics_and_long_files(tmp_path):
    for name in ("b/deep/two.txt", "b/one.txt", "a.md", ".hidden/no.txt", "c/bad.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c/bad.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.txt").write_text("y" * (LONGEST_WHOLE_FILE + 1))
    found = read(f"text:{tmp_path}")
    documents = [d for d in found if isinstance(d, Document)]
    assert [tuple(d) for d in documents[:3]] == [
        ("a.md", "a"),
        ("b/deep/two.txt", "b"),
        ("b/one.txt", "b"),
    ]
    assert {d.topic for d in documents[3:]} == {"d"} and len(documents) > 5
    [bad] = [d for d in found if isinstance(d, UnreadableFile)]
    assert bad == ("c/bad.bin", "not UTF-8 (invalid start byte at byte 0)")


def alike(folder, text, name):
    """A file whose name, size and time of last change are those of the other folder's."""
    folder.mkdir()
    (folder / name).write_text(text)
    os.utime(folder / name, ns=(10**18, 10**18))


@pytest.mark.parametrize("spec", ["text:{}", "text:{}/a.txt"])
def test_folders_whose_files_look_alike_keep_their_own_documents(tmp_path, spec):
    for name in ("one", "two"):
        alike(tmp_path / name, name, "a.txt")
    for name in ("one", "two", "one"):
        corpus, _ = open_corpus(DataConfig(spec.format(tmp_path / name)))
        assert list(materialise(corpus, None, tmp_path / "cache").texts()) == [name]
    assert len(list((tmp_path / "cache/documents").iterdir())) == 2


@pytest.mark.parametrize("kind", ["parquet", "arrayrecord"])
def test_fingerprints_of_columns_hold_the_folder(tmp_path, kind, monkeypatch):
    """And not how it was written: a relative path names the same files."""
    pytest.importorskip("pyarrow" if kind == "parquet" else "array_record")
    for name in ("one", "two"):
        alike(tmp_path / name, name, "a.data")
    monkeypatch.chdir(tmp_path)
    one, two, again = (
        open_corpus(DataConfig(f"{kind}:{folder}/*.data"))[0].fingerprint()
        for folder in (tmp_path / "one", tmp_path / "two", "one")
    )
    assert one == again != two


def test_digests_of_documents_do_not_hold_the_folder(tmp_path):
    """They must be equal between machines, which keep a corpus at different places."""
    digests = set()
    for name in ("one", "two"):
        alike(tmp_path / name, "same", "a.txt")
        corpus, _ = open_corpus(DataConfig(f"text:{tmp_path / name}"))
        digests.add(materialise(corpus, None, tmp_path / "cache").digest)
    assert len(digests) == 1


def test_single_file_is_cut(tmp_path):
    (tmp_path / "poem.txt").write_text(("line\n" * 500 + "\n") * 3)
    documents = read(f"text:{tmp_path / 'poem.txt'}")
    assert len(documents) == 3 and {d.topic for d in documents} == {"poem"}


def test_python_reads_the_library_without_packages_and_tests():
    corpus, _ = open_corpus(DataConfig("python"))
    files = [file.relative_to(corpus.root).parts for file in corpus.files()]
    assert files == sorted(files) and len(files) > 400
    folders = {part for parts in files for part in parts[:-1]}
    assert folders.isdisjoint({"site-packages", "dist-packages", "test", "tests"})
    topics = {d.topic for d in corpus.documents()}
    assert {"modules", "json", "email", "asyncio"} <= topics
    assert corpus.fingerprint() == open_corpus(DataConfig("python"))[0].fingerprint()


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"body": ["one", None, "größer"], "label": [7, 8, 9]})
    pq.write_table(table, tmp_path / "b.parquet")
    pq.write_table(table.slice(0, 1), tmp_path / "a.parquet")
    spec = f"parquet:{tmp_path}/*.parquet"
    documents = read(spec, text_column="body", topic_column="label")
    assert list(map(tuple, documents)) == [("one", "7"), ("one", "7"), ("", "8"), ("größer", "9")]
    assert {d.topic for d in read(spec, text_column="body")} == {"a", "b"}
    with pytest.raises(ValueError, match=r"no column text; set text_column .* body, label"):
        read(spec)


@pytest.mark.parametrize(
    ("column", "held"),
    [([[1, 2], [3]], "list of int"), ([["a"], ["b"]], "list of str"), ([0, 7], "int")],
)
def test_a_column_without_text_is_refused_at_its_first_row(tmp_path, column, held, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": column}), tmp_path / "train.parquet")
    specs = [f"parquet:{tmp_path}/train.parquet"]
    if importlib.util.find_spec("datasets") is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        specs.append(f"hf:{tmp_path}")
    for spec in specs:
        corpus, _ = open_corpus(DataConfig(spec))
        with pytest.raises(ValueError, match=f"column text holds {held}, not text; set text_col"):
            materialise(corpus, None, tmp_path / "cache")


def test_arrayrecord(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    texts = ["first", "zweites Stück", "third"]
    writer = module.ArrayRecordWriter(str(tmp_path / "part.array_record"), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    documents = read(f"arrayrecord:{tmp_path}/*.array_record")
    assert list(map(tuple, documents)) == [(text, "part") for text in texts]


@pytest.mark.filterwarnings("default")
def test_hugging_face_streams_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = pa.table({"text": [f"row {i}" for i in range(9)], "kind": [i % 2 for i in range(9)]})
    (tmp_path / "set").mkdir()
    pq.write_table(rows, tmp_path / "set/train-00000.parquet")
    spec = f"hf:{tmp_path / 'set'}"
    assert [tuple(d) for d in read(spec, topic_column="kind")][:2] == [
        ("row 0", "0"),
        ("row 1", "1"),
    ]
    corpus, _ = open_corpus(DataConfig(spec))
    kept = materialise(corpus, 4, tmp_path / "cache")
    assert list(kept.texts()) == ["row 0", "row 1", "row 2", "row 3"]
    with pytest.raises(ValueError, match="no column wrong"):
        read(spec, text_column="wrong")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"x")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert r"lowcomm_jax[hf]" in fault("hf:some/set")
    assert "needs pyarrow" in fault(f"parquet:{tmp_path}/x.parquet")
    assert "needs array_record" in fault(f"arrayrecord:{tmp_path}/x.parquet")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ([np.arange(3)], "corpus is no string but list: .*docs/data.md"),
        ("nothing", "is unknown: use one of python"),
        ("python:other", "python:tests"),
        ("text:/no/such/place", "no such path"),
        ("text:", "no such path"),
        ("parquet:/no/such/*.parquet", "no file matches"),
        ("arrayrecord:", "no file matches"),
        ("synthetic:none", "synthetic:words"),
        ("hf:", "hf:NAME"),
    ],
)
def test_faults_name_their_fix(spec, says):
    assert re.search(says, fault(spec))


GENERATED = {
    "synthetic:letters": "6cd53b1b0381d8f467d741182e44a3a8f4cb1481178e43aeb2a05c908c513c48",
    "synthetic:words": "b43a98cbb5c14f30aeaf13b82fa251951a0249850880520966a47e25c83ecb3b",
}


@pytest.mark.parametrize("spec", GENERATED)
def test_generated_text_never_changes(spec, tmp_path):
    corpus, _ = open_corpus(DataConfig(spec))
    documents = materialise(corpus, None, tmp_path)
    assert documents.digest == GENERATED[spec]
    assert len(documents) == 512 and len(documents.topics) == 8


@pytest.mark.parametrize("spec", GENERATED)
def test_generated_text_has_the_entropy_it_claims(spec):
    corpus, _ = open_corpus(DataConfig(spec))
    number = {symbol.strip(): k for k, symbol in enumerate(corpus.symbols)}
    weights = corpus.transitions()
    assert (weights.sum(-1) == 1 << 16).all() and weights.min() >= 1
    words = spec.endswith("words")
    nats, characters = 0.0, 0
    for document in list(corpus.documents())[:160]:
        parts = document.text.split() if words else [c.strip() for c in document.text]
        path = [number[part] for part in parts]
        p = weights[int(document.topic.removeprefix("topic"))] / (1 << 16)
        nats -= sum(math.log(p[a, b]) for a, b in itertools.pairwise(path))
        characters += len(document.text) - len(corpus.symbols[path[0]])
    claimed = entropy_per_character(corpus)
    assert abs(nats / characters - claimed) < 0.01 * claimed
    assert claimed < 0.7 * math.log(27)


def test_generated_topics_differ():
    corpus, _ = open_corpus(DataConfig("synthetic:letters"))
    p = corpus.transitions() / (1 << 16)
    distance = np.abs(p[:, None] - p[None]).sum(-1).mean(-1) / 2
    assert distance[~np.eye(8, dtype=bool)].min() > 0.5
