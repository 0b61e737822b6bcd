"""HALoS against NumPy: arrivals at local servers, updates and replies under way, merges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from compilations import compilations
from engine.test_oracle import ADAMW, SGD, check, close, one_device, train
from oracle.jax_problem import loss_fn
from refused_lines import lines_of

import lowcomm_jax as lc
from lowcomm_jax import compression
from lowcomm_jax.compression import Codec
from lowcomm_jax.engine import Engine

SPEEDS = (1.0, 0.6, 0.8, 0.45)
GROUPS = ((0, 3), (1, 2))
LOCAL = {"learning_rate": 1.5, "momentum": 0.7, "buffer": 3}
UPPER = {"global_learning_rate": 0.8, "global_momentum": 0.5, "global_buffer": 2}


def make(every=3, blend=0.3, travel=(2, 4), **more):
    settings = {**LOCAL, **UPPER, **more}
    return lc.methods.halos(4, SPEEDS, GROUPS, every, blend, travel=travel, **settings)


def derive(batches, inner, every=3, blend=0.3, travel=(2, 4), **more):
    return oracle.run_halos(
        oracle.make_params(),
        batches,
        period=4,
        inner=inner,
        speeds=SPEEDS,
        groups=GROUPS,
        every=every,
        blend=blend,
        local={"lr": 1.5, "momentum": 0.7, "buffer": 3},
        upper={"lr": 0.8, "momentum": 0.5, "buffer": 2},
        travel=travel,
        **more,
    )


@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("every,blend,travel", [(3, 0.3, (2, 4)), (1, 0.7, (0, 0))])
def test_halos(inner, every, blend, travel):
    method = make(every, blend, travel)
    state, seen, batches = train(method, inner[1], 4, steps=27, finish=True)
    run = derive(batches, inner[0], every, blend, travel, finish=True)
    assert len(run.of("global")) > 3 and len(run.of("merge")) > 2
    check(seen, run)
    for key, value in state.anchor.items():
        close(value[0], run.finished.anchors[0][key], f"finished {key}")
        for r in range(4):
            np.testing.assert_array_equal(lc.region_params(state)[key][r], value[0])


def test_the_servers_models_are_those_of_the_derivation():
    engine = Engine(loss_fn, SGD[1], make(), 4, mesh=one_device())
    batches = oracle.make_batches(steps=19, regions=4)
    steps = [oracle.step_batch(batches, t) for t in range(1, 20)]
    state, history = engine.run(engine.init(oracle.make_params()), steps)
    run = derive(batches, SGD[0])
    for g, model in enumerate(run.at(19).extra["models"]):
        for key, value in model.items():
            close(state.servers["model"][key][g], value, f"server {g} {key}")
    sent = sum(e.bytes_sent for e in history.events if e.kind == "send")
    np.testing.assert_array_equal(sent, state.counters.bytes_sent)
    assert sent.sum() == sum(e.bytes_received.sum() for e in history.events)


def test_nothing_compiles_later_and_finishing_twice_is_once():
    engine = Engine(loss_fn, SGD[1], make(), 4, mesh=one_device())
    batches = oracle.make_batches(steps=40, regions=4)
    steps = [oracle.step_batch(batches, t) for t in range(1, 41)]
    state, _ = engine.run(engine.init(oracle.make_params()), steps[:20])
    assert compilations(lambda: engine.run(state, steps[20:])[0].anchor) == 0
    state, _ = engine.run(engine.init(oracle.make_params()), steps[:20])
    once = engine.finish(state)
    kept = jax.tree.map(np.array, once.anchor)
    twice = engine.finish(once)
    for key, value in twice.anchor.items():
        np.testing.assert_array_equal(value, kept[key])


def test_finishing_twice_is_once_in_bf16():
    """What rounding takes off a received model is no progress of a region."""
    engine = Engine(loss_in_fp32, SGD[1], make(), 4, mesh=one_device())
    batches = oracle.make_batches(steps=9, regions=4)
    params = {k: jnp.asarray(x, jnp.bfloat16) for k, x in oracle.make_params().items()}
    steps = [oracle.step_batch(batches, t) for t in range(1, 10)]
    state, _ = engine.run(engine.init(params), steps)
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
    batches = oracle.make_batches(steps=9, regions=4)
    batches["y"][2, 0] = np.nan
    engine = Engine(loss_fn, SGD[1], make(), 4, mesh=one_device(), skip_nonfinite=False)
    steps = [oracle.step_batch(batches, t) for t in range(1, 10)]
    state, _ = engine.run(engine.init(oracle.make_params()), steps)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.servers["model"]))
    assert not np.isfinite(state.inner.opt[0].trace["b"][0]).all()  # it was bad, and stays so


def test_settings_that_cannot_work_are_listed_at_once():
    method = lc.methods.halos(4, (1.0, -1.0), [(0,), (0, 2)], 0, 1.5, travel=(1, 2, -3))
    text = "\n".join(lines_of(method, 3))
    for part in ("2 values for 3", "positive speed", "in one group", "every=0", "blend=1.5"):
        assert part in text
    assert "3 values for 2 groups" in text and "not negative" in text


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
    state, seen, batches = train(make(**codecs), SGD[1], 4, steps=27, finish=True)
    shares = {"local_codec": (0.6, 0.8), "upper_codec": (0.7, 0.5)}
    run = derive(batches, SGD[0], finish=True, **shares)
    assert len(run.of("global")) > 3
    check(seen, run)
    for key, value in state.anchor.items():
        close(value[0], run.finished.anchors[0][key], f"finished {key}")
    plain = derive(batches, SGD[0], finish=True)
    key = next(iter(state.anchor))
    assert not np.allclose(plain.finished.anchors[0][key], state.anchor[key][0], rtol=1e-3)


def test_bytes_are_those_of_each_levels_codec():
    """Worker 3 and its server's host 0, and the hosts 1 and 0 of the two servers."""
    method = make(codec=Share(0.5, "bfloat16"), global_codec=Share(0.5, "float8_e5m2"))
    engine = Engine(loss_fn, SGD[1], method, 4, mesh=one_device())
    batches = oracle.make_batches(steps=27, regions=4)
    steps = [oracle.step_batch(batches, t) for t in range(1, 28)]
    state, history = engine.run(engine.init(oracle.make_params()), steps)
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


def test_codecs_that_no_level_can_have_are_listed():
    wrong = make(codec={"name": "int8", "reduce": "two_shot"}, global_codec=3)
    text = "\n".join(lines_of(wrong, 4))
    assert "codec.reduce='two_shot'" in text and "global_codec=3" in text
    ef21 = compression.make("ef21") if "ef21" in compression.names() else None
    if ef21 is not None:
        assert "use error_feedback" in "\n".join(lines_of(make(global_codec=ef21), 4))
