"""The table of refusals of the commands: flags and fields that cannot work, each with its fix.

A command asks it before any work, and shows all problems at once. Elsewhere stand:

- unknown flags, and values of the wrong type: `cli`;
- what is wrong with the values of a section (data, model, ...) or a network: where it is built;
- what files, folders and ports show when they are opened: where that is done;
- what an engine refuses: `lowcomm_jax.refusals`.

In a row's text `{f[mesh.stage]}` is a field by its dotted name, or a flag; `{m.name}` an answer of
the method. Commands without a config read it, too: conditions import what comes with Flax or Orbax.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jax
from absl.flags import FlagValues
from ml_collections import ConfigDict

from experiments.cli import (
    NO_CONFIG,
    closest,
    listed,
    parse_flags,
    problems_of,
    refuse_any,
    unexpected,
)
from experiments.compare.config import BUDGETED, EQUAL, SIZED
from experiments.faults.fault import ENDS, Fault
from experiments.faults.happened import Happened
from experiments.faults.scripts import Faults
from experiments.regions import transports
from experiments.regions.jobs import is_separate_job
from experiments.train import devices
from lowcomm_jax import compression
from lowcomm_jax.adloco.setup import AdaptiveSetup
from lowcomm_jax.methods import Method
from lowcomm_jax.network import parse
from lowcomm_jax.refused import Row, found_by
from lowcomm_jax.settings import config_fields, one_of, settings_of
from lowcomm_jax.store.file_handles import file_handle_problems
from lowcomm_jax.store.kv import url_problems
from lowcomm_jax.store.terms import Heal

if TYPE_CHECKING:
    from lowcomm_jax.models import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a row of a training run reads.

    Attributes:
      fields: the config as plain dicts.
      steps: inner steps, given or from `tokens`.
      method, mesh, model: what these sections describe; None = they cannot be made, or are not
        known yet, and no row reads them. A model of one's own is None, too.
      faults: what the config's `faults` holds.
      memory: bytes that this machine has; None = the run is on another one.
    """

    fields: Mapping[str, Any]
    steps: int = 0
    method: Method | None = None
    mesh: jax.sharding.Mesh | None = None
    model: TransformerConfig | None = None
    faults: Faults = ()
    memory: int | None = None

    @functools.cached_property
    def f(self) -> dict[str, Any]:
        """The config's fields by dotted names."""
        from lowcomm_jax.checkpoint.load import dotted

        return dotted(dict(self.fields))

    def __getitem__(self, name: str) -> Any:
        return self.f[name]

    @property
    def separate(self) -> bool:
        """Whether this job is one region of several."""
        return is_separate_job(self.fields)

    @functools.cached_property
    def looked_up(self) -> tuple[transports.Found | None, list[str]]:
        """See `transports.of`."""
        return transports.of(self.fields)

    @property
    def transport(self) -> transports.Found | None:
        """How this job's payloads travel to the others, where it is one region of several."""
        return self.looked_up[0]

    @property
    def alone(self) -> bool:
        """Whether this job is one process."""
        count = self.f["processes"]
        return count == 1 or (count is None and self.separate)

    @property
    def staged(self) -> bool:
        """Whether the model is cut into pipeline stages."""
        return self.f["mesh.stage"] > 1

    @property
    def script(self) -> tuple[Fault, ...]:
        """Faults that a simulation is to apply."""
        return () if self.separate or isinstance(self.faults, Happened) else self.faults

    @property
    def happened(self) -> Happened | None:
        """What one process is to repeat of a run of jobs."""
        return None if self.separate or not isinstance(self.faults, Happened) else self.faults


def run_problems(asked: Asked, rows: Sequence[Row] | None = None) -> list[str]:
    """What is wrong with the config of a training run.

    Args:
      rows: a part of the table; None = all of it.
    """
    unknown = {name for name in ("method", "mesh", "model") if getattr(asked, name) is None}
    found = found_by(rows or TRAIN, asked, unknown, f=asked.f, m=asked.method, s=asked)
    return [problem.text for problem in found]


def comparison_problems(fields: Mapping[str, Any]) -> list[str]:
    """What is wrong with a comparison's own fields, with those of its size in their place."""
    found = found_by(COMPARISON, fields, sound=("variants",), f=fields)
    return [problem.text for problem in found]


# -- conditions that are longer than a row --------------------------------------------------------


def _no_patterns(r: Asked) -> list[str]:
    found = []
    for pattern in r.f["frozen"]:
        if not isinstance(pattern, str):
            found.append(f"{pattern!r} is no text: give regular expressions of names")
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            found.append(f"{pattern!r} is no regular expression ({error})")
    return found


def _which(r: Asked) -> str | None:
    """Which process this is, where the config says none of those there are."""
    count, process = r.f["processes"], r.f["process"]
    if r.alone or process is None or 0 <= process < (count or process + 1):
        return None
    return f"which of the {count} this is, 0 to {count - 1}" if count else "which this is, from 0"


def _uneven_processes(r: Asked) -> int | None:
    """Devices of a mesh that do not divide over the processes; one made to fit always does."""
    asked, count = devices.asked_for(r.fields["mesh"]), r.f["processes"] or 0
    automatic = r.f["mesh.fsdp"] == 0 or (not r.separate and r.f["mesh.region"] == 0)
    return asked if count > 1 and asked % count and not automatic else None


def _first_round(r: Asked) -> int | None:
    """The step of the first round, where the run ends before."""
    schedule = r.method.schedule
    if not (r.separate and schedule.by_rounds and r.steps > 0):
        return None
    if schedule.violations(r.f["regions"]):
        return None  # which the engine's table lists
    first = schedule.opens(0)
    return first if r.steps < first else None


def _uncut_batch(r: Asked) -> tuple[int, int] | None:
    """(devices of a region, the number whose multiple fits), where microbatches do not divide."""
    batch, accumulate, fsdp = r.f["batch"], r.f["accumulate"], r.mesh.shape["fsdp"]
    if accumulate < 1 or batch % accumulate or not batch // accumulate % fsdp:
        return None
    return fsdp, accumulate * fsdp


def _bytes_of_a_step(r: Asked) -> tuple[int, int] | None:
    """(GB of a region's samples of one step in this process, GB of the machine), if it has less."""
    if r.memory is None or r.method.adapts:  # then the policy decides how many samples there are
        return None
    tokens_and_mask = 4 * (r.f["data.seq_len"] + 1) + 4 * r.f["data.seq_len"]
    processes = len({device.process_index for device in r.mesh.devices.flat})
    needed = r.f["batch"] * tokens_and_mask // processes
    return (needed // 10**9, r.memory // 10**9) if needed > r.memory else None


def _misfit_schedule(r: Asked) -> list[str]:
    from lowcomm_jax.models.pipeline.pipeline import schedule_problems

    given = r.f["pipeline_schedule"], r.f["random_routing"]
    return schedule_problems(*given) if r.staged else []


def _misfit_stages(r: Asked) -> list[str]:
    from experiments.train.job import microbatch_count
    from lowcomm_jax.models.pipeline.pipeline import pipeline_problems

    count = microbatch_count(r.fields, r.mesh.shape["fsdp"])
    return pipeline_problems(r.model, r.mesh.shape["stage"], count) if r.staged else []


def _uncut_stages(r: Asked) -> tuple[int, int, int] | None:
    """(microbatches, devices, the number whose multiple fits), where a batch does not divide."""
    from experiments.train.job import microbatch_count

    accumulate, fsdp = max(r.f["accumulate"], 1), r.mesh.shape["fsdp"]
    count = microbatch_count(r.fields, fsdp)
    if not r.staged or not r.f["batch"] // accumulate % (count * fsdp):
        return None
    return count, fsdp, count * fsdp * accumulate


def _coming_back(r: Asked) -> str | None:
    """Who is to come back as `recovery.rejoin.rejoin_regions` does it, and what else would do."""
    if any(fault.kind in ENDS for fault in r.script):
        return "a region that is killed", "use kind stop"
    if r.happened is not None and r.happened.rejoined:
        return "a region that was lost", "compare losses instead"
    return None


def _other_moments(r: Asked) -> list[tuple[int, int, int]]:
    came = r.happened.rejoined if r.happened is not None else ()
    return [(x.region, x.step, x.moments_of) for x in came if x.moments_of is not None]


def _left_out(r: Asked) -> bool:
    return r.happened is not None and bool(r.happened.left_out)


def _made(fields: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Variants of a comparison that are made as such, and what each sets."""
    return {
        name: entry["set"]
        for name, entry in fields["variants"].items()
        if isinstance(entry, Mapping) and set(entry) == {"config", "set"}
    }


def _seeds(fields: Mapping[str, Any]) -> str | None:
    seeds = tuple(fields["seeds"])
    whole = {s for s in seeds if isinstance(s, int) and not isinstance(s, bool) and s >= 0}
    return None if seeds and len(whole) == len(seeds) else str(seeds)


def _setting(field: str) -> Callable[[Mapping[str, Any]], list[str]]:
    """Parts of a comparison that set a field, where lengths follow from the baseline's cost."""

    def names(fields: Mapping[str, Any]) -> list[str]:
        given = {"common": fields["common"], **_made(fields)}
        own = () if field == "tokens" else ("common", fields["baseline"])
        setting = [name for name, sets in given.items() if field in sets and name not in own]
        return setting if fields["equal"] in BUDGETED else []

    return names


def _strangers(fields: Mapping[str, Any]) -> list[str]:
    """Entries of panels that are no variants."""
    names = list(fields["variants"])
    return [
        f"panels.{key}: {name!r} is no variant{closest(name, names)}"
        for key, entry in fields["panels"].items()
        for name in dict.fromkeys([*entry["variants"], entry["baseline"]])
        if name is not None and name not in names
    ]


# -- a training run -------------------------------------------------------------------------------


def _value(name: str, fits: Callable[[Any], bool], fix: str, prefix: str = "") -> Row:
    """A field or flag that takes some values alone, whatever the others are; None passes."""
    text = f"{prefix}{name}={{f[{name}]}}: {fix}"
    return Row(name, lambda given: given[name] is not None and not fits(given[name]), text)


_from_1 = functools.partial(_value, fits=lambda x: x >= 1, fix="at least 1 is needed")
_flag = functools.partial(_value, prefix="--")
_flag_from_1 = functools.partial(_from_1, prefix="--")


def _idle(
    fields: Mapping[str, Any], others: str, idle: Callable[[Asked], bool], why: str
) -> Iterator[Row]:
    """Fields, each with what stands for not given, where nothing reads them; `others` decide."""
    for name, unset in fields.items():
        yield Row(
            f"{name} {others}",
            lambda r, name=name, unset=unset: idle(r) and r.f[name] != unset,
            f"{name}={{f[{name}]!r}} has no effect{why}",
        )


HEAL = one_of(*get_args(Heal))
FROM_1 = "batch", "eval.sequences", "eval.batch", "log.every", "checkpoint.keep_last"
EVERY = "eval.every", "checkpoint.every"
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "prometheus": "prometheus_client"}
NUMBERS = (
    _value("seed", lambda x: 0 <= x < 1 << 31, "give a whole number in [0, 2**31)"),
    *map(_from_1, FROM_1),
    _value("microbatches", lambda x: x >= 0, "give 0 (automatic) or a number"),
    _value("participation", lambda x: 0 < x <= 1, "give a chance in (0, 1]"),
    *(_value(x, lambda x: x >= 0, "give 0 (off) or a number of inner steps") for x in EVERY),
    Row("frozen", _no_patterns, "frozen: {wrong}"),
    Row(
        "steps tokens",
        lambda r: r.f["tokens"] is None and r.f["steps"] < 1,
        "steps={f[steps]}: give steps, or tokens of all regions together",
    ),
    Row(
        "steps tokens",
        lambda r: r.f["tokens"] is not None and r.f["steps"],
        "steps={f[steps]} and tokens={f[tokens]}: give one (--config.tokens=None for steps, "
        "--config.steps=0 for tokens)",
    ),
    Row(
        "tokens steps",
        lambda r: r.f["tokens"] is not None and not r.f["steps"] and r.f["tokens"] < 1,
        "tokens={f[tokens]}: at least 1 is needed; or give steps",
    ),
    Row(
        "data.seq_len model",
        lambda r: r.model.max_seq_len < r.f["data.seq_len"],
        "data.seq_len={f[data.seq_len]} is longer than the model is meant for: use at most "
        "{s.model.max_seq_len}, or raise model.max_seq_len",
    ),
    Row(
        "batch accumulate mesh",
        lambda r: r.f["accumulate"] > 0 and r.f["batch"] % r.f["accumulate"],
        "batch={f[batch]} does not divide into accumulate={f[accumulate]} microbatches: use a "
        "multiple",
    ),
    Row(
        "batch accumulate mesh",
        _uncut_batch,
        "batch={f[batch]} in {f[accumulate]} microbatch(es) does not divide over fsdp={wrong[0]} "
        "devices of a region: use a multiple of {wrong[1]}, or --config.mesh.fsdp=1",
    ),
    Row(
        "batch data.seq_len mesh method",
        _bytes_of_a_step,
        "batch={f[batch]}: a region's samples of one step take {wrong[0]:,} GB, and this machine "
        "has {wrong[1]:,} GB of memory: use a smaller batch",
    ),
    *(
        Row(
            f"log.{name}",
            lambda r, name=name, package=package: (
                r.f[f"log.{name}"] and importlib.util.find_spec(package) is None
            ),
            f"log.{name}: the package {package} is missing: pip install 'lowcomm_jax[{name}]'",
        )
        for name, package in PACKAGES.items()
    ),
)

STAGES = (
    Row(
        "mesh.stage",
        lambda r: r.staged and r.f["model.name"],
        "mesh.stage={f[mesh.stage]}: stages are cut of the built-in decoder alone: with "
        "model={f[model.name]!r} use mesh.stage=1",
    ),
    Row(
        "microbatches mesh.stage",
        lambda r: not r.staged and r.f["microbatches"],
        "microbatches={f[microbatches]}: they are for pipeline stages; use accumulate, or "
        "mesh.stage above 1",
    ),
    *(
        Row(
            f"{name} mesh.stage",
            lambda r, name=name, unset=unset: not r.staged and r.f[name] != unset,
            f"{name} needs pipeline stages: set mesh.stage above 1",
        )
        for name, unset in (("pipeline_schedule", "gpipe"), ("random_routing", False))
    ),
    Row(
        "pipeline_schedule random_routing mesh.stage",
        _misfit_schedule,
        "pipeline_schedule: {wrong}",
    ),
    Row("mesh.stage mesh model microbatches batch", _misfit_stages, "mesh.stage: {wrong}"),
    Row(
        "batch accumulate microbatches mesh",
        _uncut_stages,
        "batch={f[batch]} in accumulate={f[accumulate]} does not divide into "
        "microbatches={wrong[0]} over fsdp={wrong[1]} devices: use a multiple of {wrong[2]}",
    ),
)

PROCESSES = (
    _value("processes", lambda x: x >= 0, "give how many this job has, 0 = as the launcher says"),
    *_idle(
        {"process": None, "coordinator": None},
        "processes exchange",
        lambda r: r.alone,
        " with one process: leave it out, or give processes",
    ),
    Row("process processes exchange", _which, "process={f[process]}: say {wrong}"),
    Row(
        "coordinator processes exchange",
        lambda r: (
            not r.alone
            and r.f["coordinator"] is not None
            and not re.fullmatch(r"(\[.+\]|[^:\[\]]+):\d+", r.f["coordinator"])
        ),
        "coordinator={f[coordinator]!r}: give HOST:PORT of process 0, IPv6 as [::1]:PORT",
    ),
    Row(
        "mesh.fsdp mesh.region processes exchange",
        _uneven_processes,
        "mesh of {wrong} devices does not divide over processes={f[processes]}, which have as many "
        "each: use a multiple, or mesh.fsdp=0",
    ),
)

EXCHANGE = (
    Row("exchange", lambda r: r.looked_up[1]),
    *_idle(
        {
            **dict.fromkeys(("region", "rendezvous", "secret", *transports.FIELDS, "deadline_s")),
            "heal": "stop",
        },
        "exchange",
        lambda r: not r.separate,
        " with exchange=mesh: leave it out",
    ),
    Row(
        "region regions exchange",
        lambda r: (
            r.separate
            and (r.f["region"] is None or not 0 <= r.f["region"] < r.f["regions"])
            and f"0 to {r.f['regions'] - 1}"
        ),
        "region={f[region]}: say which of the {f[regions]} this job is, {wrong}",
    ),
    Row(
        "rendezvous exchange",
        lambda r: r.separate and not r.f["rendezvous"],
        "rendezvous is missing: give a folder that all jobs reach, file:///..., gs:// or s3://",
    ),
    Row(
        "rendezvous exchange",
        lambda r: r.separate and r.f["rendezvous"] and url_problems(r.f["rendezvous"]),
        "rendezvous: {wrong}",
    ),
    Row(
        "exchange address listen certificates",
        lambda r: r.transport and transports.misfits(r.transport, r.fields),
    ),
    Row(
        "exchange regions",
        lambda r: r.transport and file_handle_problems(r.f["regions"], r.transport.lingers),
    ),
    Row("heal exchange", lambda r: r.separate and HEAL.problem("heal", r.f["heal"])),
    Row(
        "wait_minutes exchange",
        lambda r: r.separate and not r.f["wait_minutes"] > 0,
        "wait_minutes={f[wait_minutes]}: give a time above 0",
    ),
    Row(
        "participation exchange",
        lambda r: r.separate and r.f["participation"] != 1,
        "participation={f[participation]}: with jobs of their own regions take part whenever their "
        "jobs run; leave it at 1",
    ),
    Row(
        "steps regions exchange method",
        _first_round,
        "steps={s.steps}: the first round is at step {wrong}; give more",
    ),
)

ADAPTIVE = (
    *_idle(
        {
            field: settings_of(AdaptiveSetup)[name].default
            for name, field in config_fields(AdaptiveSetup).items()
            if field.startswith("adaptive.")
        },
        "method",
        lambda r: not r.method.adapts,
        ": {m.name} has a fixed batch; leave it out, or give method.inner_batching",
    ),
    Row(
        "mesh.stage method",
        lambda r: r.method.adapts and r.staged,
        "mesh.stage={f[mesh.stage]}: stages need microbatches of one size, and these grow; use "
        "mesh.stage=1",
    ),
)

FAULTS = (
    Row(
        "faults exchange network",
        lambda r: any(fault.timed for fault in r.script) and r.f["network"] is None,
        "faults={f[faults]!r} go by time, and there is no clock: give a network, or faults by step",
    ),
    Row(
        "faults exchange method",
        lambda r: r.method.adapts and any(fault.kind == "nan" for fault in r.script),
        "faults: kind nan is not for batches that grow: leave it out",
    ),
    Row(
        "faults exchange method",
        lambda r: r.method.adapts and _coming_back(r),
        "faults: {wrong[0]} does not come back where batches grow: {wrong[1]}",
    ),
    Row(
        "faults exchange offload",
        lambda r: r.f["offload"] and _coming_back(r),
        "faults: {wrong[0]} does not come back with offload: leave that out, or {wrong[1]}",
    ),
    Row(
        "faults exchange",
        lambda r: r.separate and isinstance(r.faults, Happened),
        "faults={f[faults]!r} is what happened to jobs: replay it with train and exchange=mesh",
    ),
    Row(
        "faults exchange",
        _other_moments,
        "faults: region {wrong[0]} came back at step {wrong[1]} with the inner optimizer's state "
        "of its checkpoint of step {wrong[2]}, which is not kept here: run jobs with "
        "checkpoint.every=0 where that is to be done again, or compare losses instead",
    ),
    Row(
        "faults exchange method",
        lambda r: r.happened is not None and r.method.adapts,
        "faults: jobs of {m.name} leave no record to repeat: leave faults out",
    ),
    Row(
        "faults exchange method",
        lambda r: (
            r.happened is not None and r.happened.rejoined and r.method.anchors == "per_region"
        ),
        "faults: with {m.name} a region comes back with the anchor of another, and which one is "
        "not known: compare losses instead",
    ),
    Row(
        "faults exchange method",
        lambda r: (
            r.happened is not None
            and r.method.topology is not None
            and r.happened.run.steps in r.happened.left_out
        ),
        "faults: with {m.name} jobs do not synchronise once more after a region was left out at "
        "the last step, {s.happened.run.steps}, a simulation does: compare losses instead",
    ),
    Row(
        "faults exchange method",
        lambda r: _left_out(r) and r.method.schedule.land_after_send,
        "faults: with {m.name} jobs lose payloads that were left out, a simulation keeps them: "
        "compare losses instead",
    ),
    Row(
        "faults exchange weights",
        lambda r: _left_out(r) and r.f["weights"] == "tokens",
        "faults: jobs count tokens of payloads that were left out as sent: compare losses instead",
    ),
)

TRAIN = (*NUMBERS, *STAGES, *PROCESSES, *EXCHANGE, *ADAPTIVE, *FAULTS)
READ = tuple(row for row in TRAIN if row not in EXCHANGE)
"""For whoever only reads what a run has learnt: it meets no other job."""
LAUNCH = (
    *(
        Row(
            f"{name} regions",
            lambda r, name=name: r.f["regions"] > 1 and not (r.f[name] or ":0").endswith(":0"),
            f"{name}={{f[{name}]}}: all regions run on this machine, each with a port of its own; "
            "give port 0",
        )
        for name in ("address", "listen")
    ),
    _value("processes", lambda x: x >= 1, "give the number of processes of a region, from 1"),
    *PROCESSES,
)
"""For whoever starts every job of a run on one machine; these ask the others themselves."""


# -- a comparison ---------------------------------------------------------------------------------

COMPARISON = (
    Row(
        "size sizes",
        lambda f: f["size"] is not None and not f["sizes"],
        "size={f[size]!r}: this comparison has no sizes; leave it out",
    ),
    Row(
        "size",
        lambda f: f["size"] not in f["sizes"] and closest(str(f["size"]), [*f["sizes"]]),
        "size={f[size]!r} is unknown{wrong}",
    ),
    Row(
        "sizes size",
        lambda f: [key for key in (f["sizes"].get(f["size"]) or ()) if key not in SIZED],
        f"sizes.{{f[size]}}.{{wrong}}: a size sets {', '.join(SIZED)}",
    ),
    Row("variants size", lambda f: not f["variants"], "variants: none is given; name at least one"),
    Row(
        "variants",
        lambda f: [name for name in f["variants"] if not re.fullmatch(r"\w[\w=+-]*", name)],
        "variants: {wrong!r} is no folder name; use letters, digits, _, =, + and -",
    ),
    Row(
        "variants",
        lambda f: [name for name in f["variants"] if name not in _made(f)],
        "{wrong}: make it by experiments.compare.config.variant",
    ),
    Row(
        "variants common size",
        lambda f: [n for n, sets in _made(f).items() if "seed" in sets or "seed" in f["common"]],
        "{wrong}: sets seed, which is the comparison's: use `seeds`",
    ),
    Row("seeds", _seeds, "seeds={wrong}: give whole numbers >= 0, each once"),
    Row(
        "draws vary",
        lambda f: f["draws"] is not None and not f["vary"],
        "draws={f[draws]} has no effect: say of what in `vary`, or leave it out",
    ),
    _from_1("parallel"),
    Row(
        "baseline variants size",
        lambda f: (
            f["baseline"] not in f["variants"] and closest(str(f["baseline"]), list(f["variants"]))
        ),
        "baseline={f[baseline]!r} is no variant{wrong}",
    ),
    _value("step_seconds", lambda x: 0 < x < math.inf, "give finite seconds above 0, or None"),
    Row(
        "equal",
        lambda f: f["equal"] not in EQUAL and closest(str(f["equal"]), EQUAL),
        "equal={f[equal]!r} is unknown{wrong}",
    ),
    Row(
        "equal variants common size",
        _setting("tokens"),
        "{wrong}: sets tokens, but with equal={f[equal]!r} lengths follow from the baseline's "
        "`steps`",
    ),
    Row(
        "equal variants baseline size",
        _setting("steps"),
        "{wrong}: sets steps, but with equal={f[equal]!r} they follow from the baseline's",
    ),
    Row(
        "equal networks",
        lambda f: f["equal"] == "time" and not f["networks"],
        "equal='time': on which network? name it in `networks`",
    ),
    Row("panels variants size", _strangers),
)


# -- flags, and the other arguments of a line -----------------------------------------------------


def checked_flags(
    command: str, argv: Sequence[str], values: FlagValues, docstring: str | None, **more: Any
) -> list[str]:
    """`cli.parse_flags` of a line with which the command's rows find nothing wrong.

    Args:
      more: what else these read.
    """
    rest = parse_flags(command, argv, values, docstring, more.get("config"))
    given = {name for name in values if values[name].present}
    v = ConfigDict({**values.flag_values_dict(), "rest": rest, "given": given, **more})
    found = found_by(FLAGS[command], v, sound=v, f=v)
    refuse_any([problem.text for problem in found], command)
    return rest


ALONE = Row("rest", lambda v: unexpected(v.rest, {}))
BENCH = (ALONE, _flag_from_1("seconds"), _flag_from_1("repeats"))
CODECS = (
    _flag("codecs", lambda x: not x or listed(x), "name at least one"),
    Row(
        "codecs",
        lambda v: [
            x
            for c in listed(v.codecs)
            for x in problems_of(functools.partial(compression.make, c))[1]
        ],
        "--codecs: {wrong}",
    ),
)
UNAPPLIED = "workdir", "step", "since", "dtype"
FLAGS = {
    "launch": (
        Row("config", lambda v: v.config is None, NO_CONFIG),
        _flag("regions", lambda x: x >= 1, "give the number of jobs, from 1"),
        _flag("restarts", lambda x: x >= 0, "give how often, from 0"),
        _flag(
            "exchange",
            lambda x: x != transports.MESH,
            "all regions would be in one program, as of train; give store, peers or module:Class",
        ),
    ),
    "watch": (
        Row("rest", lambda v: len(v.rest) != 1, "which run? name its folder: watch runs/a"),
        _flag("every", lambda x: x >= 0.1, "give at least 0.1 seconds"),
        _flag("port", lambda x: 0 <= x < 1 << 16, "give a port from 0 to 65535"),
        Row(
            "network",
            lambda v: v.network is not None and problems_of(lambda: parse(v.network))[1],
            "--network: {wrong}",
        ),
        Row(
            "once port",
            lambda v: v.once and v.port is not None,
            "--once prints the present state, --port serves it: leave one out",
        ),
    ),
    "report": (
        Row("rest", lambda v: not v.rest, "which runs? name their folders: report runs/a runs/b"),
        Row(
            "step_seconds network",
            lambda v: v.step_seconds is not None and v.network is None,
            "--step_seconds needs --network: name one, e.g. --network=lan",
        ),
        _flag(
            "step_seconds",
            lambda x: 0 < x < math.inf,
            "must be positive and finite; give seconds above 0",
        ),
    ),
    "sample": (
        ALONE,
        Row("workdir", lambda v: v.workdir is None, "which run? give --workdir=runs/..."),
        *map(_flag_from_1, ("count", "length", "top_k")),
        _flag("temperature", lambda x: x >= 0, "give 0 (greedy) or a positive number"),
    ),
    "export": (
        ALONE,
        Row("output", lambda v: not v.output, "--output is missing"),
        Row("workdir apply", lambda v: v.apply is None and not v.workdir, "--workdir is missing"),
        Row("onto apply", lambda v: v.apply is not None and not v.onto, "--onto is missing"),
        Row(
            "apply",
            lambda v: v.apply and [x for x in UNAPPLIED if x in v.given],
            "--{wrong} has no effect beside --apply: leave it out",
        ),
        Row(
            "dtype since apply",
            lambda v: v.apply is None and v.since is not None and "dtype" in v.given,
            "--dtype has no effect beside --since, whose values are bf16: leave it out",
        ),
        Row(
            "onto apply",
            lambda v: v.apply is None and v.onto is not None,
            "--onto has no effect without --apply=PATCH: give one, or leave it out",
        ),
        Row(
            "dtype",
            lambda v: v.dtype not in v.known and " or ".join(v.known),
            "--dtype={f[dtype]!r}: choose {wrong}",
        ),
        Row(
            "output since apply",
            lambda v: v.apply is None and v.since is not None and Path(v.output or "-").is_dir(),
            "--output={f[output]}: a folder; a patch is one file",
        ),
        _flag("apply", lambda x: Path(x).is_file(), "there is no such file"),
    ),
    "bench codec": (*BENCH, _flag_from_1("size"), _flag_from_1("rank"), *CODECS),
    "bench gpu": (
        *BENCH,
        Row(
            "stages",
            lambda v: [f"{x!r}{closest(x, v.known)}" for x in listed(v.stages) if x not in v.known],
            "--stages: no {wrong}",
        ),
        Row(
            "stages",
            lambda v: not listed(v.stages) and ", ".join(v.known),
            "--stages={f[stages]}: name at least one of {wrong}",
        ),
        *CODECS,
    ),
    "bench engine": (
        *BENCH,
        Row(
            "size",
            lambda v: v.size not in v.known and " or ".join(v.known),
            "--size={f[size]}: use {wrong}",
        ),
        Row(
            "torch",
            lambda v: v.torch and importlib.util.find_spec("torch") is None,
            "--torch needs PyTorch: pip install torch",
        ),
    ),
}
"""By the command's name."""
