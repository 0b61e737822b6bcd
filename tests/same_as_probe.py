"""Runs the cases of `same_as` with the package beside it and writes down what they come to.

Two such processes run side by side, one for each revision. Both save their checkpoints, and both
continue from those of BASE, so that they do (and compile) the same. A case that fails is written
down as its error: it differs, and the others still run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import re
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from same_as_cases import Case, cases, problem, sample

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.checkpoint import Checkpoints

COMPILED = "/jax/core/compile/backend_compile_duration"
# Of an event; what it measured (`values`) is taken besides.
FIELDS = (
    "kind",
    "step",
    "fragment",
    "key",
    "participants",
    "staleness",
    "nbytes",
    "bytes_sent",
    "bytes_received",
    "route",
    "groups",
    "ahead",
)
VALUES = (
    "delta_norm",
    "left_out",
    "weight",
    "codec_error",
    "mean_norm",
    "update_norm",
    "pull_norm",
)
SAVED = "saved"
PACE_S = 0.5  # of learners that are jobs: time for a round to close between two steps
Part = dict[str, np.ndarray]


class Compilations:
    """Counts what XLA compiles, by part of a case."""

    def __init__(self):
        self.found: dict[str, int] = {}

    def during(self, name: str, run):
        self.found[name] = 0

        def count(event, *_, **__):
            self.found[name] += event == COMPILED

        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            return jax.block_until_ready(run())
        finally:
            jax.monitoring.unregister_event_duration_listener(count)


def leaves(name: str, tree) -> Part:
    """Every leaf as it is, by its path; of bf16 the same numbers as float32."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        value = np.asarray(leaf)
        kind = "" if value.dtype.kind in "biuf" else f" {value.dtype}"
        plain = value.astype(np.float32) if kind else value
        place = jax.tree_util.keystr(path, simple=True, separator="/")
        found[f"{name} {place}{kind}"] = plain
    return found


def told(name: str, value: Any) -> Part:
    """Nested lists and dicts of plain values: their floats in order, and all the rest as text."""
    floats = [x for x in jax.tree.leaves(value) if isinstance(x, float)]
    rest = jax.tree.map(lambda x: "" if isinstance(x, float) else x, value)
    text = json.dumps(rest, sort_keys=True, default=str)
    return {name: np.array(text), f"{name}, floats": np.array(floats)}


def rows_of_steps(rows: list) -> Part:
    """What the rows of a history come to."""
    events = [event for row in rows for event in row["events"]]
    rest = ("step", "loss", "events")
    return {
        "losses": np.array([row["loss"] for row in rows]),
        **told("metrics", [{k: v for k, v in r.items() if k not in rest} for r in rows]),
        **told("events", [{k: e.get(k) for k in FIELDS + VALUES} for e in events]),
        "bytes sent": np.array(sum(sum(e["bytes_sent"]) for e in events)),
        "bytes received": np.array(sum(sum(e["bytes_received"]) for e in events)),
    }


def views(name: str, state) -> Part:
    return {
        **leaves(f"{name}anchor", lc.global_params(state)),
        **leaves(f"{name}regions", lc.region_params(state)),
    }


class Run:
    """One engine, and the ways to take it through the steps of its case."""

    def __init__(self, case: Case):
        self.case = case
        self.method = case.method()
        loss, self.start, given = problem(case)
        self.adapts = self.method.adapts
        make = lc.AdaptiveEngine if self.adapts else lc.Engine
        parts = (loss, case.inner(), self.method, case.regions)
        self.engine = make(*parts, **{**given, "codec_error": True, **case.settings})

    def steps(self, state, first: int, last: int):
        """One call a step; returns (state, rows)."""
        rows = []
        for step, batch in enumerate(self.case.batches(first, last), first):
            mask = self.case.away and self.case.away(step)
            state, metrics = self.engine.step(state, batch, mask)
            events = [event.fetch() for event in metrics.pop("events")]
            plain = {k: np.asarray(v).tolist() for k, v in metrics.items()}
            rows.append({"step": step, **plain, "events": events})
        return state, rows

    def run(self, state, first: int, last: int):
        """The fast path; returns (state, rows)."""
        if self.adapts:
            state, history = self.engine.run(state, self._stream, steps=last - first + 1)
        else:
            cut = {} if self.case.microbatch is None else {"microbatch": self.case.microbatch}
            batches = self.case.batches(first, last)
            state, history = self.engine.run(state, batches, self.case.away, **cut)
        return state, list(history.rows())

    def _stream(self, trainer, start, count):
        """Sample by sample, as a sample must not depend on how many are asked for."""
        each = [
            [sample(region, start + i, 1, trainer) for i in range(count)]
            for region in range(self.case.regions)
        ]
        return {k: np.stack([np.concatenate([s[k] for s in row]) for row in each]) for k in "xy"}

    def end(self, state, rows: list) -> Part:
        """What later steps come to, and what `finish` makes of it."""
        found = {**rows_of_steps(rows), **views("", state)}
        return {**found, **views("finished ", self.engine.finish(state))}


def in_one_process(case: Case, folder: Path, base: Path, own: bool) -> dict[str, Part]:
    """What a case comes to, by part."""
    one, count = Run(case), Compilations()
    single, middle, last = case.steps

    def begin():
        state, rows = one.steps(one.engine.init(one.start), 1, single)
        state, more = one.run(state, single + 1, middle)
        return state, rows + more

    state, rows = count.during("first", begin)
    found = {"first": {**rows_of_steps(rows), **views("", state)}}
    if case.saved:
        save(one, state, folder)
    state, rows = count.during("steady", lambda: one.run(state, middle + 1, last))
    found["later"] = one.end(state, rows)
    if case.saved:
        if not own:
            wait_for(base)
        found["restored"] = restored(one, base, middle, last)
    if one.engine.clock is not None:
        found["clock"] = told("report", one.engine.clock.report().as_dict())
    return {**found, "compiled": {name: np.array(n) for name, n in count.found.items()}}


def save(one: Run, state, folder: Path) -> None:
    with Checkpoints(folder, asynchronous=False) as checkpoints:
        checkpoints.save(state, extra={"case": 1}, config={}, method=one.method)
    mark(folder).touch()


def mark(folder: Path) -> Path:
    """A file that says that what will be in this folder is there."""
    return folder.parent / f"{folder.name}.{SAVED}"


def wait_for(folder: Path) -> None:
    """Until the other process has saved, or has ended (then `same_as` marks all as saved)."""
    while not (mark(folder).exists() or (folder.parent / SAVED).exists()):
        time.sleep(0.05)


def restored(one: Run, folder: Path, middle: int, last: int) -> Part:
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(one.engine, one.start)
    if found is None or found.step != middle:
        raise RuntimeError(f"no checkpoint of step {middle} in {folder.name}")
    return one.end(*one.run(found.state, middle + 1, last))


def in_jobs(case: Case, folder: Path) -> dict[str, Part]:
    """Every region a thread with an engine of its own; nothing is counted as compiled."""
    loss, start, given = problem(case)
    folder.mkdir(parents=True)
    mesh = {"mesh": lc.make_mesh(devices=jax.devices()[:1])}
    transport = exchange.peers() if case.jobs == "peers" else None
    together = threading.Barrier(case.regions)

    def drawn(region: int):
        """Batches of a learner: all draw at once, so that who reports when follows from steps."""
        for step in itertools.count(1):
            with contextlib.suppress(threading.BrokenBarrierError):  # the others have ended
                together.wait()
                time.sleep(PACE_S)
            yield rows_of(case.batches(step, step)[0], region)

    def rows_of(batch, region: int):
        return jax.tree.map(lambda x: x[region : region + 1], batch)

    def job(region: int) -> Part:
        between = exchange.store(
            *(folder.as_uri(), region, case.regions, "run", b"a secret of the test"),
            transport=transport,
        )
        try:
            between.join(120.0)
            parts = (loss, case.inner(), case.method(), case.regions)
            engine = lc.Engine(*parts, exchange=between, **{**given, **mesh, **case.settings})
            if case.rounds is None:
                own = [rows_of(batch, region) for batch in case.batches(1, case.steps[1])]
                state, history = engine.run(engine.init(start), own)
            else:
                batches = drawn(region)
                state, history = engine.run(engine.init(start), batches, rounds=case.rounds)
                together.abort()
            found = {**rows_of_steps(list(history.rows())), **views("", state)}
            return {**found, **views("finished ", engine.finish(state))}
        finally:
            between.close()

    with ThreadPoolExecutor(case.regions) as pool:
        found = list(pool.map(job, range(case.regions)))
    return {f"region {region}": part for region, part in enumerate(found)}


def probe(folder: Path, base: Path, name: str, case: Case) -> dict[str, np.ndarray]:
    """A case's record (`same_as.Record`)."""
    own = folder / name
    try:
        one = functools.partial(in_one_process, base=base / name, own=folder == base)
        found = (in_jobs if case.jobs else one)(case, own)
        return {f"{part} {key}": value for part, of in found.items() for key, value in of.items()}
    except Exception as error:
        traceback.print_exc()
        mark(own).touch()  # the other process need not wait for it
        message = " ".join(str(error).split())[:300]
        return {"error": np.array(f"{type(error).__name__}: {message}")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where to write")
    parser.add_argument("--base", type=Path, required=True, help="whose checkpoints are restored")
    parser.add_argument("--only", default="", help="a pattern; names that it is in")
    args = parser.parse_args()
    imported, here = (Path(file).resolve().parents[1] for file in (lc.__file__, __file__))
    if imported != here:
        raise SystemExit(f"lowcomm_jax was imported from {imported}, not from {here}")
    for name, case in cases().items():
        if not re.search(args.only, name):
            continue
        record = probe(args.folder, args.base, name, case)
        jax.clear_caches()  # so that a case compiles the same whichever ran before
        unfinished = args.folder / f"{name}.writing"
        with unfinished.open("wb") as file:
            np.savez(file, **record)
        unfinished.rename(args.folder / f"{name}.npz")


if __name__ == "__main__":
    main()
