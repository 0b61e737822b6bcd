"""The section of a claim: its verdict, picture, rungs, and the command that repeats it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterator

from evidence.campaign.cells import Cell
from evidence.campaign.estimate import RunEstimate
from evidence.campaign.ledger import Records, hours
from evidence.campaign.order import cells_of, ordered
from evidence.campaign.plan import Claim, Rung
from evidence.campaign.tuning import rungs
from evidence.results.effects import OPEN, OPPOSITE, SEEN, SURE
from evidence.results.gathered import Evidence
from evidence.results.markdown import count, kind, short, table
from evidence.results.verdict import (
    HOLDS,
    HOLDS_FROM,
    NO_VERDICT,
    NOT_SEEN,
    Trend,
    Verdict,
)


def section(evidence: Evidence, claim: Claim) -> str:
    """The section of a page on one claim."""
    lines = [f"## {claim.name}", "", f"{claim.says} (arXiv {claim.source})."]
    if claim.published:
        lines.append(f"Published: {claim.published}.")
    for arm in (evidence.campaign.arms[name] for name in (claim.here, claim.there)):
        if arm.tuned_as != arm.name:
            lines.append(f"`{arm.name}` trains at the rates of `{arm.tuned_as}`.")
    for verdict in evidence.sorted_verdicts():
        if verdict.claim == claim.name:
            lines += ["", *_told(evidence, claim, verdict)]
    picture = f"{evidence.campaign.page}/{claim.name}.png"
    lines += ["", f"![{claim.here} against {claim.there}]({picture})", ""]
    return "\n".join([*lines, *_rungs(evidence, claim), "", *_command(evidence, claim)])


def _told(evidence: Evidence, claim: Claim, verdict: Verdict) -> Iterator[str]:
    """What a verdict rests on, what scale changes, and what would turn it."""
    counts = evidence.statuses(verdict)
    yield (
        f"Data {kind(verdict.split)}: **{told_verdict(evidence, verdict)}**. Rungs as claimed: "
        f"{counts[SEEN]}; the opposite: {counts[OPPOSITE]}; open: {counts[OPEN]}."
    )
    if verdict.word == NOT_SEEN and counts[SEEN]:
        for status, words in ((SEEN, "Seen at"), (OPPOSITE, "The opposite at")):
            at: dict[str, list[str]] = {}
            for e in evidence.tested(claim.name, verdict.split):
                if e.status == status:
                    scale = f"{evidence.params(e.rung)}, {e.rung.rounds} rounds"
                    at.setdefault(scale, []).append(str(e.rung.regions))
            if at:
                where = (f"{scale}, {' and '.join(of)} regions" for scale, of in at.items())
                yield f"{words} {'. At '.join(where)}."
    yield from told_trend("rounds", verdict.over_rounds)
    yield from told_trend("parameters", verdict.over_size)
    yield from told_trend("parameters and tokens", verdict.over_both)
    yield from told_trend("regions", verdict.over_regions)
    margin = f"{100 * claim.margin:+.0f} %" if claim.margin else "0"
    turns = f"differences below {margin}, with corrected p-values below {SURE:g}, {claim.mind}"
    if verdict.word in (HOLDS, HOLDS_FROM):
        turns = f"differences that are not shown to be below {margin}, {claim.mind}"
    yield f"What would change our mind: {turns}."


def told_trend(what: str, change: Trend) -> Iterator[str]:
    """The change of the difference over the range that was seen, of a factor of ten at most."""
    if change.mean is None or change.half is None:
        return
    times = min(10.0, change.seen)
    points = 100 * math.log10(times)
    verdict = {"lower": "it falls", "higher": "it grows"}.get(change.verdict, change.verdict)
    yield (
        f"With {short(times)} times the {what} the difference changes by "
        f"{points * change.mean:+.1f} ± {points * change.half:.1f} points ({verdict})."
    )


def _rungs(evidence: Evidence, claim: Claim) -> list[str]:
    what = {"loss": "losses"}.get(claim.measure, claim.measure.replace("_", " "))
    rows = []
    for e in evidence.effects[claim.name]:
        fewer = "" if e.fewer_bytes is None else f" (1/{short(e.fewer_bytes, 3)} of AllReduce)"
        # Far out in the tails no p-value is known to be right.
        p = e.adjusted and (f"{e.adjusted:.2g}" if e.adjusted >= 1e-6 else "< 1e-6")
        tokens = e.tokens.half is not None and f"{e.tokens.mean:.2f} ± {e.tokens.half:.2f} x"
        rows.append(
            (
                f"{evidence.params(e.rung)}, {e.rung.rounds} rounds, {e.rung.regions} regions",
                kind(e.rung.split),
                ", ".join(f"{value:.3f}" if value >= 0.1 else f"{value:.3g}" for value in e.values),
                e.told,
                "-" if p is None else p,
                _known("{:+.1f}", e.size_of_effect),
                str(len(e.differences)) + (f" (failed: {len(e.failed)})" if e.failed else ""),
                _known("{:.3g} x", e.exchanges),
                _known("{:.3g} x", e.bytes) + fewer,
                _known("{:.3g} x", e.seconds),
                tokens or _known("{:.3g} x", e.tokens.mean),
                _known("{:+.1%}", e.at_equal_bytes).replace("%", " %"),
                _known("{:+.1%}", e.at_equal_time).replace("%", " %"),
                e.status if e.tested else "too few seeds",
            )
        )
    heads = ("scale", "data", what, "difference", "p, corrected", "g", "seeds", "exchanges")
    return table((*heads, "bytes", "time", "tokens", "at equal bytes", "at equal time", ""), rows)


def _known(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


def _command(evidence: Evidence, claim: Claim) -> list[str]:
    """The commands that repeat what is shown of a claim, with their hours.

    Where some of it ran on accelerators, a second command repeats that. Commands train whole
    stages, which may ask for more than is shown. Points beyond a grid are those that were tried.
    """
    campaign, found = evidence.campaign, evidence.ledger.found
    effects = evidence.effects[claim.name]
    shown = {(e.rung, seed) for e in effects for seed in (*e.differences, *e.failed)}
    behind = cells_behind(evidence, claim, {rung for rung, _ in shown})
    backends = {cell: found[cell]["machine"]["backend"] for cell in behind}
    first: dict[tuple[Rung, int], int] = {}  # the stage that first asks for a seed of a rung
    for number, stage in enumerate(campaign.stages):
        for rung, seeds in claim.ladder.get(stage, {}).items():
            for seed in seeds:
                first.setdefault((rung, seed), number)
    accelerated = {(c.rung, c.seed) for c, b in backends.items() if b != "cpu" and not c.tunes}
    card = next((b for b, _ in Counter(backends.values()).most_common() if b != "cpu"), "")
    shared = "process-hours on an accelerator, which several processes share"
    both = (
        ("cpu", shown - accelerated, 7200, "hours on two cores, a process each"),
        (card, shown & accelerated, 3600, shared),
    )
    lines, needs = [], []
    for backend, wanted, per_hour, unit in both:
        if not wanted:
            continue
        numbers = sorted(first[one] for one in wanted)
        since = 0 if backend == "cpu" else numbers[0]
        stages = campaign.stages[since : numbers[-1] + 1]
        start = f"--since={stages[0]} " if since else ""
        lines += [
            f"{evidence.command('campaign')} --only={claim.name} \\",
            f"    {start}--until={stages[-1]} --config.records=runs/again",
        ]
        alone = dataclasses.replace(campaign, claims={claim.name: claim}, stages=stages)
        estimate = RunEstimate(evidence.ledger, backend)
        seconds = sum(step.seconds for step in ordered(Records(alone), estimate.seconds))
        seconds += sum(
            estimate.seconds(cell)
            for cell in behind
            if cell.tunes and cell.point not in campaign.arms[cell.arm].grid
            if backends[cell] == backend
        )
        needs.append(f"{seconds / per_hour:.1f} {unit}")
    return [
        f"From nothing, tuning included, this takes about {', then '.join(needs)}. What is shown "
        f"took {hours(found[cell] for cell in behind)}:",
        "",
        "```bash",
        *lines,
        "```",
    ]


def cells_behind(evidence: Evidence, claim: Claim, reported: Collection[Rung]) -> set[Cell]:
    """The recorded cells of a claim's rungs, and those that tuned its arms at their sizes."""
    ledger, found = evidence.ledger, set()
    for rung, seeds in claim.rungs().items():
        if rung in reported:
            cells = [c for c in cells_of(claim, rung, seeds, evidence.points) if c in ledger.found]
            found |= set(cells)
            for arm, size in {(cell.arm, cell.size) for cell in cells}:
                known = rungs(ledger, arm, size)
                found |= {c for of in known for c in of if c in ledger.found}
    return found


def told_verdict(evidence: Evidence, verdict: Verdict) -> str:
    """The word of a verdict with its scale."""
    if verdict.scale is None:
        return NO_VERDICT
    size, rounds = verdict.scale
    where = f"{count(evidence.campaign.sizes[size].params)}, {rounds} rounds"
    ends = verdict.word in (NOT_SEEN, HOLDS_FROM)
    return f"{verdict.word} {where}" if ends else f"{verdict.word} (up to {where})"
