"""Writes the page of a campaign as Markdown. All of its figures are computed from the records."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from evidence.campaign.cells import Cell, record_path
from evidence.campaign.estimate import RunEstimate
from evidence.campaign.ledger import Records, hours
from evidence.campaign.order import Points, cells_of, ordered
from evidence.campaign.plan import Arm, Campaign, Claim, Rung, Tuning
from evidence.campaign.tuning import rungs
from evidence.results import corpora, fit
from evidence.results.effects import OPEN, OPPOSITE, SEEN, SURE, Effect, on_variants
from evidence.results.figures import count, kind, short
from evidence.results.verdict import (
    HOLDS,
    HOLDS_FROM,
    NO_VERDICT,
    NOT_SEEN,
    ORDER,
    Trend,
    Verdict,
)
from experiments.compare.plan import merged
from experiments.config import base
from lowcomm_jax.checkpoint.load import dotted
from lowcomm_jax.models.presets import preset

OVERVIEW = "overview.png"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything that the page shows.

    Attributes:
      campaign: claims, arms and rungs.
      ledger: records of the runs.
      effects: those of each claim, by its name.
      verdicts: one for each claim and split of the data.
      config: the file of the campaign.
      beside: the campaign on other texts that the page compares with; None = none.
    """

    campaign: Campaign
    ledger: Records
    effects: dict[str, list[Effect]]
    verdicts: tuple[Verdict, ...]
    config: str
    beside: corpora.Judged | None = None

    def command(self, name: str = "") -> str:
        """A command of this campaign."""
        return " ".join(
            ["python -m evidence", *([name] if name else []), f"--config={self.config}"]
        )

    def verdict(self, claim: str, split: str) -> Verdict | None:
        """The verdict on a claim on data of this split; None if there is none."""
        return next((v for v in self.verdicts if (v.claim, v.split) == (claim, split)), None)

    def of(self, claim: str, split: str) -> list[Effect]:
        """Effects of a claim on data of this split."""
        return [e for e in self.effects[claim] if e.rung.split == split]

    def statuses(self, verdict: Verdict) -> Counter[str]:
        """How many rungs of a verdict are seen, the opposite and open."""
        tested = (e for e in self.of(verdict.claim, verdict.split) if e.tested)
        return Counter(effect.status for effect in tested)

    def sorted_verdicts(self) -> list[Verdict]:
        """The verdicts, those against a claim first; of equal ones, those with more against it."""

        def key(verdict: Verdict):
            found = self.statuses(verdict)
            against = (found[OPPOSITE] - found[SEEN]) / max(1, found.total())
            return ORDER.index(verdict.word), -against, verdict.claim, verdict.split

        return sorted(self.verdicts, key=key)


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows)]


def page(evidence: Evidence) -> str:
    """The whole text."""
    parts = [_head(evidence), _claims_tables(evidence)]
    if evidence.beside:
        here = corpora.Judged(evidence.campaign, evidence.effects)
        parts.append(corpora.section(here, evidence.beside))
    parts += [_how(evidence), _names(evidence)]
    shown = dict.fromkeys(v.claim for v in evidence.sorted_verdicts())
    parts += [_section(evidence, evidence.campaign.claims[name]) for name in shown]
    parts += [_rates(evidence), fit.section(evidence.campaign, evidence.ledger), _left(evidence)]
    parts += [_excluded(evidence), _origin(evidence)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _head(evidence: Evidence) -> str:
    campaign, records = evidence.campaign, list(evidence.ledger.found.values())
    seeds = {r["cell"]["seed"] for r in records if not r["cell"]["tunes"]}
    judged = {e.rung.size for of in evidence.effects.values() for e in of if e.p is not None}
    shown = _shown_sizes(evidence)
    sizes = ", ".join(count(params) for params, name in shown if name in judged)
    others = ", ".join(count(params) for params, name in shown if name not in judged)
    others = f"Of {others} there are runs, but no pair with enough seeds. " if others else ""
    tokenizer = campaign.common["data"].get("tokenizer", "bytes")
    folders = f"`{campaign.records}`"
    if evidence.beside:
        folders += f" and `{evidence.beside.campaign.records}`"
    return f"""
# {campaign.title}

Written by `{evidence.command()}` from the records in {folders}; do not edit it.

Models of {sizes} parameters on {campaign.text}, tokenizer `{tokenizer}`, H = {campaign.period}.
{others}A verdict is about these scales. Published figures come from
larger models that train for longer. Seeds that are reported: up to {len(seeds)}. Losses are in
nats per token. By one command each, in settings of their own: [results](../../docs/RESULTS.md).
{campaign.see}

![all claims on the loss at all rungs]({campaign.page}/{OVERVIEW})
"""


def _shown_sizes(evidence: Evidence) -> list[tuple[float, str]]:
    """(parameters, name) of every size with a run that is reported, from the smallest."""
    records = evidence.ledger.found.values()
    return sorted({(r["params"], r["cell"]["size"]) for r in records if not r["cell"]["tunes"]})


def _claims_tables(evidence: Evidence) -> str:
    campaign = evidence.campaign
    parts = [
        "## Claim by claim",
        "Unflattering verdicts first. The difference is the final loss (or what else the claim is "
        "about) of the first method over that of the second, less one, at the scale that the "
        "verdict names.",
    ]
    families = ("Methods", "Settings of a method, which papers choose and do not all test")
    for number, title in enumerate(families):
        of = [v for v in evidence.sorted_verdicts() if on_variants(campaign, v.claim) == number]
        if of:
            parts += [f"### {title}", _claims_table(evidence, of)]
    absent = [n for n in campaign.claims if not evidence.effects[n]]
    if absent:
        parts.append(f"Not run yet: {', '.join(absent)}.")
    return "\n\n".join(parts)


def _claims_table(evidence: Evidence, verdicts: Sequence[Verdict]) -> str:
    rows = [
        "| claim | data | verdict | difference | seen, opposite, open |",
        "| --- | --- | --- | --- | --- |",
    ]
    for verdict in verdicts:
        claim = evidence.campaign.claims[verdict.claim]
        effects = evidence.of(verdict.claim, verdict.split)
        tested = [e for e in effects if e.tested]
        at = [e for e in tested if (e.rung.size, e.rung.rounds) == verdict.scale] or tested[-1:]
        shown = "; ".join(f"{e.told} ({e.rung.regions} regions)" for e in at) or "-"
        statuses = evidence.statuses(verdict)
        told = ", ".join(str(statuses[word]) for word in (SEEN, OPPOSITE, OPEN))
        rows.append(
            f"| [{claim.says}](#{claim.name}) ({claim.source}) "
            f"| {kind(verdict.split)} | **{told_verdict(evidence, verdict)}** | {shown} | {told} |"
        )
    return "\n".join(rows)


def told_verdict(evidence: Evidence, verdict: Verdict) -> str:
    """The word of a verdict with its scale."""
    if verdict.scale is None:
        return NO_VERDICT
    size, rounds = verdict.scale
    where = f"{count(evidence.campaign.sizes[size].params)}, {rounds} rounds"
    return (
        f"{verdict.word} {where}"
        if "to" in verdict.word or "from" in verdict.word
        else (f"{verdict.word} (up to {where})")
    )


def _wider(how: Tuning) -> str:
    if not how.widen:
        return ""
    return (
        "\n  Where the best lay at the edge of the grid, its neighbours beyond trained for as long;"
        f"\n  and so on, at most {how.widen} times."
    )


def _how(evidence: Evidence) -> str:
    campaign = evidence.campaign
    how = campaign.tuning
    links = f"{campaign.link['bandwidth_gbps']:g} Gbit/s and {campaign.link['delay_ms']:g} ms"
    rounds = ", then ".join(f"{points} points for {r} rounds" for r, points in how.rungs)
    seeds = ", ".join(map(str, how.seeds))
    tests = [0, 0]  # of claims on methods, of claims on variants
    for name, of in evidence.effects.items():
        tests[on_variants(campaign, name)] += sum(e.p is not None for e in of)
    settings = f", and over all {tests[1]} of claims on settings" if tests[1] else ""
    return f"""
## How to read it

- **Equal tokens.** Regions share a batch: all methods, and all numbers of regions, see as many
  tokens. `losses`, `exchanges`, `bytes` (of a region) and `time` are those of the first method,
  beside or over those of the second. `tokens`: likewise, to the higher of both final losses.
  `at equal bytes` and `at equal time`: the difference where both had spent what the cheaper one
  spent; `-` where that is before a first evaluation, as after a thirtieth of a run. These three
  are read off the curves, at learning rates that had not decayed yet. Batches that grow overshoot
  by up to 3 %; learners of unequal speed see fewer tokens than others, and are compared with each
  other alone.
- **Bytes** of AllReduce are those of gradients in fp32 in a ring; papers that count bf16 have half
  the ratio.
- **Virtual time** is that of links of {links} between all regions, and
  {campaign.step_seconds:g} s a step. Links of a wide area carry models far larger than these.
- **Differences** are paired by seed: initial weights and data are shared. ± is a 95 % t-interval,
  not corrected for the number of rungs: one that is clear of the margin may belong to an open rung.
  Three seeds say little of their variance, so tests are moderated (Smyth 2004). A rung's variance
  is weighed against that of all rungs of claims on methods, or on settings; the less these differ,
  the more they count.
- **Verdicts** rest on at least three seeds, and on p-values below {SURE:g} after Holm's correction
  over all {tests[0]} rungs of claims on methods{settings}.
  p is two-sided against the claim's margin, 1 % or 0, and not against no difference.
  `open`: neither the claim nor its opposite is shown, or a run failed.
- **Holds**: seen at every rung. **Holds from**: at every rung of that scale and above; where it is
  not seen, the model is no larger and rounds are no more.
  **Contradicted**: the opposite at every rung of at least two scales, no smaller at the largest.
  **Not seen up to** the largest scale where it is not: anything else, such as the opposite at every
  rung, but smaller at the largest scale. That compares means, and tests nothing.
- **Learning rates** were tuned for each method and size on seeds that are not reported ({seeds}):
  {rounds}, in {how.regions} regions, {kind(how.split)} data.{_wider(how)}
  All have as many points on the grid; how many lie beyond it differs, and a point that the first
  rung dropped is not tried again. The table of rates counts what each method was given.
  A variant of a method, which differs in a setting, trains at the rates of that method. Its section
  says so, and the table of rates does not list it.
- g is Hedges' effect size of the paired differences. The anchor variance is the mean over regions
  of the squared distance of their anchors from the anchors' mean, at the end.
- **Pictures** have a panel for each way in which the scales of a claim differ. A line joins scales
  that differ in nothing else; points at one scale stand beside each other.
- What more rounds, parameters or regions change is a slope over their logarithm: of each seed the
  one that fits best over all rungs that differ in nothing else. It is told for as many times as
  were compared, and for ten times at most. The interval is over the seeds that have all rungs with
  a verdict. It is moderated like those of differences, and not corrected for the number of slopes.
  At equal rounds, larger models see fewer tokens a parameter; with more parameters *and tokens*,
  rungs are compared that have as many a parameter, to the nearest power of two. Of these the larger
  models mostly train for more rounds, as they would in practice. Sizes differ in batch, blocks and
  dtype, too (next table): what parameters change is what all of these change.
- **Limits.** One corpus a page; small batches and grids; rates that were tuned for one length and
  one number of regions serve all others. Rungs of a size share their seeds, so that their
  differences are not fully independent. Rungs that three seeds left open were the first to get
  five, while settled ones may have three: p-values do not account for that look.
- **Commands** train whole stages, which can be more than is shown, and hours count all of it. They
  write into `runs/again`, and two processes of one command share its runs.
  `{evidence.command()} --config.records=runs/again --pages=runs/pages` makes a page of them.
  They train on the corpus of these records if it is there: see the end of the page.
"""


def _names(evidence: Evidence) -> str:
    """The sizes, and the settings of the methods behind the names."""
    campaign = evidence.campaign
    rows = [
        "## Sizes and methods",
        "",
        "| size | parameters | blocks | MLP | also | sequences a step | tokens a step "
        "| tokens in 24 rounds | a parameter | computed in |",
        "| --- " * 10 + "|",
    ]
    for params, name in _shown_sizes(evidence):
        size, tokens = campaign.sizes[name], campaign.tokens(name, 24)
        own = {"preset": base("ddp").model.preset, **size.fields.get("model", {})}
        model = preset(own.pop("preset"), **own)
        also = {"QK-norm": model.qk_norm, "z-loss": model.z_loss}
        cells = (
            f"`{name}`",
            count(params),
            f"{model.layers} of {model.width}",
            f"{model.mlp}, {model.mlp_width:,}",
            ", ".join(what for what, on in also.items() if on) or "-",
            f"{size.batch}",
            f"{tokens // (24 * campaign.period):,}",
            f"{tokens / 1e6:.2f}M",
            f"{tokens / params:.2g}",
            model.compute_dtype,
        )
        rows.append(f"| {' | '.join(cells)} |")
    rows += [
        "",
        "Records of a size lie in the folder of that name. Products of float32 on accelerators are "
        "of JAX's default precision, TF32 on an H100. Runs of a rung may be of different cards, "
        "and a card does not repeat a run to the last bit. Settings that are not named are off. "
        "Rates are in a table below.",
        "",
        "| name | method | inner optimizer | settings |",
        "| --- | --- | --- | --- |",
    ]
    used = {arm for claim in campaign.claims.values() for arm in (claim.here, claim.there)}
    for name, arm in campaign.arms.items():
        if name not in used:
            continue
        method, inner = arm.base["method"]["name"], arm.base["inner"]["optimizer"]
        rows.append(f"| {name} | {method} | {inner} | {_differs(campaign, arm)} |")
    return "\n".join(rows)


def _differs(campaign: Campaign, arm: Arm) -> str:
    """What an arm is set to; of a variant, what differs from the arm that it varies."""
    own = _settings_of(arm)
    if arm.tuned_as == arm.name:
        return ", ".join(f"{f}={value}" for f, value in own.items() if value is not None)
    like = _settings_of(campaign.arms[arm.tuned_as])
    told = [
        f"{field}={'off' if value is None else value}"
        for field, value in own.items()
        if value != like.get(field)
    ]
    return f"{arm.tuned_as}, but {', '.join(told)}"


def _settings_of(arm: Arm) -> dict[str, Any]:
    """The fields of an arm's method, without its rates and the H that all arms share.

    Fields of `adaptive`, which growing batches read, are shown where they are not the usual ones.
    """
    whole = merged(arm.base, arm.changes)
    usual = dotted({"adaptive": base("ddp").adaptive.to_dict()})
    adaptive = dotted({"adaptive": whole["adaptive"]})
    rates = {field for changes in arm.points.values() for field in dotted(changes)}
    hidden = {*rates, "method.name", *({"method.period"} - set(dotted(arm.changes)))}
    fields = dotted({"method": whole["method"]})
    fields |= {field: value for field, value in adaptive.items() if value != usual[field]}
    return {f.removeprefix("method."): v for f, v in sorted(fields.items()) if f not in hidden}


def _section(evidence: Evidence, claim: Claim) -> str:
    here = [v for v in evidence.sorted_verdicts() if v.claim == claim.name]
    lines = [f"## {claim.name}", "", f"{claim.says} (arXiv {claim.source})."]
    if claim.published:
        lines.append(f"Published: {claim.published}.")
    arms = (evidence.campaign.arms[name] for name in (claim.here, claim.there))
    lines += [
        f"`{arm.name}` trains at the rates of `{arm.tuned_as}`."
        for arm in arms
        if arm.tuned_as != arm.name
    ]
    for verdict in here:
        counts = evidence.statuses(verdict)
        lines += [
            "",
            f"Data {kind(verdict.split)}: **{told_verdict(evidence, verdict)}**. Rungs as claimed: "
            f"{counts[SEEN]}; the opposite: {counts[OPPOSITE]}; open: {counts[OPEN]}.",
            *_seen_at(evidence, verdict),
        ]
        lines += _trend("rounds", verdict.over_rounds)
        lines += _trend("parameters", verdict.over_size)
        lines += _trend("parameters and tokens", verdict.over_both)
        lines += _trend("regions", verdict.over_regions)
        lines.append(f"What would change our mind: {_mind(claim, verdict)}.")
    lines += [
        "",
        f"![{claim.here} against {claim.there}]({evidence.campaign.page}/{claim.name}.png)",
        "",
        *_table(evidence, claim),
        "",
        *_command(evidence, claim),
    ]
    return "\n".join(lines)


def _seen_at(evidence: Evidence, verdict: Verdict) -> Iterator[str]:
    """Of a claim that is seen at some rungs only: where, and where the opposite is."""
    if verdict.word != NOT_SEEN or not evidence.statuses(verdict)[SEEN]:
        return
    for status, words in ((SEEN, "Seen at"), (OPPOSITE, "The opposite at")):
        at: dict[str, list[str]] = {}
        for e in evidence.of(verdict.claim, verdict.split):
            if e.tested and e.status == status:
                params = count(evidence.campaign.sizes[e.rung.size].params)
                regions = at.setdefault(f"{params}, {e.rung.rounds} rounds", [])
                regions.append(str(e.rung.regions))
        where = (f"{scale}, {' and '.join(of)} regions" for scale, of in at.items())
        if at:
            yield f"{words} {'. At '.join(where)}."


def _mind(claim: Claim, verdict: Verdict) -> str:
    """The result that would turn a verdict, and where to look for it."""
    margin = f"{100 * claim.margin:+.0f} %" if claim.margin else "0"
    if verdict.word in (HOLDS, HOLDS_FROM):
        return f"differences that are not shown to be below {margin}, {claim.mind}"
    return f"differences below {margin}, with corrected p-values below {SURE:g}, {claim.mind}"


def _trend(what: str, change: Trend) -> Iterator[str]:
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


def _table(evidence: Evidence, claim: Claim) -> list[str]:
    what = {"loss": "losses"}.get(claim.measure, claim.measure.replace("_", " "))
    rows = [
        f"| scale | data | {what} | difference | p, corrected | g | seeds | exchanges | bytes "
        "| time | tokens | at equal bytes | at equal time | |",
        "| --- " * 14 + "|",
    ]
    for e in evidence.effects[claim.name]:
        params = count(evidence.campaign.sizes[e.rung.size].params)
        fewer = "" if e.fewer_bytes is None else f" (1/{short(e.fewer_bytes, 3)} of AllReduce)"
        cells = (
            f"{params}, {e.rung.rounds} rounds, {e.rung.regions} regions",
            kind(e.rung.split),
            ", ".join(f"{value:.3f}" if value >= 0.1 else f"{value:.3g}" for value in e.values),
            e.told,
            "-" if e.adjusted is None else _p(e.adjusted),
            "-" if e.size_of_effect is None else f"{e.size_of_effect:+.1f}",
            str(len(e.differences)) + (f" (failed: {len(e.failed)})" if e.failed else ""),
            _times(e.exchanges),
            _times(e.bytes) + fewer,
            _times(e.seconds),
            _times(e.tokens.mean, e.tokens.half),
            _share(e.at_equal_bytes),
            _share(e.at_equal_time),
            e.status if e.tested else "too few seeds",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _p(value: float) -> str:
    """A p-value; far out in the tails none is known to be right."""
    return f"{value:.2g}" if value >= 1e-6 else "< 1e-6"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def _times(ratio: float | None, half: float | None = None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.3g} x" if half is None else f"{ratio:.2f} ± {half:.2f} x"


def _command(evidence: Evidence, claim: Claim) -> list[str]:
    """The command that repeats what is shown of a claim, with its hours on two cores.

    Where some of it ran on accelerators, a second command repeats that.
    """
    campaign, ledger = evidence.campaign, evidence.ledger
    shown = {
        (effect.rung, seed)
        for effect in evidence.effects[claim.name]
        for seed in (*effect.differences, *effect.failed)
    }
    behind = cells_behind(campaign, ledger, claim, {rung for rung, _ in shown})
    first: dict[tuple[Rung, int], int] = {}  # the stage that first asks for a seed of a rung
    for number, stage in enumerate(campaign.stages):
        for rung, seeds in claim.ladder.get(stage, {}).items():
            for seed in seeds:
                first.setdefault((rung, seed), number)
    accelerated = {
        (Rung(cell.size, cell.rounds, cell.regions, cell.split), cell.seed)
        for cell in behind
        if not cell.tunes and ledger.found[cell]["machine"]["backend"] != "cpu"
    }
    lines, needs = [], []
    if on_cores := shown - accelerated:
        until = max(first[one] for one in on_cores)
        command, seconds = _repeated(evidence, claim, behind, 0, until, "cpu")
        lines += command
        needs.append(f"{seconds / 7200:.1f} hours on two cores, a process each")
    if on_accelerators := shown & accelerated:
        backends = Counter(ledger.found[cell]["machine"]["backend"] for cell in behind)
        backend = next(name for name, _ in backends.most_common() if name != "cpu")
        numbers = [first[one] for one in on_accelerators]
        command, seconds = _repeated(evidence, claim, behind, min(numbers), max(numbers), backend)
        lines += command
        needs.append(
            f"{seconds / 3600:.1f} process-hours on an accelerator, which several processes share"
        )
    return [
        f"From nothing, tuning included, this takes about {', then '.join(needs)}. What is shown "
        f"took {hours(ledger.found[cell] for cell in behind)}:",
        "",
        "```bash",
        *lines,
        "```",
    ]


def _repeated(
    evidence: Evidence,
    claim: Claim,
    behind: Collection[Cell],
    since: int,
    until: int,
    backend: str,
) -> tuple[list[str], float]:
    """(the command for a claim in these stages, core-seconds of all its runs from nothing).

    The stages may ask for more than is shown. Points beyond a grid are those that were tried.
    """
    campaign, ledger = evidence.campaign, evidence.ledger
    stages = campaign.stages[since : until + 1]
    alone = dataclasses.replace(campaign, claims={claim.name: claim}, stages=stages)
    estimate = RunEstimate(campaign, ledger.found.values(), backend)
    start = f"--since={stages[0]} " if since else ""
    command = [
        f"{evidence.command('campaign')} --only={claim.name} \\",
        f"    {start}--until={stages[-1]} --config.records=runs/again",
    ]
    seconds = sum(step.seconds for step in ordered(alone, Records(alone), estimate.seconds))
    beyond = (
        estimate.seconds(cell)
        for cell in behind
        if cell.tunes and cell.point not in campaign.arms[cell.arm].grid
        if ledger.found[cell]["machine"]["backend"] == backend
    )
    return command, seconds + sum(beyond)


def cells_behind(
    campaign: Campaign, ledger: Records, claim: Claim, reported: Collection[Rung]
) -> set[Cell]:
    """The recorded cells of a claim's rungs, and those that tuned its arms at their sizes."""
    points, found = Points(campaign, ledger), set()
    for rung, seeds in claim.rungs().items():
        if rung not in reported:
            continue
        cells = [c for c in cells_of(claim, rung, seeds, points) if c in ledger.found]
        found |= set(cells)
        for cell in cells:
            known = rungs(campaign, ledger, cell.arm, cell.size)
            found |= {c for of in known for c in of if c in ledger.found}
    return found


def _rates(evidence: Evidence) -> str:
    campaign, ledger = evidence.campaign, evidence.ledger
    points = Points(campaign, ledger)
    rows = [
        "## Learning rates",
        "",
        "The best of the points that each method tried. Where it lies at an edge of them, a wider "
        "grid may have a better one.",
        "",
        "| method | size | rates | runs, rounds | loss of the points, by rung |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size in campaign.sizes:
        for name, arm in campaign.arms.items():
            known = rungs(campaign, ledger, name, size)
            if arm.tuned_as != name or not any(cell in ledger.found for cell in known[0]):
                continue
            point = points.of(name, size)
            tried = {*arm.grid, *(cell.point for of in known for cell in of)}
            best = _settings({name: arm.points[name] for name in tried}, point) if point else ""
            losses = "; ".join(
                ", ".join("-" if (x := ledger.loss(c)) is None else f"{x:.3f}" for c in of)
                for of in known
            )
            size_of = count(campaign.sizes[size].params)
            ran = [cell for of in known for cell in of if cell in ledger.found]
            spent = f"{len(ran)}, {sum(cell.rounds for cell in ran)}"
            rows.append(f"| {name} | {size_of} | {best or 'not settled'} | {spent} | {losses} |")
    return "\n".join(rows)


def _settings(points, name: str) -> str:
    """The values of a point, each with the grid that it was chosen from."""
    flat = {point: dotted(changes) for point, changes in points.items()}
    shown = []
    for field, value in flat[name].items():
        grid = ", ".join(f"{v:g}" for v in sorted({of[field] for of in flat.values()}))
        which = "inner" if field.startswith("inner.") else "outer"
        shown.append(f"{which} {value:g} (of {grid})")
    return ", ".join(shown)


def _left(evidence: Evidence) -> str:
    campaign, ledger = evidence.campaign, evidence.ledger
    on_cores, on_a_card = (
        RunEstimate(campaign, ledger.found.values(), backend) for backend in ("cpu", "gpu")
    )
    left: dict[str, list[Cell]] = {}
    for step in ordered(campaign, ledger, on_cores.seconds):
        left.setdefault(step.stage, []).extend((*step.tunes, *step.cells))

    def took(estimate: RunEstimate, cells: Sequence[Cell]) -> str:
        known = estimate is on_cores or all(map(estimate.knows, cells))
        return f"{sum(map(estimate.seconds, cells)) / 3600:,.1f}" if known else "-"

    rows = [
        f"| {stage} | {len(left[stage])} | {took(on_cores, left[stage])} "
        f"| {took(on_a_card, left[stage])} | {sum(map(on_cores.flops, left[stage])):.1e} |"
        for stage in campaign.stages
        if stage in left
    ]
    if not rows:
        return "## What is left\n\nNothing."
    return "\n".join(
        [
            "## What is left",
            "",
            "The same command goes on with it, on this machine or another. Records join by lying "
            "in one folder: each names its code, its config's digest and its corpus. Processes on "
            "one machine share the runs; on several machines give each stages or claims of its "
            "own (`--since`, `--until`, `--only`). A run that fails is listed; it runs again once "
            "its record is removed.",
            "",
            "Core-hours are at the pace of one core, from what ran. Process-hours are those of an "
            "accelerator that several processes share, from what ran on one "
            "([how](../README.md#on-an-accelerator)).",
            "",
            "| stage | runs | core-hours | or process-hours | FLOPs |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            "```bash",
            f"{evidence.command('campaign')} --plan",
            f"{evidence.command('campaign')} --core_hours=8   # once for each core",
            "```",
        ]
    )


def _excluded(evidence: Evidence) -> str:
    campaign, ledger = evidence.campaign, evidence.ledger
    lines, tuned = ["## Runs that do not count", ""], Points(campaign, ledger)
    rows = [f"| `{entry.file}` | {entry.reason} |" for entry in ledger.excluded]
    for cell, record in ledger.found.items():
        best = tuned.of(cell.arm, cell.size)
        if not cell.tunes and cell.point != best:
            path = record_path(campaign, cell, record["config_digest"])
            file = path.relative_to(campaign.records).as_posix()
            why = (
                f"at learning rates that {best} has replaced"
                if best
                else "its rates are being tuned"
            )
            rows.append(f"| `{file}` | {why} |")
    if not rows:
        return "\n".join([*lines, "None: no run failed, and no record was left out."])
    return "\n".join([*lines, "| record | reason |", "| --- | --- |", *rows])


def _origin(evidence: Evidence) -> str:
    records = list(evidence.ledger.found.values())
    lines = ["## Where the records come from", ""]
    if not records:
        return "\n".join([*lines, "There are none."])
    commits = len({r["code"]["commit"] for r in records})
    changed = sum(bool(r["code"]["changed"]) for r in records)
    machines = Counter(_machine(r) for r in records)
    digests = Counter((r["corpus_digest"] or "")[:10] for r in records)
    rows = [
        f"- {len(records)} runs, {hours(records)}.",
        f"- Commits: {commits}. Each record names its own; {changed} ran with changed files.",
        "- Machine: " + ", ".join(f"{k} ({n})" for k, n in sorted(machines.items())) + ".",
        "- Corpus (digest): " + ", ".join(f"`{k}` ({n})" for k, n in sorted(digests.items())) + ".",
    ]
    if evidence.campaign.origin:
        rows.append(f"- {evidence.campaign.origin}.")
    return "\n".join([*lines, *rows])


def _machine(record) -> str:
    one = record["machine"]
    return f"{one['system']}, {one['cpus']} cores, {one['device']}, jax {record['versions']['jax']}"
