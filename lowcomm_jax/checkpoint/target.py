"""The state an engine expects, as shapes and shardings, and how saved arrays are put into it.

`make_target` describes the state, with the payloads in flight that a checkpoint records. `fill`
puts the saved arrays where the target's leaves lie.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lowcomm_jax.engine import Engine
from lowcomm_jax.mesh.arrays import fetch, place_like
from lowcomm_jax.mesh.offload import HOST
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.params.layout import make_layout
from lowcomm_jax.state.leaves import FLIGHT_ARRAYS, named_leaves, state_leaves
from lowcomm_jax.state.train_state import InFlight, TrainState
from lowcomm_jax.sync.initial_state import abstract_state, codec_states, landing_states
from lowcomm_jax.sync.round_programs import RoundPrograms

PyTree = Any


def make_target(engine: Engine, params: PyTree, records: list[dict]) -> TrainState:
    """Describe the engine's state, with these payloads in flight: shapes, and where they lie.

    Args:
      params: the user's parameters, arrays or `jax.ShapeDtypeStruct`.
      records: `leaves.flight_records` of the checkpoint.
    """
    programs = engine.programs_for(make_layout(params, engine.setup.roles))
    count = len(programs.fragments)
    flights = {r["key"]: abstract_flight(programs, r) for r in records if r["fragment"] < count}
    # As they are on devices, where 64 bits are 32.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.result_type(x)), params)
    state = jax.tree.map(_abstract, abstract_state(programs, shapes))
    return state.replace(in_flight=flights)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    on_device = isinstance(leaf, jax.ShapeDtypeStruct)
    return leaf if on_device else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def fresh_values(programs: RoundPrograms) -> dict[str, np.ndarray]:
    """Host values of the codecs' and landing rules' initial states, by name."""
    codec, landing = codec_states(programs), landing_states(programs)
    return fetch({**named_leaves("codec", codec), **named_leaves("landing", landing)})


def abstract_flight(programs: RoundPrograms, record: dict) -> InFlight:
    """Shapes of a payload in flight; they lie as they lay, as far as the mesh allows."""
    regions, exchange = programs.regions, programs.exchange
    like = programs.fragments.like(record["fragment"])
    payload = {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in like.items()}
    kept: PyTree = ()
    if exchange.codec is not None:
        kept = jax.eval_shape(lambda: exchange.whole(like).init(like))
        payload = exchange.at(record["level"]).payload_like(like)
    parts = {
        "payload": payload if record["payload"] else None,
        "snapshot": like if record["snapshot"] else None,
        "accepted": jax.ShapeDtypeStruct((), jnp.bool_),
        "weight": jax.ShapeDtypeStruct((), jnp.float32),
        "header": {k: jax.ShapeDtypeStruct((n,), jnp.float32) for k, n in record["header"].items()},
        "kept": kept if record["kept"] else None,
    }

    def stacked(name: str, leaf) -> jax.ShapeDtypeStruct:
        shape = (regions.count, *leaf.shape)
        spec = _fitting(record["specs"].get(name, [REGION]), shape, regions.mesh)
        sharding = NamedSharding(regions.mesh, spec)
        if programs.setup.offload and name.startswith("snapshot/"):
            sharding = sharding.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    for part, tree in parts.items():
        leaves = [stacked(name, leaf) for name, leaf in named_leaves(part, tree).items()]
        parts[part] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    return InFlight(
        **parts,
        fragment=np.int64(record["fragment"]),
        sent=np.int64(record["sent"]),
        due=np.array(record["due"], np.int64),
        takes_part=np.array(record["takes_part"], bool),
        anchor_updated=np.bool_(record["moved"]),
        level=np.int64(record["level"]),
    )


def _fitting(spec: list, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> P:
    """`spec` without the axes that do not divide a dimension on this mesh."""

    def fits(size: int, axes) -> bool:
        axes = axes if isinstance(axes, list) else [axes]
        return size % math.prod(mesh.shape[a] for a in axes if a is not None) == 0

    kept = [axes if fits(size, axes) else None for size, axes in zip(shape, spec)]
    return P(*(tuple(axes) if isinstance(axes, list) else axes for axes in kept))


def fill(target: TrainState, arrays: dict[str, np.ndarray]) -> TrainState:
    """Put host arrays where the target's leaves lie; the counters stay on the host."""
    expected = state_leaves(target)
    on_device = [name for name, leaf in expected.items() if leaf.sharding is not None]
    placed = place_like(
        [arrays[name] for name in on_device], [expected[name] for name in on_device]
    )
    filled = dict(zip(on_device, placed))
    for name in expected.keys() - filled.keys():
        array = np.array(arrays[name])
        filled[name] = array if array.ndim else array[()]

    def tree(prefix: str, like: PyTree) -> PyTree:
        leaves = [filled[name] for name in named_leaves(prefix, like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    flights = {}
    for key, flight in target.in_flight.items():
        parts = {p: tree(f"in_flight/{key}/{p}", getattr(flight, p)) for p in FLIGHT_ARRAYS}
        flights[key] = dataclasses.replace(flight, **parts)
    fields = [f.name for f in dataclasses.fields(target) if f.name not in ("layout", "in_flight")]
    changes = {name: tree(name, getattr(target, name)) for name in fields}
    return target.replace(**changes, in_flight=flights)
