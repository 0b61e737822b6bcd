"""A region that shares no code with this package is the second region of a DiLoCo run."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import optax
from regions.together import one_device

import lowcomm_jax as lc
from lowcomm_jax import exchange

FILE = pathlib.Path(lc.__file__).parent.parent / "examples" / "numpy_region.py"
SECRET, ROUNDS, PERIOD = "a secret of the tests", 6, 3


def loss_fn(params, batch, rng):
    del rng
    error = batch["x"] @ params["w"] + params["b"][None] - batch["y"]
    return (error**2).mean()


def both(folder, rate, momentum):
    """The anchors that both regions end with: ours, and that of the other program."""
    settings = [1, ROUNDS, PERIOD, rate, momentum]
    command = [sys.executable, str(FILE), str(folder), "run", *map(str, settings)]
    environment = {**os.environ, "LOWCOMM_SECRET": SECRET}
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    ours = exchange.store(f"file://{folder}", 0, 2, "run", SECRET.encode())
    try:
        ours.join(60.0)
        method = lc.methods.diloco(PERIOD, lc.outer.nesterov(rate, momentum))
        engine = lc.Engine(loss_fn, optax.sgd(0.01), method, 2, mesh=one_device(), exchange=ours)
        rng = np.random.default_rng(0)
        batch = {k: rng.normal(size=(1, 16, 4)).astype(np.float32) for k in "xy"}
        state = engine.init({"w": np.zeros((4, 4), np.float32), "b": np.zeros(4, np.float32)})
        state, _ = engine.run(state, [batch] * (ROUNDS * PERIOD))
        state = engine.finish(state)
    finally:
        ours.close()
        told, _ = other.communicate(timeout=60)
    assert other.returncode == 0
    commits = [ours._context.commit_log.committed(f"1/{n}") for n in range(1, ROUNDS + 1)]
    assert all(commit.admitted.keys() == {0, 1} for commit in commits), "both counted in each"
    anchor = {name: np.asarray(x)[0] for name, x in state.anchor.items()}
    return anchor, {name: np.array(x, np.float32) for name, x in json.loads(told).items()}


def test_both_end_with_the_same_anchor_bit_for_bit(tmp_path):
    anchor, other = both(tmp_path, 0.5, 0.5)
    assert anchor.keys() == other.keys() and np.abs(anchor["w"]).max() > 0.01
    for name, x in anchor.items():
        np.testing.assert_array_equal(other[name], x)


def test_where_the_compiler_contracts_products_and_sums_they_nearly_do(tmp_path):
    anchor, other = both(tmp_path, 0.7, 0.9)
    largest = max(np.abs(x).max() for x in anchor.values())
    for name, x in anchor.items():
        np.testing.assert_allclose(other[name], x, rtol=0, atol=1e-6 * largest)


def test_it_is_short_and_needs_nothing_of_ours():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 150
    imported = {
        line.split()[1].split(".")[0] for line in re.findall(r"^(?:import|from) .+", text, re.M)
    }
    assert imported - set(sys.stdlib_module_names) == {"numpy", "safetensors"}
