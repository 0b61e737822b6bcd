"""What a run took to reach a loss, from records written by hand."""

import dataclasses

import numpy as np
import pytest

from experiments.compare.at_equal import at_equal, sentence
from experiments.report.costs import keys, to_target
from experiments.report.runlog import RunLog, from_the_end
from experiments.report.virtual import Links
from lowcomm_jax.network import parse

STEP_SECONDS = 0.5
LINKS = Links(parse({"regions": 2, "bandwidth_gbps": 1.0, "delay_ms": 0.0}), STEP_SECONDS)


def run(*losses):
    """Evaluated at every second step; 100 tokens and 10 bytes a step, 7 more bytes at the end."""
    steps = [
        {"step": s, "tokens": 100 * s, "bytes_sent": [10 * s - 1, 10 * s + 1], "events": []}
        for s in range(1, 2 * len(losses) - 1)
    ]
    last = len(losses) - 1
    evals = [
        {"step": 2 * i, "tokens": 200 * i, "anchor": loss, "final": i == last}
        for i, loss in enumerate(losses)
    ]
    end = {"bytes_sent": [20 * last + 7] * 2}
    return RunLog("run", {}, steps, evals, [], np.ones(1), end)


def costs(target, *losses):
    return to_target(run(*losses), target, {"net": LINKS})


def test_everything_is_interpolated_between_the_two_evaluations():
    # Three quarters of the way from step 2 to step 4.
    assert costs(2.25, 4.0, 3.0, 2.0, 1.0) == {
        "steps": 3.5,
        "tokens": 350.0,
        "bytes_sent": 35.0,
        "seconds_on_net": pytest.approx(3.5 * STEP_SECONDS),
    }


def test_the_last_exchange_counts_at_the_last_evaluation():
    found = costs(1.5, 4.0, 3.0, 2.0, 1.0)
    assert (found["steps"], found["bytes_sent"]) == (5.0, (40 + 67) / 2)


def test_a_target_that_is_not_reached_costs_nothing_known():
    nothing = dict.fromkeys(keys({"net": LINKS}))
    assert costs(0.5, 4.0, 3.0) == nothing == costs(None, 4.0, 3.0)
    assert list(nothing) == ["steps", "tokens", "bytes_sent", "seconds_on_net"]


def test_who_sends_nothing_is_left_out_at_equal_bytes():
    alone = run(4.0, 3.0, 1.0)
    silent = [{**row, "bytes_sent": [0, 0]} for row in alone.steps]
    alone = dataclasses.replace(alone, steps=silent, end={"bytes_sent": [0, 0]})
    logs = {"alone": {0: alone}, "a": {0: run(4.0, 3.0, 2.0)}, "b": {0: run(4.0, 3.5, 2.5)}}
    by_time, by_bytes = at_equal(logs, {"net": LINKS})
    assert by_time["losses"] == {"alone": 1.0, "a": 2.0, "b": 2.5}
    assert by_bytes["losses"] == {"a": 2.0, "b": 2.5} and by_bytes["budget"] == 47
    assert "alone" not in sentence([by_bytes], "alone", 1)
    (left,) = at_equal({name: logs[name] for name in ("alone", "a")}, {"net": LINKS})
    assert left["of"] == "time"


def test_who_was_judged_on_other_texts_until_beyond_the_budget_is_left_out():
    long = run(4.0, 3.0, 2.0, 1.0, 0.5)
    logs = {name: {0: run(4.0, 3.0, loss)} for name, loss in (("a", 2.0), ("b", 2.5))}
    for kept, names in ((2, {"a", "b", "long"}), (3, {"a", "b"})):
        logs["long"] = {0: dataclasses.replace(long, evals=long.evals[kept:])}
        (by_bytes,) = at_equal(logs, {})
        assert by_bytes["budget"] == 47 and by_bytes["losses"].keys() == names


def test_evaluations_of_runs_are_paired_from_the_end():
    assert from_the_end([[1, 2, 3], [20, 30]]) == [(2, 20), (3, 30)]
    assert from_the_end([[], [1]]) == []
