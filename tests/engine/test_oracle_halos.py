"""HALoS against NumPy: arrivals at local servers, updates and replies under way, merges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from engine.test_oracle import ADAMW, SGD, close, compare
from oracle.jax_problem import loss_fn
from oracle_runs import started, stream

import lowcomm_jax as lc
from lowcomm_jax import compression
from lowcomm_jax.compression import Codec

SPEEDS = (1.0, 0.6, 0.8, 0.45)
GROUPS = ((0, 3), (1, 2))
LOCAL = {"learning_rate": 1.5, "momentum": 0.7, "buffer": 3}
UPPER = {"global_learning_rate": 0.8, "global_momentum": 0.5, "global_buffer": 2}


def make(every=3, blend=0.3, travel=(2, 4), **more):
    settings = {**LOCAL, **UPPER, **more}
    return lc.methods.halos(4, SPEEDS, GROUPS, every, blend, travel=travel, **settings)


def settings(every=3, blend=0.3, travel=(2, 4)):
    """The oracle's."""
    return {
        "period": 4,
        "speeds": SPEEDS,
        "groups": GROUPS,
        "every": every,
        "blend": blend,
        "local": {"lr": 1.5, "momentum": 0.7, "buffer": 3},
        "upper": {"lr": 0.8, "momentum": 0.5, "buffer": 2},
        "travel": travel,
    }


@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("every,blend,travel", [(3, 0.3, (2, 4)), (1, 0.7, (0, 0))])
def test_halos(inner, every, blend, travel):
    given = settings(every, blend, travel)
    _, run, _ = compare(make(every, blend, travel), oracle.run_halos, 4, inner, 27, **given)
    assert len(run.of("global")) > 3 and len(run.of("merge")) > 2


def test_the_servers_models_are_those_of_the_derivation():
    engine, state = started(make(), 4, SGD[1])
    state, history = engine.run(state, stream(19, 4))
    batches = oracle.make_batches(steps=19, regions=4)
    run = oracle.run_halos(oracle.make_params(), batches, inner=SGD[0], **settings())
    for g, model in enumerate(run.at(19).extra["models"]):
        for key, value in model.items():
            close(state.servers["model"][key][g], value, f"server {g} {key}")
    sent = sum(e.bytes_sent for e in history.events if e.kind == "send")
    np.testing.assert_array_equal(sent, state.counters.bytes_sent)
    assert sent.sum() == sum(e.bytes_received.sum() for e in history.events)


def test_finishing_twice_is_once_in_bf16():
    """What rounding takes off a received model is no progress of a region."""
    params = {k: jnp.asarray(x, jnp.bfloat16) for k, x in oracle.make_params().items()}
    engine, state = started(make(), 4, SGD[1], loss_in_fp32, params)
    state, _ = engine.run(state, stream(9, 4))
    state = engine.finish(state)
    once = what_servers_have(state)
    assert any((x != x.astype(jnp.bfloat16)).any() for x in once[0].values())
    jax.tree.map(np.testing.assert_array_equal, once, what_servers_have(engine.finish(state)))


def what_servers_have(state):
    models = {name: state.servers[name] for name in ("model", "merged", "outer")}
    return jax.tree.map(np.array, (state.anchor, state.received, state.outer, models))


def loss_in_fp32(params, batch, rng):
    return loss_fn({k: x.astype(jnp.float32) for k, x in params.items()}, batch, rng)


def test_a_contribution_that_is_not_finite_moves_no_server():
    batches = stream(9, 4)
    batches[2]["y"][0] = np.nan
    engine, state = started(make(), 4, SGD[1], skip_nonfinite=False)
    state, _ = engine.run(state, batches)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.servers["model"]))
    assert not np.isfinite(state.inner.opt[0].trace["b"][0]).all()  # it was bad, and stays so


@dataclasses.dataclass(frozen=True)
class Share(Codec):
    """Sends a share of every value, so that what it loses is plain."""

    share: float
    dtype: str = "float32"

    @property
    def name(self):
        return f"share_{self.share}"

    def init(self, like):
        return ()

    def encode(self, tree, state):
        return jax.tree.map(lambda x: (self.share * x).astype(self.dtype), tree), state

    def decode(self, payload, like):
        return jax.tree.map(lambda x: x.astype(np.float32), payload)

    def nbytes(self, like):
        return sum(x.size for x in jax.tree.leaves(like)) * jnp.dtype(self.dtype).itemsize


def test_each_level_has_a_codec_and_residuals_of_its_own():
    """Workers send 0.6 of what they have, servers 0.7: what is left is in the next, decayed."""
    codecs = {
        "codec": compression.error_feedback(Share(0.6), 0.8),
        "global_codec": compression.error_feedback(Share(0.7), 0.5),
    }
    shares = {"local_codec": (0.6, 0.8), "upper_codec": (0.7, 0.5)}
    given = settings() | shares
    state, run, batches = compare(make(**codecs), oracle.run_halos, 4, steps=27, **given)
    assert len(run.of("global")) > 3
    given = settings() | {"inner": SGD[0], "finish": True}
    plain = oracle.run_halos(oracle.make_params(), batches, **given)
    key = next(iter(state.anchor))
    assert not np.allclose(plain.finished.anchors[0][key], state.anchor[key][0], rtol=1e-3)


def test_bytes_are_those_of_each_levels_codec():
    """Worker 3 and its server's host 0, and the hosts 1 and 0 of the two servers."""
    method = make(codec=Share(0.5, "bfloat16"), global_codec=Share(0.5, "float8_e5m2"))
    engine, state = started(method, 4, SGD[1])
    state, history = engine.run(state, stream(27, 4))
    model = 4 * sum(x.size for x in oracle.make_params().values())
    sends = [e for e in history.events if e.kind == "send"]
    worker = next(e for e in sends if e.key.startswith("0@") and e.key.endswith("/3"))
    assert worker.bytes_sent.tolist() == [model, 0, 0, model // 2]
    assert worker.bytes_received.tolist() == [model // 2, 0, 0, model]
    up = next(e for e in sends if e.key.startswith("up@") and e.key.endswith("/1"))
    assert up.bytes_sent.tolist() == [0, model // 4, 0, 0]
    assert up.bytes_received.tolist() == [model // 4, 0, 0, 0]
    down = next(e for e in sends if e.key.startswith("down@") and e.key.endswith("/1"))
    assert down.bytes_sent.tolist() == [model, 0, 0, 0]
    assert sum(e.bytes_sent for e in sends).tolist() == state.counters.bytes_sent.tolist()
