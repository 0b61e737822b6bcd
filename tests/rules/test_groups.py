"""Groups: partitions of the regions, known to all, every pair equally likely."""

import itertools
from collections import Counter

import numpy as np
import pytest

import lowcomm_jax as lc
from lowcomm_jax.rules.topology import Gossip, member_table

ROUNDS = 300


@pytest.mark.parametrize("regions", [2, 3, 4, 5, 8, 9, 16])
def test_a_round_is_a_perfect_matching(regions):
    for number in range(ROUNDS):
        found = lc.topology.Gossip(2, 7).groups(number, regions)
        assert sorted(itertools.chain(*found)) == list(range(regions))
        assert Counter(map(len, found)) == Counter({2: regions // 2, 1: regions % 2})
        assert all(list(group) == sorted(group) for group in found)


@pytest.mark.parametrize(("regions", "size"), [(6, 3), (7, 3), (8, 4), (10, 4), (9, 3), (5, 5)])
def test_larger_groups_leave_the_remainder_out(regions, size):
    alone = Counter()
    for number in range(Gossip(size).count(regions)):
        found = Gossip(size).partition(number, regions)
        assert sorted(itertools.chain(*found)) == list(range(regions))
        lengths = {size: regions // size, 1: regions % size}
        assert Counter(map(len, found)) == Counter({k: v for k, v in lengths.items() if v})
        alone.update(group[0] for group in found if len(group) == 1)
    if regions % size:
        assert len(set(alone.values())) == 1 and len(alone) == regions, "all sit out equally often"


def meetings(gossip, regions):
    """How often each pair meets over all partitions, [R, R] above the diagonal."""
    met = np.zeros((regions, regions), int)
    for number in range(gossip.count(regions)):
        for group in gossip.partition(number, regions):
            for pair in itertools.combinations(group, 2):
                met[pair] += 1
    return met[np.triu_indices(regions, 1)]


@pytest.mark.parametrize("regions", [2, 3, 4, 5, 8, 11, 16, 31])
@pytest.mark.parametrize("seed", [0, 5])
def test_every_pair_meets_in_exactly_one_matching(regions, seed):
    gossip = Gossip(2, seed)
    assert gossip.count(regions) == (regions - 1 if regions % 2 == 0 else regions)
    assert set(meetings(gossip, regions)) == {1}


@pytest.mark.parametrize(
    ("regions", "size", "within"),
    # With within = 0 the search finds partitions that are exactly even.
    [(8, 4, 0), (9, 3, 0), (16, 4, 0), (12, 4, 0), (7, 3, 0), (6, 3, 1), (10, 4, 1), (27, 3, 0)],
)
def test_larger_groups_are_about_even(regions, size, within):
    gossip = Gossip(size)
    met = meetings(gossip, regions)
    in_full_groups = regions // size * size
    mean = gossip.count(regions) * in_full_groups * (size - 1) / (regions * (regions - 1))
    assert met.mean() == pytest.approx(mean)
    assert np.abs(met - mean).max() <= within + 1e-9


def test_every_pair_is_drawn_equally_often():
    """6 regions, 15 pairs, 3 of them a round: a chi-square far from suspicious."""
    counted = Counter()
    rounds = 5000
    for number in range(rounds):
        counted.update(lc.topology.Gossip(2, 3).groups(number, 6))
    expected = rounds * 3 / 15
    assert len(counted) == 15
    square = sum((n - expected) ** 2 / expected for n in counted.values())
    # The five matchings are what is drawn: 3 times the statistic of 4 degrees of freedom.
    assert square < 3 * 18.5  # 99.9 %


def test_the_draw_is_pure_and_depends_on_seed_and_round():
    drawn = [lc.topology.Gossip(2, 11).groups(n, 8) for n in range(40)]
    assert drawn == [lc.topology.Gossip(2, 11).groups(n, 8) for n in range(40)]
    assert len({tuple(groups) for groups in drawn}) == 7
    assert drawn != [lc.topology.Gossip(2, 12).groups(n, 8) for n in range(40)]


def test_the_draw_never_changes():
    """Regions of other versions must agree: pinned values of the raw generator."""
    assert lc.topology.Gossip(2, 0).groups(0, 8) == [(0, 4), (1, 6), (2, 7), (3, 5)]
    assert lc.topology.Gossip(3, 4).groups(9, 7) == [(0, 2, 3), (1, 5, 6), (4,)]


def test_member_table_by_hand():
    table = member_table([(0, 2, 5), (1,), (3, 4)], 3)
    expected = [[0, 2, 5], [1, -1, -1], [0, 2, 5], [3, 4, -1], [3, 4, -1], [0, 2, 5]]
    assert table.tolist() == expected


def test_a_thousand_regions_are_drawn_at_once():
    assert len(lc.topology.Gossip(2, 0).groups(5, 1000)) == 500


def test_refusals():
    found = " ".join(Gossip(5, -2).violations(4))
    for part in ("seed=-2", "group_size=5", "groups of 2 to 4"):
        assert part in found
    assert "regions=1" in " ".join(Gossip(2).violations(1))
