"""Split and shards: every document in one place, in shares that are what they claim."""

import numpy as np
import pytest

from lowcomm_jax.data.mixing import salt
from lowcomm_jax.data.sharding import cut, cut_evenly, shard, shuffled, validation_mask


def population(seed, count=311, topics=7):
    rng = np.random.default_rng(seed)
    key = rng.integers(0, 1 << 63, count, dtype=np.uint64)
    topic = rng.integers(0, topics, count).astype(np.int32)
    length = np.maximum(rng.lognormal(5, 1.2, count), 2).astype(np.int64)
    return key, topic, length


def deal(kind, seed, regions, alpha=0.3, **sizes):
    key, topic, length = population(seed, **sizes)
    training = np.flatnonzero(~validation_mask(key, 0.1, 0))
    shards, found = shard(kind, training, key, topic, length, regions, alpha, seed)
    return shards, found, training, topic, length


@pytest.mark.parametrize("kind", ["iid", "topic", "dirichlet"])
@pytest.mark.parametrize("regions", [1, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_every_training_document_is_in_exactly_one_region(kind, regions, seed):
    shards, found, training, _, _ = deal(kind, seed, regions)
    assert found == [] and len(shards) == regions and all(len(part) for part in shards)
    assert np.array_equal(np.sort(np.concatenate(shards)), training)


@pytest.mark.parametrize("kind", ["iid", "topic", "dirichlet"])
def test_shards_depend_on_the_seed_alone(kind):
    key, topic, length = population(0)
    everyone = np.arange(len(key))
    first, _ = shard(kind, everyone, key, topic, length, 3, 0.3, 11)
    again, _ = shard(kind, everyone, key, topic, length, 3, 0.3, 11)
    other, _ = shard(kind, everyone, key, topic, length, 3, 0.3, 12)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(set(a) != set(b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_iid_regions_have_equal_tokens_and_all_topics(seed):
    shards, _, _, topic, length = deal("iid", seed, 3)
    tokens = np.array([length[part].sum() for part in shards])
    # A boundary falls in the middle of a document: half a document off at each end.
    assert np.abs(tokens - tokens.mean()).max() <= length.max()
    assert all(len(np.unique(topic[part])) == 7 for part in shards)


@pytest.mark.parametrize("seed", range(5))
def test_a_topic_lives_in_one_region(seed):
    shards, _, _, topic, length = deal("topic", seed, 3)
    owners = [set(topic[part].tolist()) for part in shards]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 7
    tokens = np.array([length[part].sum() for part in shards])
    assert tokens.max() < 2 * tokens.min()


def test_dirichlet_skew_follows_alpha():
    """Moments of a symmetric Dirichlet over R: mean 1/R, variance (R-1) / (R^2 (R alpha + 1))."""
    regions, topics = 3, 40
    key, topic, _ = population(1, count=4_000, topics=topics)
    everyone, length = np.arange(4_000), np.full(4_000, 17)
    for alpha in (0.3, 2.0, 50.0):
        shares = []
        for seed in range(12):
            shards, _ = shard("dirichlet", everyone, key, topic, length, regions, alpha, seed)
            counts = np.stack([np.bincount(topic[part], minlength=topics) for part in shards])
            shares.append(counts / counts.sum(0))
        share = np.stack(shares)
        variance = (regions - 1) / (regions**2 * (regions * alpha + 1))
        assert abs(share.mean() - 1 / regions) < 1e-12
        # 960 free shares: the sampling error of the variance is about five percent.
        assert share.var() == pytest.approx(variance, rel=0.15)


def test_split_is_stable_when_documents_come_and_go():
    key, _, _ = population(3, count=2_000)
    whole = validation_mask(key, 0.07, 5)
    kept = np.arange(0, 2_000, 3)
    assert np.array_equal(validation_mask(key[kept], 0.07, 5), whole[kept])
    assert abs(whole.mean() - 0.07) < 4 * np.sqrt(0.07 * 0.93 / 2_000)
    assert not np.array_equal(whole, validation_mask(key, 0.07, 6))
    # A larger fraction only adds documents.
    assert (validation_mask(key, 0.2, 5) | ~whole).all()


def test_split_never_leaves_a_side_empty_and_keeps_equal_texts_together():
    key = np.array([5, 9, 9, 1], np.uint64)
    for fraction in (1e-12, 0.5, 1 - 1e-12):
        for seed in range(8):
            chosen = validation_mask(key, fraction, seed)
            assert 0 < chosen.sum() < 4 and chosen[1] == chosen[2]


def test_cut_against_plain_python():
    length, share = [3, 10, 1, 1, 7, 2, 8], [0.2, 0.5, 0.3]
    part, before = [], 0
    for n in length:
        middle, p = before + n / 2, 0
        while p < 2 and middle >= sum(share[: p + 1]) * sum(length):
            p += 1
        part.append(p)
        before += n
    assert cut(np.array(length), np.array(share)).tolist() == part
    assert sorted(set(part)) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(30))
def test_even_cut_leaves_no_part_empty(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 12))
    parts = int(rng.integers(1, count + 1))
    length = (rng.pareto(0.5, count) * 10).astype(np.int64) + 2
    part = cut_evenly(length, parts)
    assert (np.diff(part) >= 0).all() and sorted(set(part.tolist())) == list(range(parts))


def test_shuffled_is_a_permutation_by_content():
    key, _, _ = population(0, count=50)
    rows = np.arange(10, 50)
    order = shuffled(rows, key, "x", 1)
    assert sorted(order) == sorted(rows) and not np.array_equal(order, rows)
    assert not np.array_equal(order, shuffled(rows, key, "x", 2))
    # The order of the documents that remain does not change when one goes.
    assert shuffled(rows[1:], key, "x", 1).tolist() == [n for n in order if n != 10]


def test_too_many_regions():
    _, found, *_ = deal("topic", 0, 8)
    assert "only 7 topics" in found[0]
    _, found, *_ = deal("topic", 0, 400)
    assert len(found) == 2 and "training documents" in found[0]
    _, found, *_ = deal("dirichlet", 0, 200, alpha=0.001)
    assert "raise alpha" in found[0]


def test_a_region_left_empty_is_drawn_for_again():
    """With few documents and a small alpha many draws leave a region empty; the next are used."""
    keys, topics, lengths = population(1, count=12, topics=2)
    documents = np.arange(12)
    first = []
    for seed in range(30):
        shards, violations = shard("dirichlet", documents, keys, topics, lengths, 3, 0.3, seed)
        assert violations == [] and all(len(part) for part in shards)
        row = shuffled(documents, keys, "shard", seed)
        rng = np.random.Generator(np.random.PCG64(salt("dirichlet", seed, 0)))
        found = np.zeros(len(row), int)
        for topic in np.unique(topics[row]):
            mine = topics[row] == topic
            found[mine] = cut(lengths[row][mine], rng.dirichlet(np.full(3, 0.3)))
        first.append(len(np.unique(found)) == 3)
        if first[-1]:
            for region in range(3):
                assert shards[region].tolist() == row[found == region].tolist()
    assert any(first) and not all(first)


def test_a_document_belongs_where_its_middle_lies():
    """On the boundary itself: to the part behind it."""
    assert cut(np.array([1, 2, 1]), np.array([0.5, 0.5])).tolist() == [0, 1, 1]
    assert cut(np.array([3, 1]), np.array([0.4, 0.6])).tolist() == [0, 1]
