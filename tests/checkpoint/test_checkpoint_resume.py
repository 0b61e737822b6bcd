"""2N steps == N + save + restore in a new process + N, bit for bit, for every method."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint.checkpoint_cases import (
    HALF,
    METHODS,
    assert_same,
    bf16_params,
    make_engine,
    train,
    values,
)

from lowcomm_jax.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]


# Between them: payloads in flight, one of them landed in part; residuals; two levels of a codec in
# use; an anchor per region; weights by tokens; trainers that merge.
QUICK = ("cocodc", "dilocox", "adloco")
OTHERS = tuple(name for name in METHODS if name not in QUICK)


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"]
)
def test_resume_is_exact(tmp_path, names):
    """One test for many methods, since one new process continues all of them."""
    engines, states, halves = {}, {}, {}
    for name in names:
        engine = engines[name] = make_engine(name)
        state = train(engine, engine.init(bf16_params(name)), range(1, HALF + 1))
        halves[name] = values(state)
        with Checkpoints(tmp_path / name) as checkpoints:
            extra = {"position": [HALF, 2 * HALF], "name": name}
            method = engine.method
            checkpoints.save(state, extra=extra, config={"method": name}, method=method)
        states[name] = state
        check_what_is_saved(name, halves[name])
    with continue_elsewhere(tmp_path, names) as process:
        last = range(HALF + 1, 2 * HALF + 1)
        ends = {name: values(train(engines[name], states[name], last)) for name in names}
        assert process.wait() == 0
    for name in names:
        resumed = pickle.loads((tmp_path / f"{name}.pickle").read_bytes())
        step, extra, restored, end = resumed
        assert step == HALF, name
        assert extra == {"position": [HALF, 2 * HALF], "name": name}
        assert_same(restored, halves[name])
        assert_same(end, ends[name])
    if "adloco" in names:
        before, after = (trainers(run["adloco"]) for run in (halves, ends))
        assert len(before) == 2 and len(after) == 1 and after < before


def trainers(values):
    return {name[0] for name in values if name[0].isdigit()}


def continue_elsewhere(directory, names):
    script = Path(__file__).with_name("checkpoint_continue.py")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    arguments = [sys.executable, str(script), str(directory), *names]
    return subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": path})


def flights(half):
    return sorted({name.split("/")[1] for name in half if name.startswith("in_flight/")})


def check_what_is_saved(name, half):
    """The cases are the ones meant: guards the test above against saving too little."""
    if name == "streaming":
        assert len(flights(half)) == 2
    if name == "streaming_partly":
        moved = [k for k in flights(half) if half[f"in_flight/{k}/anchor_updated"]]
        assert moved
        assert not any(n.startswith(f"in_flight/{moved[0]}/payload") for n in half)
        assert any(n.startswith(f"in_flight/{moved[0]}/snapshot") for n in half)
        assert 0 < half[f"in_flight/{moved[0]}/takes_part"].sum() < 3
    if name == "dilocox":
        levels = [half[f"in_flight/{k}/level"] for k in flights(half)]
        assert (levels, half["counters/decided/level"]) == ([0], 1)
    if name in ("eager", "delayed", "cocodc"):
        assert flights(half), name
    if name == "cocodc":
        assert np.all(half["rate"] > 0)
    if name == "diloco":
        assert len(set(half["inner/tokens"].ravel())) == 3
    if name == "eager":
        assert half["anchor/a"].shape[0] == 3
    if name == "noloco":
        assert np.ptp(half["anchor/a"], axis=0).max() > 1e-3
        assert np.any(half["outer/0/momentum/a"] != 0)
    if name in ("ddp", "streaming_partly", "noloco", "sparseloco", "pulseloco", "muloco", "demo"):
        assert np.any(half["codec/0/residual/a"] != 0), name
    if name.startswith("sparta"):
        assert half["channels/sparta/takes_part"].all()
        assert all(np.any(v) for n, v in half.items() if n.startswith("channels/sparta/payload"))
    if name == "adloco":
        batches = [value for n, value in half.items() if n.endswith("/request")]
        assert len(batches) == 2 and len(set(map(int, batches))) == 2
        assert all(np.any(half[n]) for n in half if n.endswith("codec/0/residual/a"))
    if name == "as_coded":
        assert np.any(half["codec/0/feedback/residual/a"]) and np.any(half["codec/0/own/a"])
        assert len({x.tobytes() for x in half["anchor/a"]}) == 3
