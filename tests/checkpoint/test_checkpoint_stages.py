"""Resume with pipeline stages, and along random paths: bit for bit, in a new process."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint.checkpoint_cases import assert_same, values
from mesh.staged_runs import MODES, batches, mode, start

from lowcomm_jax.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]
HALF = 5
QUICK = ("routed",)  # the others compile for long
OTHERS = tuple(name for name in MODES if name not in QUICK)
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def second_half(engine, state):
    return engine.run(state, batches(2 * HALF)[HALF:])[0]


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"]
)
def test_resume_is_exact(tmp_path, names):
    ends = {}
    for name in names:
        engine = mode(name)
        state, _ = engine.run(engine.init(start()), batches(HALF))
        half = values(state)
        if name in ("dilocox", "streaming_diloco"):
            assert state.in_flight
            assert any(np.any(x) for key, x in half.items() if "residual" in key)
        if name in ("noloco", "routed"):
            assert half["anchor/head"].shape[0] == 2 and np.any(half["outer/0/momentum/head"])
        with Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(state, extra={}, config={"method": name}, method=engine.method)
        ends[name] = half, values(second_half(engine, state))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    arguments = [sys.executable, __file__, str(tmp_path), *names]
    subprocess.run(arguments, env={**os.environ, "PYTHONPATH": path}, check=True)
    for name in names:
        resumed = pickle.loads((tmp_path / f"{name}.pickle").read_bytes())
        for actual, expected in zip(resumed, ends[name], strict=True):
            assert_same(actual, expected)


def resume(directory, name):
    engine = mode(name)
    with Checkpoints(directory / name) as checkpoints:
        state = checkpoints.restore(engine, start(), config={"method": name}).state
    half = values(state)
    result = half, values(second_half(engine, state))
    (directory / f"{name}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    for case in sys.argv[2:]:
        resume(Path(sys.argv[1]), case)
