"""Checkpoints of runs with several trainers: each is a training state under a name of its own.

The arrays of trainer i are called `trainer_<i>/...`. Its host-side values (batch, request, place in
its stream, the policy's state) are in the document under `trainers`. Of trainers that were merged
away only the byte counts are saved.
"""

from __future__ import annotations

import numpy as np

from lowcomm_jax.adaptive.engine import AdaptiveEngine
from lowcomm_jax.adaptive.state import AdaptiveState, Trainer
from lowcomm_jax.engine import Engine
from lowcomm_jax.state import leaves
from lowcomm_jax.state.train_state import TrainState

State = TrainState | AdaptiveState


def parts(state: State) -> dict[str, TrainState]:
    """The training states by the prefix of their arrays' names."""
    if isinstance(state, TrainState):
        return {"": state}
    return {leaves.trainer_prefix(i): trainer.state for i, trainer in state.trainers.items()}


def one_of(state: State) -> TrainState:
    """A training state whose counters and shapes are those of all."""
    return next(iter(parts(state).values()))


def plain_engine(engine: Engine | AdaptiveEngine) -> Engine:
    """The engine of every single training state."""
    return engine.engine if isinstance(engine, AdaptiveEngine) else engine


def all_leaves(states: dict[str, TrainState]) -> leaves.Named:
    """Arrays of all parts by name."""
    return {
        prefix + name: leaf
        for prefix, state in states.items()
        for name, leaf in leaves.state_leaves(state).items()
    }


def describe(state: State) -> dict | None:
    """Host-side values beside the training states, as JSON values; None for a single trainer."""
    if isinstance(state, TrainState):
        return None
    return state.as_document()


def saved_flights(document: dict) -> dict[str, list[dict]]:
    """Payloads in flight of every part of a checkpoint."""
    several = document.get("trainers")
    if several is None:
        return {"": document["in_flight"]}
    return {
        leaves.trainer_prefix(number): trainer["in_flight"]
        for number, trainer in several["live"].items()
    }


def origin_problems(document: dict, engine: Engine | AdaptiveEngine) -> list[str]:
    """A run of one kind of engine does not go on in the other."""
    saved = document.get("trainers") is not None
    if saved == isinstance(engine, AdaptiveEngine):
        return []
    kinds = ("Engine", "AdaptiveEngine")
    return [f"engine: {kinds[saved]} -> {kinds[not saved]}"]


def restored(document: dict, states: dict[str, TrainState], regions: int) -> State:
    """Put restored training states and the document together; `regions`: of the run."""
    several = document.get("trainers")
    if several is None:
        return states[""]
    count = leaves.region_count(next(iter(states.values())))
    trainers = {
        int(number): Trainer(
            state=states[leaves.trainer_prefix(number)],
            batch=kept["batch"],
            request=kept["request"],
            used_R=_resized(kept["used"], regions),
            policy=kept["policy"],
            measured=kept.get("measured"),
        )
        for number, kept in several["live"].items()
    }
    return AdaptiveState(
        trainers=trainers,
        samples=several["samples"],
        retired_sent=_resized(several["retired_sent"], count),
        retired_received=_resized(several["retired_received"], count),
    )


def _resized(counts_R: list[int], regions: int) -> np.ndarray:
    """With another number of regions, new ones have sent and used nothing."""
    out = np.zeros(regions, np.int64)
    out[: len(counts_R)] = counts_R[:regions]
    return out
