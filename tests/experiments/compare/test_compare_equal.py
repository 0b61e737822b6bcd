"""Comparisons at equal bytes or time: how many steps each variant gets, and what it then spends."""

import functools
import json
import types

import pytest
from compare_cases import STEPS, compared, config, recording

from experiments.compare import equal as compare_equal
from experiments.compare.config import variant
from experiments.compare.main import compare

ONE_SEED = {"seeds": (0,), "panels": {}}


@pytest.mark.slow
def test_at_equal_bytes(root):
    code, result, shown = compared(root, root / "bytes", equal="bytes", **ONE_SEED)
    rows = result["variants"]
    assert code == 0
    # The baseline synchronises every 3 steps, the other every 6: it gets twice the steps.
    assert (rows["often"]["steps"], rows["seldom"]["steps"]) == (STEPS, 2 * STEPS)
    assert rows["seldom"]["bytes_sent"] == rows["often"]["bytes_sent"]
    assert result["apart"] == {"often": 0, "seldom": 0}
    assert "at equal bytes, against often" in shown
    again = compared(root, root / "bytes", equal="bytes", **ONE_SEED)
    assert again[1] == result  # nothing was trained again, nothing refused


@pytest.mark.slow
def test_at_equal_time(root):
    pace = {"equal": "time", "step_seconds": 0.01}
    code, result, _ = compared(root, root / "time", **pace, **ONE_SEED)
    assert code == 0
    rows, (network,) = result["variants"], result["networks"]
    seldom, often = (rows[name]["networks"][network]["seconds"] for name in ("seldom", "often"))
    assert rows["seldom"]["steps"] > STEPS and rows["seldom"]["steps"] % 6 == 0
    period = seldom / rows["seldom"]["steps"] * 6
    assert often - period < seldom <= often * 1.0001  # as many whole periods as fit
    assert result["apart"]["seldom"] == pytest.approx(seldom / often - 1)


def test_steps_that_differ_are_counted_to_where_the_budget_was_spent():
    """A step of 1, 2, 3 nominal steps; each sends 10 bytes, and the end 5 more."""
    sent, tokens = [10, 20, 30], [100, 300, 600]
    steps = [
        {"step": i, "tokens": t, "bytes_sent": [b, b], "trainers": {}}
        for i, (t, b) in enumerate(zip(tokens, sent), 1)
    ]
    run = types.SimpleNamespace(
        steps=steps,
        header={"tokens_per_step": 100, "regions": 2, "here": [0, 1]},
        evals=[{"final": True, "step": 3}],
        end={"step": 3, "bytes_sent": [35, 35]},
    )
    comparison = types.SimpleNamespace(config={"equal": "bytes"})
    reached = functools.partial(compare_equal._reached, comparison, run)
    assert [reached(budget) for budget in (5, 15, 20, 25, 35)] == [0, 1, 2, 3, 6]
    assert reached(45) == 9  # as in the second half: 10 bytes in 3 nominal steps


@pytest.mark.slow
@pytest.mark.parametrize("equal", ["bytes", "time"])
def test_growing_batches_end_near_the_budget(root, equal):
    policy = {"name": "norm", "start": 1, "cap": 4, "microbatches": 2}
    method = {"name": "adloco", "period": 3, "trainers": 2, "inner_batching": policy}
    growing = {"method": method, "adaptive": {"largest_microbatch": 1}}
    given = config(root, step_seconds=0.01, equal=equal, **ONE_SEED)
    with given.unlocked():
        given.variants.growing = variant("adloco", **growing)
    assert compare(given, root / equal, recording()) == 0
    result = json.loads((root / equal / "compare.json").read_text())
    assert abs(result["apart"]["growing"]) < 0.5
