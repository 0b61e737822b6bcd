"""Typical uses of the public names, for the type checker (`check_types.py`) and for a test.

What each expression is must be the same to a checker, which reads annotations, and in a run.
"""

# pyright: standard

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm_jax as lc
from lowcomm_jax import channels, checkpoint, compression, data, models, network, schedule
from lowcomm_jax.history import History
from lowcomm_jax.schedule import Schedule
from lowcomm_jax.state.train_state import TrainState

REGIONS = 2


def loss_fn(params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> jax.Array:
    del rng
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def a_run(folder: Path) -> TrainState:
    """An engine, a run over a network, a checkpoint, and what comes back."""
    method = lc.methods.streaming_diloco(period=2, fragments=1, overlap=1, alpha=0.5, codec="int8")
    assert_type(method, lc.methods.Method)
    assert_type(method.schedule, Schedule)
    net = network.uniform(REGIONS, bandwidth_gbps=1.0, compute_s=0.1)
    engine = lc.Engine(loss_fn, optax.sgd(0.1), method, REGIONS, network=net)
    params = {"w": np.ones((4, 2), np.float32)}
    state = engine.init(params)
    assert_type(state, TrainState)
    batch = {"x": np.ones((REGIONS, 4, 4), np.float32)}
    state, history = engine.run(state, [batch] * 3)
    assert_type(history, History)
    state, metrics = engine.step(state, batch)
    assert_type(metrics, dict[str, Any])
    if engine.clock is not None:
        assert_type(engine.clock, network.VirtualClock)
        assert_type(engine.clock.report().wall_s, float)
    with checkpoint.Checkpoints(folder, keep_last=1) as saved:
        saved.save(state, extra={}, config={"method": method.name})
        restored = saved.restore(engine, params)
    if restored is not None:
        assert_type(restored.step, int)
        assert_type(restored.extra, dict[str, Any])
    state = engine.finish(state)
    assert_type(lc.consensus.variance(state), jax.Array)
    lc.global_params(state)
    lc.region_params(state)
    return state


def largest(policy: lc.batching.BatchPolicy) -> int | None:
    """Of any policy, a reader's own among them."""
    return policy.cap


def rules() -> list[lc.methods.Method]:
    """Methods from rules of one's own choice."""
    outer = lc.outer.nesterov(learning_rate=0.7, momentum=0.9)
    assert_type(outer, optax.GradientTransformationExtraArgs)
    plain = optax.GradientTransformation(outer.init, outer.update)
    codec = compression.error_feedback(compression.make("topk_int4", k=8), decay=0.95)
    assert_type(codec, compression.ErrorFeedback)
    assert_type(compression.make("low_rank_int4"), compression.Codec)
    policy = lc.batching.Fixed(4)
    assert_type(largest(policy), int | None)
    return [
        lc.methods.diloco(period=4, outer=plain, codec=codec),
        lc.methods.diloco(period=4, codec={"name": "int4", "block": 64}),
        lc.methods.decoupled_diloco(period=4, merge={"name": "isotropic"}),
        lc.methods.diloco(period=4, inner_batching=policy),
        lc.methods.Method(
            "own", schedule.Staggered(4), outer, lc.landing.blend(0.5), merge=lc.merge.Isotropic()
        ),
        lc.methods.Method(
            "beside",
            schedule.Never(),
            lc.outer.average(),
            channels=(channels.Channel("params", selection=channels.Sampled(0.5)),),
        ),
    ]


def parts() -> None:
    """Models, data, networks and batches."""
    model = models.build(models.preset("nano", max_seq_len=16))
    assert_type(model, models.Model)
    assert_type(model.config, models.TransformerConfig)
    assert_type(model.flops_per_token(16), float)
    config = data.DataConfig(corpus="python", seq_len=16, limit=4)
    assert_type(config.regions, int)
    assert_type(network.names(), tuple[str, ...])
    net = network.parse(network.names()[0])
    assert_type(network.derive_tau(1.0, 0.5), int)
    assert_type(net.size, int)
    assert_type(lc.topology.Gossip().partition(0, 4), list[tuple[int, ...]])
    assert_type(lc.make_mesh(), jax.sharding.Mesh)
    assert_type(lc.Target.parse("h100:2x8"), lc.Target)


def between_jobs(url: str) -> lc.Engine:
    """The engine of a job that is one region of several; not run here."""
    timing = lc.exchange.Timing(beat_s=2.0)
    store = lc.exchange.store(url, 0, REGIONS, "run", secret="s" * 32, timing=timing)
    transport = lc.exchange.peers("127.0.0.1:0", listen="0.0.0.0:0")
    peers = lc.exchange.store(url, 0, REGIONS, "run", secret="s" * 32, transport=transport)
    assert_type(store, lc.exchange.RemoteExchange)
    return lc.Engine(
        loss_fn, optax.sgd(0.1), lc.methods.diloco(8), REGIONS, exchange=store or peers
    )
