"""The worked example of a method in one file: its rule by hand, the page, the command line."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations

import lowcomm_jax as lc
from examples.fed_adam import fed_adam
from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.train.methods import make_method

ROOT = Path(__file__).resolve().parents[3]
R, H, ROUNDS, RATE = 2, 3, 3, 0.1
RULE = dict(learning_rate=0.05, b1=0.8, b2=0.95, eps=1e-2)


def target(step):
    """Every region pulls its parameters to a point of its own, a new one at every step."""
    return np.random.default_rng(step).standard_normal((R, 4)).astype(np.float32)


def by_hand():
    """The listing in NumPy: plain descent inside, Adam on the mean of anchor - local outside."""
    anchor, m, v = np.ones(4), np.zeros(4), np.zeros(4)
    for t in range(1, ROUNDS + 1):
        ends = []
        for region in range(R):
            theta = anchor.copy()
            for step in range((t - 1) * H, t * H):
                theta -= RATE * (theta - target(step)[region])
            ends.append(theta)
        delta = anchor - np.mean(ends, axis=0)
        m = RULE["b1"] * m + (1 - RULE["b1"]) * delta
        v = RULE["b2"] * v + (1 - RULE["b2"]) * delta**2
        m_hat, v_hat = m / (1 - RULE["b1"] ** t), v / (1 - RULE["b2"] ** t)
        anchor -= RULE["learning_rate"] * m_hat / (np.sqrt(v_hat) + RULE["eps"])
    return anchor


def pulled(params, batch, rng):
    return 0.5 * jnp.sum((params - batch[0]) ** 2)


def test_it_follows_the_listing_and_compiles_once():
    engine = lc.Engine(pulled, optax.sgd(RATE), fed_adam(H, **RULE), R, mesh=lc.make_mesh())
    state = engine.init(jnp.ones(4))
    batches = [target(step)[:, None] for step in range(H * ROUNDS)]
    state, _ = engine.run(state, batches[:H])
    held = {"state": state}

    def rest():
        held["state"], _ = engine.run(held["state"], batches[H:])
        return held["state"].anchor

    assert compilations(rest) == 0  # beyond the first round
    np.testing.assert_allclose(lc.global_params(held["state"]), by_hand(), rtol=1e-5)


def test_the_page_shows_the_rule_of_the_file():
    page = (ROOT / "docs" / "add_a_method.md").read_text()
    shown = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], shown)
    anchors = []
    for made in (shown["fed_adam"], fed_adam):
        engine = lc.Engine(pulled, optax.sgd(RATE), made(H, 0.05), R, mesh=lc.make_mesh())
        batches = [target(step)[:, None] for step in range(H * ROUNDS)]
        state, _ = engine.run(engine.init(jnp.ones(4)), batches)
        anchors.append(lc.global_params(state))
    np.testing.assert_array_equal(*anchors)


@pytest.mark.slow
def test_it_trains_from_the_command_line(tmp_path, tiny):
    tiny.corpus(tmp_path / "texts")
    arguments = tiny.arguments(
        tmp_path,
        f"--config={ROOT / 'examples' / 'fed_adam.py'}",
        "--config.steps=6",
        "--config.method.period=3",
        "--config.method.b1=0.5",
        "--config.eval.every=0",
        "--config.checkpoint.every=0",
        f"--workdir={tmp_path / 'run'}",
        "--quiet",
    )
    assert main(["train", *arguments]) == 0
    header, *_, end = read_records(tmp_path / "run" / "metrics.jsonl")
    assert header["method"] == "fed_adam" and header["config"]["method"]["b1"] == 0.5
    assert end["kind"] == "end" and end["bytes_sent"][0] > 0


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"name": "examples.fed_adam:fed_adma"}, "examples.fed_adam has no function 'fed_adma'"),
        ({"name": "examples.nothing:rule"}, "No module named 'examples.nothing'"),
        ({"name": "examples.fed_adam:fed_adam"}, "method.period is missing"),
        ({"name": "examples.fed_adam:fed_adam", "period": 2, "eta": 1}, "no such setting"),
    ],
)
def test_what_does_not_fit_is_refused(fields, part):
    method, problems = make_method(fields)
    assert method is None and part in "\n".join(problems)


def test_its_own_problems_reach_the_engine():
    with pytest.raises(ValueError, match=r"(?s)learning_rate=-1.*b1=2"):
        lc.Engine(lambda p, b, r: p, optax.sgd(1.0), fed_adam(2, -1, 2), 2)
