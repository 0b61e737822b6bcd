"""The choice of participants against every possible choice, tried one by one."""

import itertools

import numpy as np
import pytest

from lowcomm_jax.rounds.agreed_round import participants


def holding(*regions: int) -> dict[int, str]:
    return {r: f"digest {r}" for r in regions}


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param({0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]}, [0, 1, 2], id="all is well"),
        pytest.param({0: [0, 2], 1: [0, 1, 2], 2: [0, 2]}, [0, 2], id="1 arrives damaged"),
        pytest.param({0: [0, 2], 1: [1], 2: [0, 2]}, [0, 2], id="1 trains something else"),
        pytest.param({0: [0, 1], 1: [0, 1, 2], 2: [0, 1, 2]}, [0, 1], id="2 came too late for 0"),
        pytest.param({0: [0], 1: [0, 1]}, [0], id="two of them: 1 arrives damaged"),
        pytest.param({0: [0], 1: [1]}, [0], id="two of them, no link: one goes on"),
        pytest.param({1: [0, 1, 2]}, [0, 1, 2], id="the others are late with saying so"),
        pytest.param({}, [0, 1, 2], id="nobody has said anything"),
    ],
)
def test_written_out(held, expected):
    regions = sorted(held.keys() | {0, 1} | ({2} if any(2 in h for h in held.values()) else set()))
    regions = [0, 1, 2] if not held else regions
    assert participants(holding(*regions), {r: holding(*h) for r, h in held.items()}) == expected


def test_another_digest_is_another_payload():
    assert participants(holding(0, 1), {0: holding(0) | {1: "of an earlier job"}}) == [0]


def test_everyone_who_takes_part_holds_all_and_nobody_could_be_added():
    """Agreement holds for any holdings, and no region is left out for nothing."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, 6))
        has = rng.random((count, count)) < 0.8
        np.fill_diagonal(has, True)
        held = {by: holding(*np.flatnonzero(has[by])) for by in range(count)}
        chosen = participants(holding(*range(count)), held)
        whole = [
            set(group)
            for n in range(count + 1)
            for group in itertools.combinations(range(count), n)
            if has[np.ix_(group, group)].all()
        ]
        assert set(chosen) in whole and chosen
        if set(range(count)) in whole:
            assert chosen == list(range(count))
