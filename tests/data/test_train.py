"""Samples as a pure function of (config, region, trainer, number)."""

import dataclasses
import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lowcomm_jax.data import DataConfig, load

T = 37


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def config(folder):
    return DataConfig(
        corpus="synthetic:words",
        seq_len=T,
        seed=3,
        regions=3,
        trainers=2,
        sharding="dirichlet",
        alpha=0.7,
        limit=60,
        cache_dir=folder,
    )


@pytest.fixture(scope="module")
def train(config):
    return load(config)[0]


def digest(batch):
    joined = b"".join(np.ascontiguousarray(batch[name]).tobytes() for name in sorted(batch))
    return hashlib.sha256(joined).hexdigest()


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def test_shapes_and_dtypes(train):
    batch = train.samples(5, 4)
    assert batch["tokens"].shape == (3, 4, T + 1) and batch["tokens"].dtype == np.int32
    assert batch["mask"].shape == (3, 4, T) and batch["mask"].dtype == np.float32


def test_any_cut_of_the_stream_gives_the_same_samples(train):
    size = train.epoch_size(2)
    whole = train.samples(size - 9, 30)
    for at in (0, 1, 8, 9, 10, 29):
        one = train.samples(size - 9 + at, 1)
        assert equal(one, {k: v[:, at : at + 1] for k, v in whole.items()})


def test_a_new_process_continues_where_the_old_one_stopped(config, train):
    program = (
        "import hashlib, numpy as np\n"
        "from lowcomm_jax.data import DataConfig, load\n"
        f"train = load(DataConfig(**{vars(config) | {'cache_dir': str(config.cache_dir)}!r}))[0]\n"
        "def digest(batch):\n"
        "    parts = [np.ascontiguousarray(batch[k]).tobytes() for k in sorted(batch)]\n"
        "    return hashlib.sha256(b''.join(parts)).hexdigest()\n"
        "print(train.identity, digest(train.samples(7001, 33, trainer=1)),\n"
        "      digest(next(train.batches([5, 900, 31], 2))))\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    here = [
        train.identity,
        digest(train.samples(7001, 33, trainer=1)),
        digest(next(train.batches([5, 900, 31], 2))),
    ]
    assert run.stdout.split() == here


def test_samples_never_change(folder):
    """Fails when a library draws another order: stored positions then mean other samples."""
    train = load(DataConfig(corpus="synthetic:letters", regions=2, cache_dir=folder))[0]
    assert (
        digest(train.samples(4321, 17, regions=[1]))
        == "968ed6878c48136d665930c43ef14b76e657ad689f15e78eb315fe1b6b54b462"
    )


def test_an_epoch_holds_every_sequence_once_and_the_next_another_order(train):
    size = train.epoch_size(0)
    rows = [
        [row.tobytes() for row in train.samples(epoch * size, size)["tokens"][0]]
        for epoch in range(3)
    ]
    assert len(set(rows[0])) == size
    assert sorted(rows[0]) == sorted(rows[1]) == sorted(rows[2])
    assert rows[0] != rows[1] != rows[2] != rows[0]


def targets(batch):
    return int(batch["mask"].sum())


def test_shards_of_regions_and_trainers_hold_every_training_token_once(train):
    seen, total = set(), 0
    for region in range(3):
        in_region = 0
        for trainer in range(2):
            size = train.epoch_size(region, trainer)
            batch = train.samples(0, size, trainer=trainer, regions=[region])
            rows = {row.tobytes() for row in batch["tokens"][0]}
            assert not rows & seen
            seen |= rows
            in_region += targets(batch)
        assert in_region == train.summary["region_tokens"][region]
        total += in_region
    assert total == train.summary["tokens"] - train.summary["validation_tokens"]


def test_trainers_beyond_the_parts_share_a_part_in_another_order(train):
    size = train.epoch_size(1, 0)
    first, third = (
        train.samples(0, size, trainer=trainer, regions=[1])["tokens"][0] for trainer in (0, 2)
    )
    assert sorted(map(bytes, first)) == sorted(map(bytes, third))
    assert not np.array_equal(first, third)


def test_identity_names_what_the_samples_depend_on(config, train):
    def identity(**change):
        return load(dataclasses.replace(config, **change))[0].identity

    assert identity() == train.identity
    changes = (
        {"seed": 9},
        {"split_seed": 9},
        {"regions": 2},
        {"trainers": 1},
        {"alpha": 5.0},
        {"seq_len": 36},
        {"packing": "document"},
        {"tokenizer": "bpe:300"},
        {"limit": 59},
        {"corpus": "synthetic:letters"},
    )
    assert len({identity(**change) for change in changes} | {train.identity}) == len(changes) + 1


def test_seed_moves_the_order_and_not_the_validation(config):
    a = load(config)
    b = load(dataclasses.replace(config, seed=4))
    assert a[0].identity != b[0].identity
    assert not equal(a[0].samples(0, 20), b[0].samples(0, 20))
    assert equal(a[1].batches(8), b[1].batches(8))


def test_regions_start_where_they_are_told(train):
    drawn = train.samples([4, 0, 1000], 15)
    for region, start in enumerate([4, 0, 1000]):
        alone = train.samples(start, 15, regions=[region])
        assert equal(alone, {name: x[region : region + 1] for name, x in drawn.items()})
    some = train.samples([1000, 4], 15, regions=[2, 0])
    assert equal(some, {name: x[[2, 0]] for name, x in drawn.items()})
    rows = train.samples([4, 0, 1000], 15, rows=range(3, 9))
    assert equal(rows, {name: x[:, 3:9] for name, x in drawn.items()})


def test_batches_start_anywhere(train):
    drawn = train.samples([6, 7, 8], 12, trainer=1)
    got = list(train.batches([6, 7, 8], 2, steps=6, trainer=1))
    assert len(got) == 6
    for k, batch in enumerate(got):
        assert equal(batch, {name: x[:, 2 * k : 2 * k + 2] for name, x in drawn.items()})
    endless = train.batches(12, 3, rows=range(1, 2))
    assert equal(next(endless), train.samples(13, 1)) and equal(next(endless), train.samples(16, 1))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: t.samples(0, 1, regions=[3]), "region=3"),
        (lambda t: t.samples(0, 1, regions=[-1]), "region=-1"),
        (lambda t: t.samples(-1, 1), "start=-1"),
        (lambda t: t.samples(0, 1, trainer=-1), "trainer=-1"),
        (lambda t: t.samples([0, 0], 1), "one a region"),
        (lambda t: t.samples(0, 0), "0 samples"),
        (lambda t: t.batches(0, 0), "batch=0"),
        (lambda t: t.batches(0, 1, regions=[0, 7], steps=1), "region=7"),
        (lambda t: t.batches(-2, 1), "start=-2"),
    ],
)
def test_numbers_out_of_range(train, call, says):
    with pytest.raises(ValueError, match=says):
        call(train)
