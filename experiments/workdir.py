"""The folder of a run: its file names, its stored config, and whether it belongs to this run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.cli import RefusedError
from experiments.shape import read_json
from lowcomm_jax.adloco.setup import AdaptiveSetup
from lowcomm_jax.settings import config_fields, settings_of

LOCK = ".lock"
CONFIG, METRICS, CHECKPOINTS, CURVES = "config.json", "metrics.jsonl", "checkpoints", "loss.png"
_UPKEEP = (
    "log",
    "checkpoint",
    "rendezvous",
    "secret",
    "address",
    "listen",
    "certificates",
    "wait_minutes",
    "deadline_s",
    "processes",
    "process",
    "coordinator",
)
"""Fields of a job's surroundings, which nothing compares."""


def _that_decide(what: str) -> tuple[str, ...]:
    """Fields of the engine's settings that are so marked (`settings.InConfig`)."""
    described = settings_of(AdaptiveSetup)
    return tuple(
        field
        for name, field in config_fields(AdaptiveSetup).items()
        if described[name].in_config.decides == what
    )


PLACES = (
    *_that_decide("place"),
    "mesh.fsdp",
    "mesh.region",
    "mesh.tensor",
    "microbatches",
    "model.attention",
    "model.loss_tiles",
    "model.remat",
    "model.unroll",
    "pipeline_schedule",
)
"""Fields that say where and how a run computes: with others it learns the same, up to rounding."""
_BESIDE = (*_that_decide("beside"), "data.cache_dir", "eval")
"""Fields of what is measured or kept beside the training."""
_OF_A_JOB = ("region", "mesh", "model.layer_loop")
"""Fields of what is learnt in which the jobs of a run's regions may differ."""
_BY_PATH = ("text", "parquet", "arrayrecord", "file")
"""Kinds of corpora and tokenizers that are named by a path; `data_identity` has their content."""


def of_program(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config in which the processes of one program must agree."""
    return {k: v for k, v in fields.items() if k not in _UPKEEP}


def learnt(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that decides what is learnt: it must stay when a run continues."""
    free = {*PLACES, *_BESIDE}
    if fields["random_routing"]:  # every microbatch draws a path of its own
        free -= {"accumulate", "mesh.fsdp", "microbatches"}
    if fields["model"].get("name") is not None:  # what its settings do is not known here
        free -= {name for name in free if name.startswith("model.")}
    kept = _without(of_program(fields), free)
    kept["data"] |= {name: without_path(kept["data"][name]) for name in ("corpus", "tokenizer")}
    return kept


def of_regions(fields: Mapping[str, Any], corpus: str) -> dict[str, Any]:
    """What the jobs of a run's regions have in common.

    Args:
      corpus: `TrainData.identity`, which tells apart texts of one kind.
    """
    return {**_without(learnt(fields), _OF_A_JOB), "corpus": corpus}


def _has_begun(workdir: Path) -> bool:
    """Whether the folder's run has written more than its config: else nothing would continue."""
    written = (workdir / METRICS).exists() or (workdir / CHECKPOINTS).is_dir()
    return written and (workdir / CONFIG).is_file()


def without_path(name: str) -> str:
    """A corpus or a tokenizer by its kind alone where its name is a path."""
    kind = name.partition(":")[0]
    return kind if kind in _BY_PATH else name


def _without(fields: Mapping[str, Any], names: Container[str], prefix: str = "") -> dict[str, Any]:
    """A config without some fields, given by their dotted names."""
    return {
        k: _without(v, names, f"{prefix}{k}.") if isinstance(v, Mapping) else v
        for k, v in fields.items()
        if f"{prefix}{k}" not in names
    }


def as_begun(workdir: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the `model.layer_loop` that the folder's run has, where it asks for none.

    `auto` is another one on another device, and names of parameters follow from it.

    Raises:
      RefusedError: the stored config is damaged.
    """
    model = fields["model"]
    asks = model.get("name") is not None or model["layer_loop"] not in (None, "auto")
    if asks or not _has_begun(workdir):
        return dict(fields)
    there = read_config(workdir).get("model")
    loop = there.get("layer_loop") if isinstance(there, Mapping) else None
    return {**fields, "model": {**model, "layer_loop": loop}}


def workdir_problems(workdir: Path, fields: Mapping[str, Any]) -> list[str]:
    """Why this folder cannot hold this run; empty when it is new, or holds the same run."""
    if workdir.exists() and not workdir.is_dir():
        return [f"--workdir={workdir} is a file: choose another"]
    if "\\" in str(workdir.absolute()):
        return [f"--workdir={workdir}: no backslash, TensorStore reads a slash; choose another"]
    above = next(folder for folder in (workdir, *workdir.absolute().parents) if folder.exists())
    if not above.is_dir():
        return [f"--workdir={workdir} cannot be made: {above} is a file; choose another"]
    if not os.access(above, os.W_OK | os.X_OK):
        return [f"--workdir={workdir}: {above} cannot be written to; choose another"]
    stored = workdir / CONFIG
    if not stored.is_file() and (workdir / METRICS).exists():
        return [f"--workdir={workdir} holds {METRICS} but no {CONFIG}: choose another"]
    if not stored.is_file():
        return []
    try:
        there = read_config(workdir)
    except RefusedError as error:
        return error.problems
    if not _has_begun(workdir):
        return []
    try:
        before = learnt(there)
    except (AttributeError, KeyError, TypeError):
        return [f"{stored}: no config of a run; choose another --workdir"]
    changed = differences(before, learnt(as_begun(workdir, fields)))
    if not changed:
        return []
    return [
        f"--workdir={workdir} holds a run of other settings (there -> here): "
        f"{'; '.join(changed)}. Give it those, or {other_folder(workdir)}"
    ]


def other_folder(workdir: Path) -> str:
    """The fix where a folder's run cannot continue."""
    fix = "choose another --workdir"
    if (workdir / CHECKPOINTS).is_dir():
        fix += f"; train starts from this run's weights with --config.model.init_from={workdir}"
    return fix


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every field in which two configs differ, `name: there -> here`."""
    found = []
    for key in sorted({*there, *here}):
        a, b = there.get(key), here.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a} -> {b}")
    return found


def read_config(workdir: Path) -> dict[str, Any]:
    """The stored config of a run.

    Raises:
      RefusedError: the file is damaged.
    """
    fix = "put the run's own back, or choose another folder"
    found = read_json(workdir / CONFIG, f"--workdir={workdir}", fix)
    if not isinstance(found, dict):
        raise RefusedError([f"{workdir / CONFIG}: no config; {fix}"], f"--workdir={workdir}")
    return found


def write_config(workdir: Path, fields: Mapping[str, Any]) -> None:
    """Store the config of a run."""
    workdir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(fields, indent=1, sort_keys=True)
    write_whole(workdir / CONFIG, text + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole: a full disk, or a kill, leaves the old one."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


class OccupiedError(RefusedError):
    """Another process trains in the folder: nothing in it may be touched."""


@contextlib.contextmanager
def occupied(workdir: Path) -> Iterator[None]:
    """Lock the folder against other runs; the kernel frees it when this process ends.

    Raises:
      OccupiedError: another process trains there; says which one, on which host.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            fix = "wait for it, end it, or choose another folder"
            raise OccupiedError([f"--workdir={workdir} is in use by {owner}: {fix}"]) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def occupied_problems(workdirs: Iterable[Path]) -> list[str]:
    """A line for each of these folders in which another process trains: who does."""
    problems: list[str] = []
    for workdir in workdirs:
        if (workdir / LOCK).is_file():
            try:
                with occupied(workdir):
                    pass
            except OccupiedError as error:
                problems += error.problems
    return problems
