"""How many files of lowcomm_jax/ one step enters (docs/architecture.md traces it).

`python tests/test_way_of_a_step.py` prints them in order, each with the functions that were called.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc

PERIOD = 6
COMPILED, TRACED = 9, 15  # files of a period: nothing compiles; programs are traced
ROOT = Path(lc.__file__).parent
METHODS = {
    "diloco": lambda codec=None: lc.methods.diloco(PERIOD, codec=codec),
    "streaming": lambda codec=None: lc.methods.streaming_diloco(PERIOD, 2, 2, 0.5, codec=codec),
}
# Nothing on the way may be there only because regions can be separate jobs.
BETWEEN_JOBS = ("store", "rounds", "jobs", "recovery")


def loss_fn(params, batch, rng):
    return jnp.mean((batch["x"] @ params["a"] @ params["b"]) ** 2)


def entered(method, periods_before: int) -> dict[str, list[str]]:
    """File -> functions called in it, in order, while `Engine.run` makes one period."""
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    engine = lc.Engine(loss_fn, optax.adamw(1e-2), method, regions=2, mesh=mesh)
    rng = np.random.default_rng(0)

    def batches(periods):
        shape = (periods * PERIOD, 2, 3, 32)
        return [{"x": x} for x in rng.standard_normal(shape).astype(np.float32)]

    found: dict[str, list[str]] = {}

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and ROOT in file.parents:
            calls = found.setdefault(str(file.relative_to(ROOT)), [])
            name = frame.f_code.co_qualname
            if name not in calls:
                calls.append(name)

    with jax.numpy_dtype_promotion("standard"):
        state = engine.init({"a": jnp.ones((32, 32)), "b": jnp.ones((32, 32))})
        if periods_before:
            state, _ = engine.run(state, batches(periods_before))
        period = batches(1)
        sys.setprofile(note)
        try:
            engine.run(state, period)
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("periods_before, most", [(2, COMPILED), (0, TRACED)])
def test_a_step_enters_few_files(name, periods_before, most):
    files = entered(METHODS[name](), periods_before)
    assert {"engine.py", "sync/sync_loop.py"} <= set(files), "nothing was recorded"
    assert len(files) <= most, list(files)
    assert not [file for file in files if file.startswith(BETWEEN_JOBS)]


def test_a_codec_adds_its_own_files_only():
    dense, coded = (entered(METHODS["streaming"](codec), 2) for codec in (None, "e3m0"))
    rooms = {file.partition("/")[0] for file in coded.keys() - dense.keys()}
    assert rooms <= {"compression", "exchange"}, coded.keys() - dense.keys()


if __name__ == "__main__":
    ways = [(name, None, before) for name in METHODS for before in (2, 0)]
    for name, codec, before in [*ways, ("streaming", "e3m0", 2), ("streaming", "e3m0", 0)]:
        way = entered(METHODS[name](codec), before)
        when = "third period" if before else "first period, tracing included"
        print(f"\n{name}{'' if codec is None else f', {codec}'}, {when}: {len(way)} files")
        for file, calls in way.items():
            print(f"  {file}: {', '.join(call for call in calls if '<locals>' not in call)}")
