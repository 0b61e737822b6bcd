"""Check a comparison's config and list its runs; nothing is started."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cli import (
    RefusedError,
    config_of_variant,
    load_config,
    problems_of,
    refuse_any,
)
from experiments.compare.config import BUDGETED, SIZED, panel
from experiments.compare.vary import parse_axes, points
from experiments.config import plain
from experiments.refusals import comparison_problems
from experiments.report.runlog import read_run
from experiments.report.virtual import Links, StepSeconds
from experiments.train.job import Job
from experiments.train.resolve import resolve
from experiments.workdir import CONFIG, METRICS, read_config, workdir_problems
from lowcomm_jax.checkpoint.load import dotted
from lowcomm_jax.network import parse

TITLE = "cannot compare"
ERROR = "error.txt"  # in the folder of a run that failed
# Runs are evaluated on the same documents only if these agree.
_JUDGED_BY = {
    "data": ("corpus", "tokenizer", "seq_len", "val_fraction", "split_seed", "limit", "packing"),
    "eval": ("every", "sequences"),
}


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One run: a variant with one seed, its whole config and its folder."""

    variant: str
    seed: int
    fields: dict[str, Any]
    workdir: Path


def finished(workdir: Path) -> bool:
    """Whether a folder holds a complete run, by the last record of its metrics."""
    if not (workdir / METRICS).is_file():
        return False
    try:
        return read_run(workdir).end is not None
    except (RefusedError, ValueError):
        return False  # unreadable: training it says what is wrong


def error_of(workdir: Path) -> str | None:
    """The last line of a run's `error.txt`, or None."""
    file = workdir / ERROR
    if not file.is_file():
        return None
    lines = file.read_text(encoding="utf-8").strip().splitlines()
    return lines[-1] if lines else "unknown error"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A checked comparison; `runs` are ordered by seed, then by variant.

    Attributes:
      config: its fields, those of the chosen size and a variant for every point merged in.
      panels: of `config.panel`, each with its baseline.
      growing: variants whose batches grow or whose trainers merge.
      points: of a comparison that varies fields: variant -> their values, by dotted names.
    """

    config: dict[str, Any]
    workdir: Path
    seeds: tuple[int, ...]
    variants: tuple[str, ...]
    growing: frozenset[str]
    runs: tuple[RunSpec, ...]
    panels: tuple[dict[str, Any], ...]
    networks: dict[str, Links]
    step_seconds: StepSeconds
    points: dict[str, dict[str, Any]]


def plan(config: Any, workdir: str | Path) -> Comparison:
    """Check a comparison: its own fields, every variant's config and every run's folder.

    Args:
      config: made by `config.comparison`.
      workdir: holds one folder a variant, and in it one a seed.

    Raises:
      RefusedError: every violation, those of a variant behind its name.
    """
    fields = plain(config)
    sized = fields["sizes"].get(fields["size"]) or {}
    fields |= {k: x for k, x in sized.items() if k in SIZED}
    refuse_any(comparison_problems(fields), TITLE)
    del fields["sizes"]
    fields, values = _varied(fields)
    folder, seeds = Path(workdir), tuple(fields["seeds"])
    variants, jobs, runs, problems = tuple(fields["variants"]), {}, [], []
    for name in variants:
        mine, job, found = _variant(name, fields, folder)
        runs += mine
        if job is not None:
            jobs[name] = job
        problems += [f"{name}: {line}" for line in found]
    problems += _unlike(jobs, fields["equal"])
    step_seconds: StepSeconds = fields["step_seconds"] or "network"
    networks, found = _networks(fields["networks"], step_seconds, jobs)
    problems += found
    refuse_any(problems, TITLE)
    order = {name: i for i, name in enumerate(variants)}
    return Comparison(
        config=fields,
        workdir=folder,
        seeds=seeds,
        variants=variants,
        growing=frozenset(name for name, job in jobs.items() if job.method.adapts),
        runs=tuple(sorted(runs, key=lambda r: (seeds.index(r.seed), order[r.variant]))),
        panels=_panels(fields),
        networks=networks,
        step_seconds=step_seconds,
        points=values,
    )


def _varied(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The fields with a variant for every point of `vary`, and the values of each.

    Raises:
      RefusedError: every text or value that does not fit.
    """
    if not fields["vary"]:
        return fields, {}
    given, how = fields["variants"], (fields["vary"], fields["draws"], fields["draw_seed"])
    alone, of, problems = len(given) == 1, {}, []
    if not alone:  # what cannot be read is told once, not for every variant
        refuse_any([f"vary: {line}" for line in parse_axes(fields["vary"])[1]], TITLE)
    variants, values = {}, {}
    for name, entry in given.items():
        base = config_of_variant(fields["common"], entry)
        prefix = "vary: " if alone else f"{name}: vary: "
        found, lines = problems_of(functools.partial(points, base, *how), prefix)
        problems += lines
        for point, changes in (found or {}).items():
            label = point if alone else f"{name}+{point}"
            variants[label] = {**entry, "set": merged(entry["set"], changes)}
            values[label] = ({} if alone else {"variant": name}) | dotted(changes)
            of.setdefault(name, []).append(label)
    refuse_any(problems, TITLE)
    panels = {
        key: one
        | {
            "variants": [label for name in one["variants"] for label in of[name]],
            "baseline": one["baseline"] and of[one["baseline"]][0],
        }
        for key, one in fields["panels"].items()
    }
    baseline = of[fields["baseline"]][0]
    return {**fields, "variants": variants, "baseline": baseline, "panels": panels}, values


def _variant(
    name: str, fields: Mapping[str, Any], folder: Path
) -> tuple[list[RunSpec], Job | None, list[str]]:
    """The runs of a variant, the job of the first (None if refused), and all its problems."""
    entry = fields["variants"][name]
    try:
        loaded, _ = load_config(entry["config"], [])
    except RefusedError as error:
        return [], None, error.problems
    whole = merged(merged(plain(loaded), fields["common"]), entry["set"])
    runs = [
        RunSpec(name, seed, {**whole, "seed": seed}, folder / name / f"seed{seed}")
        for seed in fields["seeds"]
    ]
    if fields["equal"] in BUDGETED and name != fields["baseline"]:
        runs = [_as_stored(run) for run in runs]
    found = [line for run in runs[1:] for line in workdir_problems(run.workdir, run.fields)]
    try:
        return runs, resolve(runs[0].fields, runs[0].workdir), found
    except RefusedError as error:
        lines = error.problems
        if not _sets_warm_up(entry["set"]):  # then the command line can, for all variants
            lines = [
                re.sub(r"use (warmup_steps=)", r"use --config.common.inner.\1", x) for x in lines
            ]
        return runs, None, lines + found


def _sets_warm_up(changes: Mapping[str, Any]) -> bool:
    inner = changes.get("inner")
    return isinstance(inner, Mapping) and "warmup_steps" in inner


def _as_stored(run: RunSpec) -> RunSpec:
    """A run whose steps follow from a budget, with the steps it was started with, if it was."""
    if not (run.workdir / CONFIG).is_file():
        return run
    steps = read_config(run.workdir)["steps"]
    return dataclasses.replace(run, fields={**run.fields, "steps": steps})


def merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with changes merged in; a section that names another rule replaces the old one."""
    out = dict(fields)
    for key, value in changes.items():
        here = out.get(key)
        sections = isinstance(value, Mapping) and isinstance(here, Mapping)
        if sections and value.get("name", here.get("name")) == here.get("name"):
            out[key] = merged(here, value)
        else:
            out[key] = value
    return out


def _unlike(jobs: Mapping[str, Job], equal: str) -> list[str]:
    """Fields in which variants differ that must agree: tokens, corpus, evaluation."""
    asked = {}
    if equal == "tokens":
        asked["tokens"] = {name: job.steps * job.tokens_per_step for name, job in jobs.items()}
    elif equal == "steps":
        asked["steps"] = {name: job.steps for name, job in jobs.items()}
    for section, keys in _JUDGED_BY.items():
        for key in keys:
            asked[f"{section}.{key}"] = {n: job.config[section][key] for n, job in jobs.items()}
    fix = {"tokens": "give all the same steps x regions x batch x data.seq_len"}
    found = []
    for field, values in asked.items():
        kinds = list(dict.fromkeys(values.values()))
        if len(kinds) > 1:
            groups = "; ".join(
                f"{kind}: {', '.join(n for n, v in values.items() if v == kind)}" for kind in kinds
            )
            hint = fix.get(field, "give all the same, in `common`")
            found.append(f"{field} differs between variants ({groups}): {hint}")
    return found


def _networks(
    names: Sequence[str], step_seconds: StepSeconds, jobs: Mapping[str, Job]
) -> tuple[dict[str, Links], list[str]]:
    """(networks by name, problems: those that do not fit the variants)."""
    networks, problems = {}, []
    for name in names:
        network, found = problems_of(lambda name=name: parse(name), f"networks: {name}: ")
        problems += found
        if network is not None:
            networks[name], size = Links(network, step_seconds), network.size
            other = [f"{n} {job.regions}" for n, job in jobs.items() if job.regions != size]
            fix = f"networks: {name} has {size} regions, other than the variants {', '.join(other)}"
            problems += [f"{fix}: give them as many, or a network of that size"] if other else []
    return networks, problems


def _panels(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    given = fields["panels"].values() or [panel("", tuple(fields["variants"]))]
    return tuple({**one, "baseline": one["baseline"] or fields["baseline"]} for one in given)
