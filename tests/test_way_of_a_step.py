"""How many files of lowcomm_jax/ one step enters (docs/architecture.md traces it).

`python tests/test_way_of_a_step.py` prints them in order, each with the functions that were called.
"""

from __future__ import annotations

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc

PERIOD = 6
# Files of a period in which programs are traced, and of one in which nothing compiles.
FILES = {"diloco": (13, 8), "streaming": (14, 8)}
ROOT = os.path.join(os.path.dirname(lc.__file__), "")
METHODS = {
    "diloco": lambda codec=None: lc.methods.diloco(PERIOD, codec=codec),
    "streaming": lambda codec=None: lc.methods.streaming_diloco(PERIOD, 2, 2, 0.5, codec=codec),
}
# Nothing on the way may be there only because regions can be separate jobs.
BETWEEN_JOBS = ("store", "rounds", "jobs", "recovery")


def loss_fn(params, batch, rng):
    return jnp.mean((batch["x"] @ params["a"] @ params["b"]) ** 2)


@functools.cache
def entered(name: str, codec: str | None = None) -> list[dict[str, list[str]]]:
    """File -> functions called in it, in order, while `Engine.run` makes one period.

    Of the first period, in which programs are traced, and of the third one.
    """
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    method = METHODS[name](codec)
    engine = lc.Engine(loss_fn, optax.adamw(1e-2), method, regions=2, mesh=mesh)
    rng = np.random.default_rng(0)

    found: list[dict[str, list[str]]] = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls = found[-1].setdefault(frame.f_code.co_filename.removeprefix(ROOT), [])
            name = frame.f_code.co_qualname
            if name not in calls:
                calls.append(name)

    with jax.numpy_dtype_promotion("standard"):
        state = engine.init({"a": jnp.ones((32, 32)), "b": jnp.ones((32, 32))})
        for _ in range(3):
            found.append({})
            shape = (PERIOD, 2, 3, 32)
            period = [{"x": x} for x in rng.standard_normal(shape).astype(np.float32)]
            sys.setprofile(note)
            try:
                state, _ = engine.run(state, period)
            finally:
                sys.setprofile(None)
    return [found[0], found[2]]


@pytest.mark.parametrize("name", METHODS)
def test_a_step_enters_few_files(name):
    for files, count in zip(entered(name), FILES[name], strict=True):
        assert {"engine.py", "sync/sync_loop.py"} <= set(files), "nothing was recorded"
        assert len(files) == count, list(files)
        assert not [file for file in files if file.startswith(BETWEEN_JOBS)]


def test_a_codec_adds_its_own_files_only():
    dense, coded = (entered("streaming", codec)[1] for codec in (None, "e3m0"))
    rooms = {file.partition("/")[0] for file in coded.keys() - dense.keys()}
    assert rooms <= {"compression", "exchange"}, coded.keys() - dense.keys()


if __name__ == "__main__":
    for name, codec in [*((name, None) for name in METHODS), ("streaming", "e3m0")]:
        first, third = entered(name, codec)
        for when, way in (("third period", third), ("first period, tracing included", first)):
            print(f"\n{name}{'' if codec is None else f', {codec}'}, {when}: {len(way)} files")
            for file, calls in way.items():
                print(f"  {file}: {', '.join(call for call in calls if '<locals>' not in call)}")
