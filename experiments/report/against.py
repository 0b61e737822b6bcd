"""Compare a run with its plan: `report RUN --against=plan.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from rich import box
from rich.table import Table

from experiments.cli import RefusedError, problems_of
from experiments.progress import right, size
from experiments.report.runlog import RunLog, mean_sent, summarise
from experiments.report.virtual import Links, on_network
from experiments.shape import Count, Number, Positive, misfit, read_json
from lowcomm_jax.network import parse

APART = 0.1  # a share of the plan's figure: beyond it a line is marked
# Of a planned config: what does not change the figures that are compared.
_FREE = ("config", "steps", "tokens", "network", "accumulate", "model.compute_dtype", "model.remat")


class _Method(Struct):
    name: str
    period: Count
    tau: Number | Literal["period"]


class _Row(Struct):
    method: _Method
    utilisation: Positive
    loss_with_penalty: Number | None
    payload_bytes: Number
    sent_bytes_per_period: Number
    speedup: Number


class _Train(Struct):
    config: str


class _Answer(Struct):
    train: _Train | None


class _Answers(Struct):
    rows: dict[str, _Answer]


class _Plan(Struct):
    """What is read of a plan.json."""

    rows: list[_Row]
    answer: _Answers
    step_s: Positive
    params: Number
    tokens_per_step: Number
    network_spec: str | dict


@dataclasses.dataclass(frozen=True)
class Deviation:
    """One figure of the comparison.

    Attributes:
      what, unit: in words.
      planned, seen: None where it is not known.
      judged: whether a difference is marked; False where the plan is of other hardware.
    """

    what: str
    unit: str
    planned: float | None
    seen: float | None
    judged: bool = True

    @property
    def ratio(self) -> float | None:
        """Seen over planned."""
        if self.planned is None or self.seen is None:
            return None
        if self.planned == self.seen:
            return 1.0
        return self.seen / self.planned if self.planned else float("inf")

    @property
    def apart(self) -> bool:
        """Whether they differ by more than `APART`."""
        return self.judged and self.ratio is not None and abs(self.ratio - 1) > APART


def read_plan(path: Path) -> dict[str, Any]:
    """The content of a plan.json.

    Raises:
      RefusedError: there is no such file, or it holds no plan that a run can be compared with.
    """
    file = path / "plan.json" if path.is_dir() else path
    fix = "give the plan.json that `plan` writes"
    found = read_json(file, "report: --against", fix)
    wrong = misfit(found, _Plan)
    if wrong is None:
        answers = found["answer"]["rows"]
        lacking = [name for row in found["rows"] if (name := row["method"]["name"]) not in answers]
        wrong = f"lacks an answer for {lacking[0]}" if lacking else None
    if wrong is None:
        _, problems = problems_of(lambda: parse(found["network_spec"]))
        wrong = f"network_spec: {problems[0]}" if problems else None
    if wrong is not None:
        raise RefusedError([f"{file}: no plan ({wrong}); {fix}"], "report: --against")
    return found


def planned_row(run: RunLog, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row of the plan that has the run's config.

    Raises:
      RefusedError: there is none; says how the nearest one differs.
    """
    nearest: tuple[int, str, list[str]] | None = None
    for row in plan["rows"]:
        name = row["method"]["name"]
        train = plan["answer"]["rows"][name]["train"]
        if train is None:
            continue
        other = _differences(train, run)
        if not other:
            return row
        if nearest is None or len(other) < nearest[0]:
            nearest = (len(other), name, other)
    problem = f"{run.name} is of no config in this plan"
    if nearest is not None:
        problem += f"; of {nearest[1]} there and here differ: {'; '.join(nearest[2])}"
    raise RefusedError([problem], "report")


def _differences(train: Mapping[str, Any], run: RunLog) -> list[str]:
    found = []
    for field, value in train.items():
        if field in _FREE or field.startswith("mesh."):
            continue
        here: Any = run.header["config"]
        for part in field.split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        if here != value:
            found.append(f"{field}: {value} -> {here}")
    return found


def against(run: RunLog, plan: Mapping[str, Any]) -> list[Deviation]:
    """Every figure that both the plan and the run have.

    Bytes and virtual time are those of whole periods. The virtual time is the run's events on the
    plan's network, at the plan's seconds of a step: it compares the planner's formula with the
    clock.

    Raises:
      RefusedError: the plan is of another config, or the run has not made a whole period.
    """
    row = planned_row(run, plan)
    period = row["method"]["period"]
    whole = len(run.steps) // period * period
    if not whole:
        problem = f"{run.name} has made {len(run.steps)} steps: a period is {period}"
        raise RefusedError([problem], "report")
    summary = summarise(run)
    sent = mean_sent(run.steps[whole - 1]) / whole
    step_s = plan["step_s"]
    network = parse(plan["network_spec"]).with_median_step(step_s)
    periods = dataclasses.replace(run, steps=run.steps[:whole])
    virtual = on_network(periods, Links(network, "network"))
    busy_s = step_s / row["utilisation"]
    taken_s = (
        summary.tokens_per_second and run.header["tokens_per_step"] / summary.tokens_per_second
    )
    faster = virtual.allreduce_s / virtual.clock.wall_s
    loss = row["loss_with_penalty"]
    delay = row["method"]["tau"]
    late = period if delay == "period" else delay
    return [
        Deviation("parameters", "", plan["params"], run.header["params"]),
        Deviation("tokens a step", "", plan["tokens_per_step"], run.header["tokens_per_step"]),
        Deviation("payload of the model", "bytes", row["payload_bytes"], _payload(run)),
        Deviation("sent a step, per region", "bytes", row["sent_bytes_per_period"] / period, sent),
        Deviation("staleness, inner steps", "", late, summary.staleness),
        Deviation("utilisation on the network", "%", row["utilisation"], virtual.clock.utilisation),
        Deviation("a step on the network", "s", busy_s, virtual.clock.wall_s / whole),
        Deviation("faster than AllReduce", "x", row["speedup"], faster),
        Deviation("a step on the run's machine", "s", busy_s, taken_s, judged=False),
        Deviation("eval loss, nats", "", loss, summary.loss),
    ]


def _payload(run: RunLog) -> float | None:
    sizes = run.header.get("fragment_bytes")
    return float(sum(sizes)) if sizes else None


HEADINGS = ("planned", "seen", "seen / planned")


def title_of(name: str) -> str:
    """The heading of a run's comparison."""
    return f"{name} against its plan"


def verdict(lines: Sequence[Deviation]) -> str:
    """Which figures differ by more than `APART`, in a sentence."""
    apart = [line.what for line in lines if line.apart]
    return f"more than {APART:.0%} apart: {', '.join(apart)}" if apart else "as planned"


def cells(line: Deviation) -> tuple[str, str, str]:
    """The text of a figure under each of `HEADINGS`."""
    ratio = "" if line.ratio is None else f"{line.ratio:.3f}"
    planned, seen = (_text(value, line.unit) for value in (line.planned, line.seen))
    return planned, seen, f"{ratio} differs" if line.apart else ratio


def table(name: str, lines: Sequence[Deviation]) -> Table:
    """A row a figure, marked where plan and run differ by more than `APART`."""
    columns = ("", *right(HEADINGS))
    out = Table(*columns, box=box.SIMPLE_HEAD, title=title_of(name), title_justify="left")
    for line in lines:
        out.add_row(line.what, *cells(line), style="yellow" if line.apart else None)
    return out


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return size(value)
    if unit == "%":
        return f"{value:.1%}"
    shown = f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"
    return f"{shown} {unit}".rstrip()
