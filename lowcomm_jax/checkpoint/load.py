"""The document of a checkpoint, and the way from a checkpoint to a training state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from etils import epath

from lowcomm_jax.adaptive.engine import AdaptiveEngine
from lowcomm_jax.checkpoint import compare, leaves, store, trainers
from lowcomm_jax.checkpoint.apart import alone
from lowcomm_jax.checkpoint.resize import resize
from lowcomm_jax.checkpoint.target import Target, fill, make_target
from lowcomm_jax.engine import Engine
from lowcomm_jax.methods.base import Method
from lowcomm_jax.processes import team
from lowcomm_jax.state import TrainState

PyTree = Any

log = logging.getLogger(__name__)


def describe(
    state: trainers.State, extra: dict, config: dict, metrics: dict, method: Method | None
) -> dict:
    """Everything a checkpoint says of itself, apart from the index of its arrays."""
    one = trainers.one_of(state)
    clock, several = one.clock, trainers.describe(state)
    more = {} if several is None else {"trainers": several}
    return {
        "format": compare.FORMAT,
        "packages": compare.package_versions(),
        "step": int(clock.step),
        "regions": leaves.region_count(one),
        "method": compare.describe_method(method),
        "config": config,
        "extra": extra,
        "metrics": metrics,
        "in_flight": leaves.flight_records(one),
        "fragments": {
            "last_sent": clock.last_sent.tolist(),
            "last_landed": clock.last_landed.tolist(),
            "staleness": clock.staleness.tolist(),
        },
        **more,
    }


def load(
    path: epath.Path,
    engine: Engine | AdaptiveEngine,
    params: PyTree,
    config: dict | None,
    ignore: Sequence[str],
    change_regions: bool,
) -> tuple[trainers.State, dict]:
    """Read one checkpoint onto the engine's mesh; arguments as in `Checkpoints.restore`.

    Raises:
      DamagedError: it cannot be read back as it was written.
      ValueError: it does not belong to this engine and config, with every difference.
    """
    document = team().told("document", lambda: alone(store.read_document, path))
    if document["format"] != compare.FORMAT:
        raise _refusal(path, [f"format: {document['format']} -> {compare.FORMAT}"])
    flights, plain = trainers.saved_flights(document), trainers.plain_engine(engine)
    targets = {part: make_target(plain, params, records) for part, records in flights.items()}
    regions = document["regions"], engine.regions.count
    problems = trainers.origin_problems(document, engine)
    problems += _origin_problems(document, engine, config, ignore)
    problems += _region_problems(flights, regions, change_regions)
    codec = plain.method.codec
    if codec is not None and codec.increments and regions[0] != regions[1]:
        problems.append(
            f"regions: {codec.name} keeps a running mean of {regions[0]} of them: keep as many"
        )
    saved = leaves.saved_shapes(document["arrays"])
    expected = trainers.all_leaves({part: target.state for part, target in targets.items()})
    problems += compare.differing_leaves(saved, expected, regions)
    if problems:
        raise _refusal(path, problems)
    # By the first process for all: the others need not reach the folder.
    arrays = team().told("arrays", lambda: leaves.gather(alone(store.read_arrays, path, document)))
    for line in compare.differing_fields(document["packages"], compare.package_versions()):
        log.warning("%s: other packages, so perhaps not bit for bit: %s", path, line)
    states = {
        part: _fill(target, _of_part(arrays, part), regions) for part, target in targets.items()
    }
    return trainers.restored(document, states), document


def _refusal(path: epath.Path, problems: list[str]) -> ValueError:
    return ValueError("\n- ".join([f"{path} is not of this run (saved -> now):", *problems]))


def _origin_problems(document: dict, engine, config, ignore) -> list[str]:
    problems = []
    if document["method"] is not None:
        now = store.plain(compare.describe_method(engine.method))
        problems += compare.differing_fields(document["method"], now, ignore, "method")
    if config is not None:
        problems += compare.differing_fields(document["config"], store.plain(config), ignore)
    return problems


def _region_problems(
    flights: dict[str, list[dict]], regions: tuple[int, int], change: bool
) -> list[str]:
    old, new = regions
    if old == new:
        return []
    if not change:
        return [f"regions: {old} -> {new} (allow it with change_regions=True)"]
    keys = [record["key"] for records in flights.values() for record in records]
    if keys:
        return [
            f"regions: {old} -> {new} with payloads in flight {keys}: restore with {old} regions, "
            f"call engine.finish(state), save, and restore that with {new}"
        ]
    return []


def _of_part(arrays: dict, part: str) -> dict:
    """The arrays of one training state, under their own names."""
    return {name.removeprefix(part): x for name, x in arrays.items() if name.startswith(part)}


def _fill(target: Target, arrays: dict, regions: tuple[int, int]) -> TrainState:
    if regions[0] != regions[1]:
        anchors = next(iter(target.state.anchor.values())).shape[0]
        arrays = resize(arrays, target.fresh, regions, anchors)
    return fill(target.state, arrays)
