"""The document of a checkpoint, and the way from a checkpoint to a training state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from etils import epath

from lowcomm_jax.checkpoint import compare, leaves, store
from lowcomm_jax.checkpoint.resize import resize
from lowcomm_jax.checkpoint.target import Target, fill, make_target
from lowcomm_jax.engine import Engine
from lowcomm_jax.methods.base import Method
from lowcomm_jax.state import TrainState

PyTree = Any

log = logging.getLogger(__name__)


def describe(
    state: TrainState, extra: dict, config: dict, metrics: dict, method: Method | None
) -> dict:
    """Everything a checkpoint says of itself, apart from the index of its arrays."""
    clock = state.clock
    return {
        "format": compare.FORMAT,
        "packages": compare.package_versions(),
        "step": int(clock.step),
        "regions": leaves.region_count(state),
        "method": compare.describe_method(method),
        "config": config,
        "extra": extra,
        "metrics": metrics,
        "in_flight": leaves.flight_records(state),
        "fragments": {
            "last_sent": clock.last_sent.tolist(),
            "last_landed": clock.last_landed.tolist(),
            "staleness": clock.staleness.tolist(),
        },
    }


def load(
    path: epath.Path,
    engine: Engine,
    params: PyTree,
    config: dict | None,
    ignore: Sequence[str],
    change_regions: bool,
) -> tuple[TrainState, dict]:
    """Read one checkpoint onto the engine's mesh; arguments as in `Checkpoints.restore`.

    Raises:
      DamagedError: it cannot be read back as it was written.
      ValueError: it does not belong to this engine and config, with every difference.
    """
    document = store.read_document(path)
    if document["format"] != compare.FORMAT:
        raise _refusal(path, [f"format: {document['format']} -> {compare.FORMAT}"])
    target = make_target(engine, params, document["in_flight"])
    regions = document["regions"], engine.regions.count
    problems = _origin_problems(document, engine, config, ignore)
    problems += _region_problems(document, regions, change_regions)
    saved = leaves.saved_shapes(document["arrays"])
    problems += compare.differing_leaves(saved, leaves.state_leaves(target.state), regions)
    if problems:
        raise _refusal(path, problems)
    arrays = leaves.gather(store.read_arrays(path, document))
    for line in compare.differing_fields(document["packages"], compare.package_versions()):
        log.warning("%s: other packages, so perhaps not bit for bit: %s", path, line)
    return _fill(target, arrays, regions), document


def _refusal(path: epath.Path, problems: list[str]) -> ValueError:
    return ValueError("\n- ".join([f"{path} is not of this run (saved -> now):", *problems]))


def _origin_problems(document: dict, engine: Engine, config, ignore) -> list[str]:
    problems = []
    if document["method"] is not None:
        now = store.plain(compare.describe_method(engine.method))
        problems += compare.differing_fields(document["method"], now, ignore, "method")
    if config is not None:
        problems += compare.differing_fields(document["config"], store.plain(config), ignore)
    return problems


def _region_problems(document: dict, regions: tuple[int, int], change: bool) -> list[str]:
    old, new = regions
    if old == new:
        return []
    if not change:
        return [f"regions: {old} -> {new} (allow it with change_regions=True)"]
    keys = [record["key"] for record in document["in_flight"]]
    if keys:
        return [
            f"regions: {old} -> {new} with payloads in flight {keys}: restore with {old} regions, "
            f"call engine.finish(state), save, and restore that with {new}"
        ]
    return []


def _fill(target: Target, arrays: dict, regions: tuple[int, int]) -> TrainState:
    if regions[0] != regions[1]:
        anchors = next(iter(target.state.anchor.values())).shape[0]
        arrays = resize(arrays, target.fresh, regions, anchors)
    return fill(target.state, arrays)
