"""2N steps == N + save + restore in a new process + N, bit for bit, for every method."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
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


def test_resume_is_exact(tmp_path):
    """One test for all methods, since one new process continues all of them."""
    engines, states, halves = {}, {}, {}
    for name in METHODS:
        engine = engines[name] = make_engine(name)
        state = train(engine, engine.init(bf16_params()), range(1, HALF + 1))
        halves[name] = values(state)
        with Checkpoints(tmp_path / name) as checkpoints:
            extra = {"position": [HALF, 2 * HALF], "name": name}
            method = engine.method
            checkpoints.save(state, extra=extra, config={"method": name}, method=method)
        states[name] = state
    check_what_is_in_flight(halves)
    with continue_elsewhere(tmp_path) as process:
        last = range(HALF + 1, 2 * HALF + 1)
        ends = {name: values(train(engines[name], states[name], last)) for name in METHODS}
        assert process.wait() == 0
    for name in METHODS:
        resumed = pickle.loads((tmp_path / f"{name}.pickle").read_bytes())
        step, extra, restored, end = resumed
        assert step == HALF, name
        assert extra == {"position": [HALF, 2 * HALF], "name": name}
        assert_same(restored, halves[name])
        assert_same(end, ends[name])
    trainers = [{name[0] for name in run["adloco"] if name[0].isdigit()} for run in (halves, ends)]
    assert [len(numbers) for numbers in trainers] == [2, 1] and trainers[1] < trainers[0]


def continue_elsewhere(directory):
    script = Path(__file__).with_name("checkpoint_continue.py")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    arguments = [sys.executable, str(script), str(directory), *METHODS]
    return subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": path})


def flights(half):
    return sorted({name.split("/")[1] for name in half if name.startswith("in_flight/")})


def check_what_is_in_flight(halves):
    """The cases are the ones meant: guards the test above against saving too little."""
    assert len(flights(halves["streaming"])) == 2
    partly = halves["streaming_partly"]
    moved = [k for k in flights(partly) if partly[f"in_flight/{k}/moved"]]
    assert moved
    assert not any(name.startswith(f"in_flight/{moved[0]}/payload") for name in partly)
    assert any(name.startswith(f"in_flight/{moved[0]}/snapshot") for name in partly)
    assert 0 < partly[f"in_flight/{moved[0]}/takes_part"].sum() < 3
    for name in ("eager", "delayed", "cocodc"):
        assert flights(halves[name]), name
    assert np.all(halves["cocodc"]["rate"] > 0)
    assert len(set(halves["diloco"]["inner/tokens"].ravel())) == 3
    assert halves["eager"]["anchor/a"].shape[0] == 3
    assert np.ptp(halves["noloco"]["anchor/a"], axis=0).max() > 1e-3
    assert np.any(halves["noloco"]["outer/0/momentum/a"] != 0)
    for name in ("ddp", "streaming_partly", "noloco", "sparseloco", "muloco", "demo"):
        assert np.any(halves[name]["codec/0/residual/a"] != 0), name
    adloco = halves["adloco"]
    batches = [value for name, value in adloco.items() if name.endswith("/batch")]
    assert len(batches) == 2 and len(set(map(int, batches))) == 2
    assert all(np.any(adloco[n]) for n in adloco if n.endswith("codec/0/residual/a"))
    as_coded = halves["as_coded"]
    assert np.any(as_coded["codec/0/feedback/residual/a"]) and np.any(as_coded["codec/0/own/a"])
    assert len({x.tobytes() for x in as_coded["anchor/a"]}) == 3
