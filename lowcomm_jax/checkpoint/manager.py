"""Saves, keeps and restores checkpoints of a run."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from lowcomm_jax.adloco.engine import AdaptiveEngine
from lowcomm_jax.checkpoint import store
from lowcomm_jax.checkpoint.load import State, all_leaves, describe, load
from lowcomm_jax.checkpoint.store import DamagedError
from lowcomm_jax.engine import Engine
from lowcomm_jax.mesh.arrays import Box, fetch, fetch_boxes, host_form
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.methods.base import Method
from lowcomm_jax.refused import refuse

PyTree = Any
Skipped = list[tuple[int, str]]

# Orbax writes and reads the arrays (`store`). What else its `CheckpointManager` offers is done
# here, since with Orbax 0.12.8 each of the four lost something:
#
# - Steps that appear whole: a step that is saved again is deleted first, so a kill leaves neither.
#   A kill while a step is deleted leaves half of it under its name, and it is listed. The folder of
#   a failed save stays until a manager is made that cleans up. If a reader makes it, the folder of
#   the save under way goes, too.
# - The newest are kept: a save that fails in the background drops the older ones from the manager's
#   list. They are not deleted, and without a `reload` none ever is.
# - The best is kept: no call takes metrics measured after the save. They can be written into
#   Orbax's own file; then `reload` raises where that file was cut off, and nothing is deleted
#   before the next save.
# - Asynchronous saves: if one process cannot write, all wait for the whole timeout (20 minutes by
#   default), and the error names neither the process nor the reason. A failure prints hundreds of
#   lines. In its default setting threads keep the interpreter from ending for another 300 s.

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.1
_TOKEN_S = 2.0  # a network's file system may show it a little late


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint, see `Checkpoints.restore`.

    Attributes:
      state: the training state, on the engine's mesh; of an `AdaptiveEngine` with its trainers.
      extra: the JSON values saved beside the state.
      step: inner steps done.
      skipped: (step, reason) of newer checkpoints that could not be used.
    """

    state: State
    extra: dict[str, Any]
    step: int
    skipped: Skipped


class Checkpoints:
    """The checkpoints of one run in one directory.

    A checkpoint `<directory>/<step>/` holds

    - `part_<i>/`: the arrays of the whole state, as far as process i has written them;
    - `document.json`: package versions, config, extra, metrics, method, the last send and landing
      and the staleness of every fragment, payloads in flight, the implementation of typed PRNG
      keys, the digest of every array;
    - `metrics.json`: metrics that were added later.

    It appears under its name when it is complete.

    In a job of several `jax.distributed` processes all call the same methods. Where all reach the
    directory, each writes the parts that its devices hold, and the leader makes one checkpoint of
    them. Else the leader writes alone, and its host holds the whole state meanwhile. The leader
    reads for all. Any number of processes can restore a checkpoint.

    Only one job may write at a time. Use it as a context manager, or call `close`: a save that
    still runs when the interpreter ends is lost.

    Args:
      directory: local path or any path Orbax can write to; made if need be.
      keep_last: newest checkpoints to keep.
      keep_best: name of a metric; the checkpoint where it is lowest is kept too.
      asynchronous: write in a background thread; `save` waits for the copy to the host only.

    Raises:
      ValueError: `keep_last` below 1, or a backslash in the path.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_best: str | None = None,
        asynchronous: bool = True,
    ):
        problems = []
        if keep_last < 1:
            problems.append(f"keep_last={keep_last}: keep at least 1")
        if "\\" in os.path.abspath(directory):
            fix = "TensorStore reads a backslash as a slash; choose another folder"
            problems.append(f"directory={os.fspath(directory)}: {fix}")
        refuse("checkpoints cannot work like this", problems)
        self.directory: epath.Path = epath.Path(directory).absolute()
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.asynchronous = asynchronous
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")
        self._pending: concurrent.futures.Future | None = None
        self._damaged: set[int] = set()
        self._shared: bool | None = None  # among all processes; unknown before the first save
        self._lost_part = threading.Event()

    # -- saving -------------------------------------------------------------------------------

    def save(
        self,
        state: State,
        *,
        extra: dict[str, Any],
        config: dict[str, Any],
        metrics: dict[str, float] | None = None,
        method: Method | None = None,
    ) -> None:
        """Save the state under its step; one of the same step is replaced.

        Returns once everything is copied to the host, so that the state may be donated. Waits for
        the previous save.

        Args:
          state: with whatever is in flight.
          extra: JSON-able; handed back by `restore` (data positions, seeds, ...).
          config: JSON-able; must match on restore.
          metrics: for `keep_best`; those measured later are for `add_metrics`.
          method: the engine's method; recorded and compared on restore.

        Raises:
          TypeError: `extra`, `config` or `metrics` cannot be written as JSON.
          ValueError: the state was donated before, or the directory holds later checkpoints, of
            another run or another branch.
          OSError: the step's folder cannot be made.
          Exception: whatever made the previous save fail.
        """
        state.refuse_donated()
        self.wait()
        step = int(state.counters.step)
        later = leader().broadcast_from_leader("later", lambda: self._later(step))
        if later:
            raise ValueError(
                f"step {step} cannot be saved: {self.directory} holds the later steps {later} of "
                f"another run or branch; delete them or use another directory"
            )
        document = store.plain(describe(state, extra, config, metrics or {}, method))
        named = {name: host_form(x) for name, x in all_leaves(state.parts).items()}
        shapes = {name: [np.dtype(x.dtype).name, list(x.shape)] for name, x in named.items()}
        path = self.directory / str(step)
        together = self._all_reach()
        leader().broadcast_from_leader("begun", lambda: store.begin(path))
        if together:
            boxes = fetch_boxes(named, leader().leads)
        else:
            arrays = fetch(named, here=leader().leads)
            boxes = {name: [Box((0,) * x.ndim, x)] for name, x in arrays.items()}
        if together or leader().leads:
            processes = leader().count if together else 1
            self._pending = self._worker.submit(
                self._write, path, processes, boxes, shapes, document
            )
        if not self.asynchronous:
            self.wait()

    def add_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Give a saved checkpoint metrics that were measured since; `keep_best` counts them, too.

        Waits for the save under way. A kill leaves the checkpoint with or without them.

        Raises:
          TypeError: `metrics` cannot be written as JSON.
          ValueError: there is no such step.
          OSError: the file cannot be written.
          Exception: whatever made the previous save fail.
        """
        self.wait()
        added = store.plain(metrics)

        def add() -> None:
            store.add_metrics(self._path(step), added)
            self._clean(step)

        leader().broadcast_from_leader("metrics", add)

    def _all_reach(self) -> bool:
        """Whether all processes of this job can read the leader's files."""
        if leader().count == 1:
            return True
        if self._shared is None:
            token = leader().broadcast_from_leader("token", self._leave_token)
            seen = _appears(self.directory / token)
            self._shared = all(leader().everyones("seen", seen))
            leader().broadcast_from_leader("asked", (self.directory / token).unlink)
            if not self._shared and leader().leads:
                log.info("not all processes reach %s: the first one writes alone", self.directory)
        return self._shared

    def _leave_token(self) -> str:
        self.directory.mkdir(parents=True, exist_ok=True)
        token = f"token-{secrets.token_hex(8)}"
        (self.directory / token).write_text("")
        return token

    def _later(self, step: int) -> list[int]:
        found = store.steps(self.directory)
        return [s for s in found if s > step and s not in self._damaged]

    def _write(
        self,
        path: epath.Path,
        processes: int,
        boxes: dict[str, list[Box]],
        shapes: dict[str, list],
        document: dict,
    ) -> None:
        store.write_part(path, leader().index, boxes)
        if not leader().leads:
            return
        for process in range(1, processes):
            while not store.has_part(path, process):
                leader().check()
                if self._lost_part.wait(_LOOK_EVERY_S):
                    return  # `wait` raises what made it fail
        store.seal(path, processes, shapes, document)
        self._damaged.discard(document["step"])
        self._clean(document["step"])

    def _clean(self, newest: int) -> None:
        """Delete checkpoints that need not be kept, and files of interrupted saves."""
        for _, path in store.leftovers(self.directory):
            store.remove(path)
        found = store.steps(self.directory)
        good = [s for s in found if s not in self._damaged]
        keep = {*good[-self.keep_last :], self._best()}
        for step, path in found.items():
            if step not in keep and step < newest:
                store.remove(path)

    def wait(self) -> None:
        """Wait for the save that is under way, if any.

        Raises:
          Exception: whatever made it fail.
        """
        pending, self._pending = self._pending, None
        if self._shared and pending is not None:
            self._wait_for_parts(pending)
        leader().broadcast_from_leader("saved", lambda: pending and pending.result())

    def _wait_for_parts(self, pending: concurrent.futures.Future) -> None:
        failed = None
        if not leader().leads and (error := pending.exception()):
            failed = f"{type(error).__name__}: {error}"
        lines = leader().everyones("part", failed)
        if any(lines):
            self._lost_part.set()
            concurrent.futures.wait([pending])
            self._lost_part.clear()
            raise RuntimeError(
                f"a checkpoint in {self.directory} was not written:\n- "
                + "\n- ".join(f"process {i}: {line}" for i, line in enumerate(lines) if line)
            )

    def close(self) -> None:
        """Wait, and stop the background thread; nothing can be saved afterwards."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- reading what is there ----------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps whose checkpoints are complete, ascending; a save under way is not among them."""
        return leader().broadcast_from_leader("steps", lambda: list(store.steps(self.directory)))

    def latest(self) -> int | None:
        """The newest step, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step where the metric `keep_best` is lowest (the later of equals), or None."""
        return leader().broadcast_from_leader("best", self._best)

    def _best(self) -> int | None:
        if self.keep_best is None:
            return None
        scores = {}
        for step in store.steps(self.directory):
            try:
                metrics = store.read_document(self._path(step))["metrics"]
            except DamagedError:
                # `restore` names it when it comes to it.
                continue
            if not math.isnan(score := metrics.get(self.keep_best, math.nan)):
                scores[step] = score
        return min(scores, key=lambda s: (scores[s], -s), default=None)

    def document(self, step: int | None = None) -> dict[str, Any]:
        """The JSON document of a checkpoint: `config`, `extra`, `metrics`, `method`, ...

        Raises:
          ValueError: there is no such step.
          DamagedError: the document cannot be read back as it was written.
        """
        number = self.latest() if step is None else step
        return leader().broadcast_from_leader(
            "document", lambda: store.read_document(self._path(number))
        )

    def _path(self, step: int | None) -> epath.Path:
        found = store.steps(self.directory)
        if step not in found:
            raise ValueError(
                f"no checkpoint of step {step} in {self.directory}; it holds {[*found]}: use "
                "one of these, or no step for the newest"
            )
        return found[step]

    # -- restoring ----------------------------------------------------------------------------

    def restore(
        self,
        engine: Engine | AdaptiveEngine,
        params: PyTree,
        *,
        step: int | None = None,
        config: dict[str, Any] | None = None,
        ignore: Sequence[str] = (),
        change_regions: bool = False,
    ) -> Restored | None:
        """Restore a checkpoint onto the engine's mesh, whatever mesh it was saved on.

        Damaged or unfinished checkpoints are skipped with a warning and the previous one is used.

        Args:
          engine: made with the method and the optimizers of the run.
          params: the user's parameters, for their structure: arrays or `jax.ShapeDtypeStruct`.
          step: None for the newest good one; a given step must be good.
          config: compared with the saved one; None to not compare.
          ignore: dotted names of config fields (or `method...` fields) that may differ.
          change_regions: allow another number of regions, see `checkpoint.load`.

        Returns:
          None when the directory holds no checkpoint.

        Raises:
          ValueError: the checkpoint belongs to another method, config, code format, model or
            number of regions, with every difference; or there is no such step.
          DamagedError: naming every checkpoint, when none can be used.
        """
        self.wait()
        wanted, left = leader().broadcast_from_leader("checkpoints", lambda: self._found(step))
        skipped: Skipped = [
            (number, f"{path}: the save was not finished")
            for number, path in reversed(left)
            if path.name.endswith(store.UNFINISHED)
        ]
        for number, path in reversed(wanted.items()):
            try:
                state, document = load(path, engine, params, config, ignore, change_regions)
            except DamagedError as error:
                if step is not None:
                    raise
                self._damaged.add(number)
                skipped.append((number, str(error)))
                continue
            _warn(skipped, f"; step {number} is used")
            return Restored(state, document["extra"], number, skipped)
        if not wanted:
            _warn(skipped, "")
            return None
        lines = [f"step {number}: {reason}" for number, reason in skipped]
        raise DamagedError("no checkpoint can be used:\n- " + "\n- ".join(lines))

    def _found(self, step: int | None) -> tuple[dict[int, epath.Path], list]:
        """(checkpoints by step, paths left by interrupted saves)."""
        wanted = store.steps(self.directory) if step is None else {step: self._path(step)}
        return wanted, store.leftovers(self.directory)


def _warn(skipped: Skipped, instead: str) -> None:
    """One line for each checkpoint that was skipped; of several processes the leader warns."""
    for step, reason in skipped if leader().leads else ():
        log.warning("skipped checkpoint of step %d: %s%s", step, reason, instead)


def _appears(path: epath.Path) -> bool:
    """Whether a file is there, or comes within `_TOKEN_S`."""
    until = time.monotonic() + _TOKEN_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True
