"""Cost of sends and landings, and host time of a step without either."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm_jax as lc
from experiments.bench.timing import interleave, median, ratio
from experiments.bench.work import EngineRow


def rows(work: Any, repeats: int) -> list[Any]:
    """Rows of the engine benchmark that concern events."""
    sync, fragment, step = _event_seconds(work, repeats)
    share = sync / (100 * step + sync)
    part = fragment / sync
    quiet = _quiet_step_ratio(work, repeats)
    per_step, per_run_step = _host_overhead(repeats)
    return [
        EngineRow("outer step, share of time at H=100", 100 * share, "%", "< 1", share < 0.01),
        EngineRow(
            "send + land of 1 of 4 fragments / whole sync", part, "x", "<= 0.375", part <= 0.375
        ),
        EngineRow(
            "step without event, streaming / diloco speed", quiet, "x", ">= 0.99", quiet >= 0.99
        ),
        EngineRow("host overhead of engine.step", per_step, "us", "< 100", per_step < 100),
        EngineRow(
            "host overhead of engine.run, per step",
            per_run_step,
            "us",
            "< engine.step",
            per_run_step < per_step,
        ),
    ]


def _engine(work: Any, method, regions: int = 1):
    engine = lc.Engine(
        work.model.loss_fn,
        optax.adamw(3e-4),
        method,
        regions,
        mesh=lc.make_mesh(devices=jax.devices()[:1]),
    )
    return engine, engine.init(work.params)


def _event_seconds(work: Any, repeats: int) -> tuple[float, float, float]:
    """Seconds of a whole-model sync, of one of four fragments, and of an inner step (R = 4)."""

    def sync(method):
        engine, state = _engine(work, method, regions=4)
        loop, holder, mask = engine.sync_loop(state), [state], np.ones(4, bool)

        def run():
            state = loop.send(holder[0], 0, 1, mask, [])
            holder[0] = loop.land(state, list(state.in_flight), 1, [])
            return holder[0].anchor, holder[0].inner.params

        return run

    def inner_steps():
        engine, state = _engine(work, lc.methods.diloco(10**6), regions=4)
        holder, batches = [state], work.batches(4) * 4

        def run():
            holder[0], _ = engine.run(holder[0], batches)
            return holder[0].inner.step

        return run

    seconds = interleave(
        {
            "whole": sync(lc.methods.diloco(10**6)),
            "fragment": sync(lc.methods.streaming_diloco(10**6, 4, 0, 0.0, pattern="balanced")),
            "steps": inner_steps(),
        },
        repeats,
    )
    return median(seconds["whole"]), median(seconds["fragment"]), median(seconds["steps"]) / 4


def _quiet_step_ratio(work: Any, repeats: int) -> float:
    """Speed of steps without an event: Streaming DiLoCo against DiLoCo."""

    def steps(method):
        engine, state = _engine(work, method, regions=2)
        holder, batches = [state], work.batches(2) * 8

        def run():
            holder[0], _ = engine.run(holder[0], batches)
            return holder[0].inner.step

        return run

    far = 10**6
    seconds = interleave(
        {
            "diloco": steps(lc.methods.diloco(far)),
            "streaming": steps(lc.methods.streaming_diloco(far, 4, 5, 0.5, pattern="balanced")),
        },
        repeats,
    )
    return ratio(seconds["diloco"], seconds["streaming"])


def _host_overhead(repeats: int, leaves: int = 75, steps: int = 200) -> tuple[float, float]:
    """Microseconds per step above a plain jit loop of equal leaves, on a model with no work."""
    params = {f"p{i:03d}": jnp.zeros(4) for i in range(leaves)}
    optimizer = optax.sgd(1e-3, momentum=0.9)
    batch = {"x": np.zeros((1, 4), np.float32)}

    def loss_fn(params, batch, rng):
        del rng
        return sum(jnp.sum(p * batch["x"][0]) for p in params.values())

    @jax.jit
    def plain(params, opt, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, None)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    plain = jax.jit(plain, donate_argnums=(0, 1))
    engine = lc.Engine(
        loss_fn,
        optimizer,
        lc.methods.diloco(10**6),
        1,
        mesh=lc.make_mesh(devices=jax.devices()[:1]),
    )
    one, many = [engine.init(params)], [engine.init(params)]
    state = [jax.tree.map(jnp.copy, params), optimizer.init(params)]
    staged = jax.tree.map(lambda x: x[None], batch)

    def plain_steps():
        for _ in range(steps):
            *state[:], loss = plain(*state, batch)
        return loss

    def engine_steps():
        for _ in range(steps):
            one[0], metrics = engine.step(one[0], staged)
        return metrics["loss"]

    def engine_run():
        many[0], _ = engine.run(many[0], [staged] * steps)
        return many[0].inner.step

    seconds = interleave({"plain": plain_steps, "step": engine_steps, "run": engine_run}, repeats)
    base = median(seconds["plain"])
    return tuple((median(seconds[k]) - base) / steps * 1e6 for k in ("step", "run"))
