"""Validation batches: every target once, with its document."""

import numpy as np
import pytest

from lowcomm_jax.data import DataConfig, load, per_document


@pytest.fixture(scope="module", params=["stream", "document"])
def loaded(request, tmp_path_factory):
    config = DataConfig(
        corpus="synthetic:words",
        seq_len=53,
        val_fraction=0.2,
        packing=request.param,
        limit=40,
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    return load(config)


def test_every_target_once_with_its_document(loaded):
    train, evaluation, tokenizer = loaded
    batches = evaluation.batches(7)
    n = -(-len(evaluation) // 7)
    assert batches["tokens"].shape == (n, 7, 54) and batches["mask"].shape == (n, 7, 53)
    assert batches["document"].shape == (n, 7, 53)
    assert ((batches["document"] >= 0) == (batches["mask"] == 1)).all()
    assert batches["mask"].sum() == evaluation.targets == train.summary["validation_tokens"]
    counted = per_document(np.ones(batches["mask"].shape), batches["document"])
    assert len(counted["document"]) == evaluation.documents
    ends = per_document(
        np.float64(batches["tokens"][..., 1:] == tokenizer.eos_id), batches["document"]
    )
    assert (ends["sum"] == 1).all()
    assert counted["count"].sum() == evaluation.targets


def test_a_document_can_be_read_back(loaded):
    _, evaluation, tokenizer = loaded
    batches = evaluation.batches(7)
    for number in np.unique(batches["document"])[1:3]:
        text = tokenizer.decode(batches["tokens"][..., 1:][batches["document"] == number])
        assert text.count(" ") == 256


def test_filling_and_limit(loaded):
    _, evaluation, tokenizer = loaded
    size = len(evaluation) + 3
    batch = evaluation.batches(size)
    assert batch["tokens"].shape[:2] == (1, size)
    assert (batch["tokens"][0, -3:] == tokenizer.pad_id).all()
    assert (batch["mask"][0, -3:] == 0).all() and (batch["document"][0, -3:] == -1).all()
    whole, part = evaluation.batches(4), evaluation.batches(4, limit=2)
    assert part["tokens"].shape[0] == 2
    for name, value in part.items():
        assert np.array_equal(value, whole[name][:2]) and value.dtype == whole[name].dtype
    for bad in ({"batch": 0}, {"batch": 2, "limit": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            evaluation.batches(**bad)


def test_validation_and_training_share_no_document(loaded):
    train, evaluation, _ = loaded
    rows = train.samples(0, train.epoch_size(0))["tokens"][0]
    trained = {row[k : k + 24].tobytes() for row in rows for k in range(30)}
    batches = evaluation.batches(7)["tokens"].reshape(-1, 54)
    assert not any(row[5:29].tobytes() in trained for row in batches[:20])


def test_sums_by_document_against_plain_python():
    document = np.array([[4, 4, 9], [9, -1, 2]], np.int32)
    values = np.array([[0.3, 1.1, 2.0], [5.0, 77.0, 0.7]], np.float32)
    got = per_document(values, document)
    assert got["document"].tolist() == [2, 4, 9] and got["count"].tolist() == [1, 2, 2]
    np.testing.assert_allclose(got["sum"], [0.7, 1.4, 7.0], rtol=1e-6)
    with pytest.raises(ValueError, match="differ in shape"):
        per_document(values, document[0])
