"""Runs the cases of `same_as` with the package on the path and writes down what they come to.

Two such processes run side by side, one for each revision. Both save their checkpoints, and both
continue from those of BASE, so that they do (and compile) the same. A case that fails is written
down as its error: it differs, and the others still run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path

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


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def tree_digest(tree) -> str:
    """Of every leaf's path, type, shape and bits."""
    parts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        value = np.asarray(leaf)
        parts.append(f"{jax.tree_util.keystr(path)} {value.dtype} {value.shape}".encode())
        parts.append(value.tobytes())
    return digest(b"\0".join(parts))


def json_digest(value) -> str:
    return digest(json.dumps(value, sort_keys=True, default=str).encode())


def rows_of_steps(rows: list) -> dict:
    """What the rows of a history come to."""
    events = [event for row in rows for event in row["events"]]
    rest = ("step", "loss", "events")
    return {
        "losses": json_digest([row["loss"] for row in rows]),
        "metrics": json_digest([{k: v for k, v in r.items() if k not in rest} for r in rows]),
        "event count": len(events),
        "events": json_digest([{k: e.get(k) for k in FIELDS + VALUES} for e in events]),
        "bytes sent": sum(sum(e["bytes_sent"]) for e in events),
        "bytes received": sum(sum(e["bytes_received"]) for e in events),
    }


def views(name: str, state) -> dict:
    return {
        f"{name}anchor": tree_digest(lc.global_params(state)),
        f"{name}regions": tree_digest(lc.region_params(state)),
    }


class Run:
    """One engine, and the ways to take it through the steps of its case."""

    def __init__(self, case: Case):
        self.case = case
        self.method = case.method()
        loss, self.start, told = problem(case)
        self.adapts = self.method.adapts
        make = lc.AdaptiveEngine if self.adapts else lc.Engine
        given = (loss, case.inner(), self.method, case.regions)
        # A base that knows no such setting measures it always.
        asked = {"codec_error": True} if "codec_error" in signature(lc.Engine).parameters else {}
        self.engine = make(*given, **{**told, **asked, **case.settings})

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

    def end(self, state, rows: list) -> dict:
        """What later steps come to, and what `finish` makes of it."""
        found = {**rows_of_steps(rows), **views("", state)}
        return {**found, **views("finished ", self.engine.finish(state))}


def in_one_process(case: Case, folder: Path, base: Path, own: bool) -> dict:
    """What a case comes to; see `same_as.differences` for its form."""
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
        found["clock"] = {"report": json_digest(one.engine.clock.report().as_dict())}
    return {**found, "compiled": count.found}


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


def restored(one: Run, folder: Path, middle: int, last: int) -> dict:
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(one.engine, one.start)
    if found is None or found.step != middle:
        raise RuntimeError(f"no checkpoint of step {middle} in {folder.name}")
    return one.end(*one.run(found.state, middle + 1, last))


def in_jobs(case: Case, folder: Path) -> dict:
    """Every region a thread with an engine of its own; nothing is counted as compiled."""
    loss, start, told = problem(case)
    folder.mkdir(parents=True)
    mesh = {"mesh": lc.make_mesh(devices=jax.devices()[:1])}

    def job(region: int) -> dict:
        between = exchange.store(
            folder.as_uri(), region, case.regions, "run", b"a secret of the test"
        )
        try:
            given = (loss, case.inner(), case.method(), case.regions)
            between.join(120.0)
            engine = lc.Engine(*given, exchange=between, **{**told, **mesh})
            own = [
                jax.tree.map(lambda x: x[region : region + 1], batch)
                for batch in case.batches(1, case.steps[1])
            ]
            state, history = engine.run(engine.init(start), own)
            kept = ("losses", "event count")
            rows = rows_of_steps(list(history.rows()))
            found = {**{k: rows[k] for k in kept}, **views("", state)}
            return {**found, **views("finished ", engine.finish(state))}
        finally:
            between.close()

    with ThreadPoolExecutor(case.regions) as pool:
        found = list(pool.map(job, range(case.regions)))
    return {f"region {region}": one for region, one in enumerate(found)}


def probe(folder: Path, base: Path, name: str, case: Case) -> dict:
    """A case's result, or its error."""
    own, short = folder / name, folder == base
    try:
        if case.jobs:
            return in_jobs(case, own)
        return in_one_process(case, own, base / name, short)
    except Exception as error:
        traceback.print_exc()
        mark(own).touch()  # the other process need not wait for it
        message = " ".join(str(error).split())[:300]
        return {"error": {"type": type(error).__name__, "message": message}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, required=True, help="folder that holds lowcomm_jax")
    parser.add_argument("--folder", type=Path, required=True, help="where to write")
    parser.add_argument("--base", type=Path, required=True, help="the folder of BASE")
    parser.add_argument("--only", default="", help="names that contain this")
    args = parser.parse_args()
    imported = Path(lc.__file__).resolve().parents[1]
    if imported != args.package.resolve():
        raise SystemExit(f"lowcomm_jax was imported from {imported}, not from {args.package}")
    for name, case in cases().items():
        if args.only not in name:
            continue
        began = time.monotonic()
        found = probe(args.folder, args.base, name, case)
        jax.clear_caches()  # so that a case compiles the same whichever ran before
        seconds = round(time.monotonic() - began, 2)
        with (args.folder / "results.jsonl").open("a") as file:
            file.write(json.dumps({"case": name, "seconds": seconds, "found": found}) + "\n")


if __name__ == "__main__":
    main()
