"""A thousand gossiping regions on one device: seconds and memory."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

import lowcomm_jax as lc
from experiments.bench.timing import interleave, median
from experiments.bench.work import EngineRow
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.models import TransformerConfig, build

REGIONS, BATCH, CONTEXT = 1000, 2, 16
MODEL = TransformerConfig(
    vocab_size=64,
    layers=2,
    width=32,
    heads=2,
    kv_heads=2,
    head_dim=16,
    mlp_width=64,
    max_seq_len=CONTEXT,
)
PAIRS = {"group_size": 2, "alpha": 0.5, "beta": 0.7, "gamma": 0.7}


def rows(repeats: int) -> list[Any]:
    """Rows of the engine benchmark: a step of all regions, a round in pairs, memory."""
    model = build(MODEL)
    params = jax.jit(model.init)(jax.random.key(0))
    engine = lc.Engine(
        model.loss_fn,
        optax.adamw(3e-4),
        lc.methods.noloco(10**6, **PAIRS),
        REGIONS,
        mesh=lc.make_mesh(devices=jax.devices()[:1]),
        replicas="vmap",
    )
    holder = [engine.init(params)]
    size = (REGIONS, BATCH, CONTEXT + 1)
    batch = {"tokens": np.random.default_rng(0).integers(0, MODEL.vocab_size, size, np.int32)}
    seconds = interleave(_runs(engine, holder, batch), repeats)
    state = holder[0]
    held = sum(x.nbytes for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
    replica = sum(x.nbytes for x in jax.tree.leaves(params))
    title = f"{REGIONS:,} gossip regions of {replica // 4:,} parameters"
    peak = held + _landing_bytes(engine, state)
    return [
        EngineRow(f"{title}: inner step of all", median(seconds["step"]), "s"),
        EngineRow(f"{title}: a round in pairs", median(seconds["round"]), "s"),
        EngineRow(f"{title}: state", held / 1e6, "MB"),
        EngineRow(f"{title}: state and landing / (1,000 replicas)", peak / replica / REGIONS, "x"),
    ]


def _runs(engine: lc.Engine, holder: list, batch: dict) -> dict[str, Any]:
    loop, everyone = engine.sync_loop(holder[0]), np.ones(REGIONS, bool)

    def step():
        holder[0], _ = engine.step(holder[0], batch)
        return holder[0].inner.step

    def meet():
        state = loop.send(holder[0], 0, 1, everyone, [])
        holder[0] = loop.land(state, list(state.in_flight), 1, [])
        return holder[0].anchor, holder[0].inner.params

    return {"step": step, "round": meet}


def _landing_bytes(engine: lc.Engine, state) -> int:
    """Bytes of payloads in flight and of what the landing needs beside its arguments."""
    loop = engine.sync_loop(state)
    anchor = state.anchor
    arguments = (anchor, state.outer[0], anchor, np.ones(REGIONS, np.float32))
    draw = Draw(loop.exchange.draw(0))
    lowered = loop.programs.outer_program.lower(*arguments, loop.fragments.rows(0), draw)
    payload = sum(x.nbytes for x in anchor.values())
    return payload + lowered.compile().memory_analysis().temp_size_in_bytes
