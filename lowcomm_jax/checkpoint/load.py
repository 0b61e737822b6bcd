"""`describe` gives the JSON document of a checkpoint; `load` reads a checkpoint into a state.

`load` places the arrays on an engine's mesh. It refuses a checkpoint of another run, with one line
for each difference: method, config, regions, arrays.

With `change_regions`, `resize` resumes R regions as R'. The first min(R, R') regions go on as they
are. A new region

- starts from the anchor: the mean of anchors where every region has its own, that of the regions'
  parameters where there is none;
- has zero residuals and fresh landing state;
- takes over region 0's inner optimizer state, step and local buffers. Moments and the count of a
  learning-rate schedule belong together: a region that warms up again while the others already
  decay would move the anchor too far;
- has consumed no tokens and sent no bytes, and counts as landed at the step of the resume.

The progress that a region has made since its last landing is lost where the region is left out. To
keep it, end the run with `Engine.finish` and save before. With payloads in flight `load` refuses
the change: to drop a payload that has landed in some regions would apply the same progress twice.
Averages of channels in flight are dropped, since a missed average applies nothing twice. Batches
that grow stay for a round more, where its noise was measured by other regions.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from etils import epath

from lowcomm_jax.adloco.engine import AdaptiveEngine
from lowcomm_jax.adloco.state import AdaptiveState
from lowcomm_jax.checkpoint import store
from lowcomm_jax.checkpoint.target import fill, fresh_values, make_target
from lowcomm_jax.engine import Engine
from lowcomm_jax.mesh.arrays import host_form, key_kinds
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.methods.base import Method
from lowcomm_jax.refused import refuse
from lowcomm_jax.state import leaves
from lowcomm_jax.state.leaves import ANCHORED, field_of, region_axis
from lowcomm_jax.state.train_state import TrainState

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
SHOWN = 20
MISSING = "missing"
ZERO = ("inner/tokens", "counters/bytes_sent", "counters/bytes_received", "counters/staleness")
PyTree = Any
State = TrainState | AdaptiveState
Arrays = dict[str, np.ndarray]
log = logging.getLogger(__name__)


def describe(state: State, extra: dict, config: dict, metrics: dict, method: Method | None) -> dict:
    """The JSON document of a checkpoint, without the index of its arrays.

    Args:
      state: what is saved.
      extra: the caller's own entries.
      config: of the run.
      metrics: of the state, such as the evaluation loss.
      method: of the engine; None is described as null.
    """
    one = next(iter(state.parts.values()))
    counters, more = one.counters, state.document()
    if keys := key_kinds(all_leaves(state.parts)):
        more["keys"] = keys
    return {
        "packages": package_versions(),
        "step": int(counters.step),
        "regions": leaves.region_count(one),
        "method": describe_method(method),
        "config": config,
        "extra": extra,
        "metrics": metrics,
        "in_flight": {part: leaves.flight_records(each) for part, each in state.parts.items()},
        "fragments": {
            "last_sent": counters.last_sent.tolist(),
            "last_landed": counters.last_landed.tolist(),
            "staleness": counters.staleness.tolist(),
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
) -> tuple[State, dict]:
    """Read one checkpoint onto the engine's mesh; arguments as in `Checkpoints.restore`.

    Raises:
      DamagedError: it cannot be read back as it was written.
      ValueError: it does not belong to this engine and config, with every difference.
    """
    document = leader().broadcast_from_leader("document", lambda: store.read_document(path))
    saved = store.saved_shapes(document)
    flights, plain, trainers = document["in_flight"], engine.plain, _trainers_of(document, path)
    targets = {part: make_target(plain, params, records) for part, records in flights.items()}
    regions = document["regions"], engine.regions.count
    problems = engine_problems(document, engine)
    if trainers is not None and not problems:
        problems += _trainer_problems(trainers, engine)
    problems += _origin_problems(document, engine, config, ignore)
    problems += _region_problems(flights, regions, change_regions)
    codec = plain.method.codec
    if codec is not None and codec.increments and regions[0] != regions[1]:
        problems.append(
            f"regions: {codec.name} keeps a running mean of {regions[0]} of them: keep as many"
        )
    expected = all_leaves(targets)
    on_host = {name: host_form(x) for name, x in expected.items()}
    problems += differing_leaves(saved, on_host, regions)
    problems += differing_fields(document.get("keys", {}), key_kinds(expected), (), "keys")
    refuse(f"{path} is not of this run (saved -> now)", problems)
    # By the leader for all: the others need not reach the folder.
    arrays = leader().broadcast_from_leader("arrays", lambda: store.read_arrays(path, document))
    for line in differing_fields(document["packages"], package_versions()):
        log.warning("%s: other packages, so perhaps not bit for bit: %s", path, line)
    states = {
        part: _fill(plain, target, _of_part(arrays, part), regions)
        for part, target in targets.items()
    }
    if trainers is None:
        return states[""], document
    if regions[0] != regions[1]:  # what others have measured says nothing of these
        trainers = trainers.each(lambda _, trainer: trainer.replace(measured=None))
    state = trainers.each(lambda i, one: one.replace(state=states[leaves.trainer_prefix(i)]))
    return state, document


def all_leaves(states: dict[str, TrainState]) -> leaves.Named:
    """Arrays of all training states by name; `states` by the prefix of their names."""
    return {
        prefix + name: leaf
        for prefix, state in states.items()
        for name, leaf in leaves.state_leaves(state).items()
    }


def engine_problems(document: dict, engine: Engine | AdaptiveEngine) -> list[str]:
    """A run of one kind of engine does not go on in the other."""
    saved = "trainers" in document
    if saved == isinstance(engine, AdaptiveEngine):
        return []
    kinds = ("Engine", "AdaptiveEngine")
    return [f"engine: {kinds[saved]} -> {kinds[not saved]}"]


def _trainers_of(document: dict, path: epath.Path) -> AdaptiveState | None:
    """What the document says of several trainers, without their states; None of one state.

    Raises:
      DamagedError: it is none of trainers, or not of those whose states are saved.
    """
    found, parts = None, [""]
    if "trainers" in document:
        try:
            found = AdaptiveState.of_document(document["trainers"])
        except msgspec.ValidationError as error:
            raise store.DamagedError(f"{path}: trainers: {error}") from None
        parts = [leaves.trainer_prefix(number) for number in found.trainers]
        measured = [one.measured for one in found.trainers.values() if one.measured is not None]
        lengths = {len(of_regions) for of_regions in measured} - {document["regions"]}
        if lengths:
            raise store.DamagedError(
                f"{path}: trainers: {lengths.pop()} regions have measured, of {document['regions']}"
            )
    if not parts:
        raise store.DamagedError(f"{path}: trainers: there are none")
    if {*parts} != document["in_flight"].keys():
        raise store.DamagedError(
            f"{path}: its states are {sorted(document['in_flight'])}, and its document tells of "
            f"{sorted(parts)}"
        )
    return found


def _trainer_problems(trainers: AdaptiveState, engine: AdaptiveEngine) -> list[str]:
    """Trainers, and memories of batch policies, that the engine does not have."""
    lacks = trainers.trainers.keys() - engine.engines.keys()
    problems = [f"trainer {number}: saved -> {MISSING}" for number in sorted(lacks)]
    now = sorted(engine.policy.init())
    return problems + [
        f"policy of trainer {number}: {sorted(trainer.policy)} -> {now}"
        for number, trainer in trainers.trainers.items()
        if sorted(trainer.policy) != now
    ]


def _origin_problems(document: dict, engine, config, ignore) -> list[str]:
    problems = []
    if document["method"] is not None:
        now = store.plain(describe_method(engine.method))
        problems += differing_fields(document["method"], now, ignore, "method")
    if config is not None:
        problems += differing_fields(document["config"], store.plain(config), ignore)
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


def _fill(engine: Engine, target: TrainState, arrays: dict, regions: tuple[int, int]) -> TrainState:
    if regions[0] != regions[1]:
        anchors = max([x.shape[0] for x in target.anchor.values()], default=1)
        fresh = fresh_values(engine.programs_for(target.layout))
        arrays = resize(arrays, fresh, regions, anchors)
    return fill(target, arrays)


# -- where a checkpoint comes from, and how that differs ---------------------------------------


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that numbers depend on."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def describe_method(method: Method | None) -> dict | None:
    """JSON description of a method, without its `problems`; None for None."""
    if method is None:
        return None
    described = describe_origin(method)
    return {k: v for k, v in described.items() if k not in ("type", "problems")}


def describe_origin(value: Any) -> Any:
    """Describe a method (or a part of one) in JSON.

    Optax transforms are closures: only their presence is recorded, their numbers belong into the
    config.
    """
    if isinstance(value, optax.GradientTransformation):
        return "transform"
    if dataclasses.is_dataclass(value):
        fields = {
            f.name: describe_origin(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
        return {"type": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {str(k): describe_origin(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [describe_origin(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__


def differing_fields(old: dict, new: dict, ignore: Sequence[str] = (), prefix: str = "") -> list:
    """One line `name: old -> new` for each field that differs.

    Args:
      ignore: dotted names that may differ, with everything below them.
    """
    old, new = dotted(old, prefix), dotted(new, prefix)
    lines = []
    for name in sorted(old.keys() | new.keys()):
        texts = [json.dumps(d[name]) if name in d else MISSING for d in (old, new)]
        ignored = any(name == field or name.startswith(f"{field}.") for field in ignore)
        if texts[0] != texts[1] and not ignored:
            lines.append(f"{name}: {texts[0]} -> {texts[1]}")
    return lines


def dotted(value: Any, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists stay whole."""
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    flat = {}
    for key, item in value.items():
        flat |= dotted(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def differing_leaves(old: dict, new: dict, regions: tuple[int, int]) -> list[str]:
    """Lines for arrays that are missing, new, or of another shape or type.

    Args:
      old, new: name -> array or shape of the whole state.
      regions: number of regions of each; the length of region axes is not compared.
    """
    lines = []
    for name in sorted(old.keys() | new.keys()):
        texts = [_leaf_text(name, tree) for tree in (old, new)]
        if name in old and name in new and field_of(name) in ANCHORED:
            axes = old[name].shape[0], new[name].shape[0]
            if axes not in ((1, 1), regions):
                texts = [f"{text} in {count} anchors" for text, count in zip(texts, axes)]
        if texts[0] != texts[1]:
            lines.append(f"{name}: {texts[0]} -> {texts[1]}")
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"... and {len(lines) - SHOWN} more arrays"]
    return lines


def _leaf_text(name: str, tree: dict) -> str:
    """`float32[3, 5]` for one region or anchor."""
    if name not in tree:
        return MISSING
    leaf = tree[name]
    axis = 0 if field_of(name) in ANCHORED else region_axis(name)
    shape = [n for i, n in enumerate(leaf.shape) if i != axis]
    return f"{leaf.dtype.name}{shape}"


# -- another number of regions -----------------------------------------------------------------


def resize(saved: Arrays, fresh: Arrays, regions: tuple[int, int], anchors: int) -> Arrays:
    """Return the arrays of the whole state for another number of regions.

    Args:
      saved: arrays of the whole state, nothing in flight.
      fresh: initial codec and landing states, leaves `[new, ...]`.
      regions: (old, new) number of regions.
      anchors: number of anchors from now on: 1, or one per region.
    """
    old, new = regions
    out = {}
    for name, array in saved.items():
        if field_of(name) in ANCHORED:
            out[name] = _extend(array[:anchors], _mean(array), anchors, 0)
        elif field_of(name) == "channels":
            out[name] = np.zeros((new, *array.shape[1:]), array.dtype)
        elif (axis := region_axis(name)) is not None:
            kept = np.take(array, range(min(old, new)), axis=axis)
            out[name] = _extend(kept, _newcomer(name, saved, fresh, axis), new, axis)
        else:
            out[name] = array
    return out


def _newcomer(name: str, saved: Arrays, fresh: Arrays, axis: int) -> np.ndarray:
    """One new region's value of a leaf."""
    first = np.take(saved[name], 0, axis=axis)
    for copy in ("inner/params/", "received/"):
        if name.startswith(copy):
            return _mean(saved.get("anchor/" + name.removeprefix(copy), saved[name]))
    if name.startswith("inner/rounding/"):
        leaf = name.removeprefix("inner/rounding/")
        anchor = _mean(saved.get(f"anchor/{leaf}", saved[f"inner/params/{leaf}"]))
        anchor = anchor.astype(np.float32)
        return anchor - anchor.astype(saved[f"inner/params/{leaf}"].dtype).astype(np.float32)
    if name in ZERO:
        return np.zeros_like(first)
    if name == "counters/last_landed":
        return np.full_like(first, saved["counters/step"])
    if name in fresh:
        return np.take(fresh[name], 0, axis=axis)
    return first


def _extend(kept: np.ndarray, value: np.ndarray, length: int, axis: int) -> np.ndarray:
    """Append copies of one region's `value` until the axis is `length` long."""
    missing = length - kept.shape[axis]
    added = np.stack([value] * missing, axis=axis) if missing else np.take(kept, [], axis=axis)
    return np.concatenate([kept, added.astype(kept.dtype)], axis=axis)


def _mean(array_A: np.ndarray) -> np.ndarray:
    """Mean over anchors; counters come from the first."""
    floating = jnp.issubdtype(array_A.dtype, jnp.floating)
    return array_A.mean(axis=0, dtype=np.float32) if floating else array_A[0]
