"""Writes the page of a campaign as Markdown, `text/page.md` filled in from the records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from evidence.campaign.cells import Cell, record_path
from evidence.campaign.estimate import RunEstimate
from evidence.campaign.ledger import hours
from evidence.campaign.order import ordered
from evidence.campaign.plan import Arm, Campaign
from evidence.campaign.tuning import rungs
from evidence.results import corpora, fit
from evidence.results.effects import OPEN, OPPOSITE, SEEN, SURE, on_variants
from evidence.results.gathered import Evidence
from evidence.results.markdown import count, filled, kind, short, table
from evidence.results.sections import section, told_verdict
from evidence.results.verdict import Verdict
from experiments.compare.plan import merged
from experiments.config import base
from lowcomm_jax.checkpoint.load import dotted
from lowcomm_jax.models.presets import preset


def page(evidence: Evidence) -> str:
    """The whole text."""
    campaign = evidence.campaign
    records, shown = evidence.ledger.found, _shown_sizes(evidence)
    judged = {e.rung.size for of in evidence.effects.values() for e in of if e.p is not None}
    others = ", ".join(count(params) for params, name in shown if name not in judged)
    others = f"Of {others} there are runs, but no pair with enough seeds. " if others else ""
    beside = [evidence.beside] if evidence.beside else []
    of = (campaign.records, *(other.campaign.records for other in beside))
    tests = [0, 0]  # of claims on methods, of claims on variants
    for name, effects in evidence.effects.items():
        tests[on_variants(campaign, name)] += sum(e.p is not None for e in effects)
    how, link = campaign.tuning, campaign.link
    wider = (
        "\n  Where the best lay at the edge of the grid, its neighbours beyond trained for as long;"
        f"\n  and so on, at most {how.widen} times."
    )
    claims = dict.fromkeys(v.claim for v in evidence.sorted_verdicts())
    here = corpora.Judged(campaign, evidence.effects)
    text = filled(
        "page",
        **{name: getattr(campaign, name) for name in ("title", "text", "see", "page", "period")},
        step_seconds=campaign.step_seconds,
        write=evidence.command(),
        folders=" and ".join(f"`{folder}`" for folder in of),
        sizes=", ".join(count(params) for params, name in shown if name in judged),
        others=others,
        tokenizer=campaign.common["data"].get("tokenizer", "bytes"),
        reported=len({cell.seed for cell in records if not cell.tunes}),
        verdicts=_claims_tables(evidence),
        corpora="\n".join(corpora.section(here, other) for other in beside),
        links=f"{link['bandwidth_gbps']:g} Gbit/s and {link['delay_ms']:g} ms",
        sure=SURE,
        tests=tests[0],
        settings=f", and over all {tests[1]} of claims on settings" if tests[1] else "",
        seeds=", ".join(map(str, how.seeds)),
        rungs=", then ".join(
            f"{points} points for {rounds} rounds" for rounds, points in how.rungs
        ),
        regions=how.regions,
        split=kind(how.split),
        wider=wider if how.widen else "",
        size_table="\n".join(_sizes(evidence)),
        arm_table="\n".join(_arms(evidence)),
        sections="\n\n".join(section(evidence, campaign.claims[name]) for name in claims),
        rates="\n".join(_rates(evidence)),
        fit=_fits(evidence),
        left=_left(evidence),
        excluded=_excluded(evidence),
        origin=_origin(evidence),
    )
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


def _shown_sizes(evidence: Evidence) -> list[tuple[float, str]]:
    """(parameters, name) of every size with a run that is reported, from the smallest."""
    found = evidence.ledger.found.items()
    return sorted({(record["params"], cell.size) for cell, record in found if not cell.tunes})


def _claims_tables(evidence: Evidence) -> str:
    campaign, parts = evidence.campaign, []
    families = ("Methods", "Settings of a method, which papers choose and do not all test")
    for number, title in enumerate(families):
        of = [v for v in evidence.sorted_verdicts() if on_variants(campaign, v.claim) == number]
        if of:
            heads = ("claim", "data", "verdict", "difference", "seen, opposite, open")
            rows = [_claim_row(evidence, verdict) for verdict in of]
            parts += [f"### {title}", "\n".join(table(heads, rows))]
    absent = [n for n in campaign.claims if not evidence.effects[n]]
    if absent:
        parts.append(f"Not run yet: {', '.join(absent)}.")
    return "\n\n".join(parts)


def _claim_row(evidence: Evidence, verdict: Verdict) -> tuple[str, ...]:
    claim = evidence.campaign.claims[verdict.claim]
    tested = evidence.tested(verdict.claim, verdict.split)
    at = [e for e in tested if (e.rung.size, e.rung.rounds) == verdict.scale] or tested[-1:]
    statuses = evidence.statuses(verdict)
    return (
        f"[{claim.says}](#{claim.name}) ({claim.source})",
        kind(verdict.split),
        f"**{told_verdict(evidence, verdict)}**",
        "; ".join(f"{e.told} ({e.rung.regions} regions)" for e in at) or "-",
        ", ".join(str(statuses[word]) for word in (SEEN, OPPOSITE, OPEN)),
    )


def _sizes(evidence: Evidence) -> list[str]:
    campaign, rows = evidence.campaign, []
    for params, name in _shown_sizes(evidence):
        size, tokens = campaign.sizes[name], campaign.tokens(name, 24)
        own = {"preset": base("ddp").model.preset, **size.fields.get("model", {})}
        model = preset(own.pop("preset"), **own)
        also = {"QK-norm": model.qk_norm, "z-loss": model.z_loss}
        rows.append(
            (
                f"`{name}`",
                count(params),
                f"{model.layers} of {model.width}",
                f"{model.mlp}, {model.mlp_width:,}",
                ", ".join(what for what, on in also.items() if on) or "-",
                size.batch,
                f"{tokens // (24 * campaign.period):,}",
                f"{tokens / 1e6:.2f}M",
                f"{tokens / params:.2g}",
                model.compute_dtype,
            )
        )
    heads = ("size", "parameters", "blocks", "MLP", "also", "sequences a step", "tokens a step")
    return table((*heads, "tokens in 24 rounds", "a parameter", "computed in"), rows)


def _arms(evidence: Evidence) -> list[str]:
    campaign = evidence.campaign
    used = {arm for claim in campaign.claims.values() for arm in (claim.here, claim.there)}
    rows = [
        (
            name,
            arm.base["method"]["name"],
            arm.base["inner"]["optimizer"],
            _differs(campaign, arm),
        )
        for name, arm in campaign.arms.items()
        if name in used
    ]
    return table(("name", "method", "inner optimizer", "settings"), rows)


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


def _rates(evidence: Evidence) -> list[str]:
    campaign, ledger, rows = evidence.campaign, evidence.ledger, []
    for size in campaign.sizes:
        for name, arm in campaign.arms.items():
            known = rungs(ledger, name, size)
            if arm.tuned_as != name or not any(cell in ledger.found for cell in known[0]):
                continue
            point = evidence.points.of(name, size)
            tried = {*arm.grid, *(cell.point for of in known for cell in of)}
            best = _settings({name: arm.points[name] for name in tried}, point) if point else ""
            losses = "; ".join(
                ", ".join("-" if (x := ledger.loss(c)) is None else f"{x:.3f}" for c in of)
                for of in known
            )
            ran = [cell for of in known for cell in of if cell in ledger.found]
            spent = f"{len(ran)}, {sum(cell.rounds for cell in ran)}"
            size_of = count(campaign.sizes[size].params)
            rows.append((name, size_of, best or "not settled", spent, losses))
    return table(("method", "size", "rates", "runs, rounds", "loss of the points, by rung"), rows)


def _settings(points: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """The values of a point, each with the grid that it was chosen from."""
    flat = {point: dotted(changes) for point, changes in points.items()}
    shown = []
    for field, value in flat[name].items():
        grid = ", ".join(f"{v:g}" for v in sorted({of[field] for of in flat.values()}))
        which = "inner" if field.startswith("inner.") else "outer"
        shown.append(f"{which} {value:g} (of {grid})")
    return ", ".join(shown)


def _fits(evidence: Evidence) -> str:
    """The fits of the loss, where the records suffice for one."""
    curves = fit.curves(evidence.ledger, evidence.points)
    if not curves:
        return (
            f"The records do not carry a fit yet. It needs {fit.LEAST_SCALES} scales of a method, "
            f"with {fit.LEAST_SIZES} sizes and {fit.LEAST_TOKENS} numbers of tokens, of "
            f"{fit.LEAST_SEEDS} seeds each."
        )
    rows = []
    for (name, regions), found in fit.fit(curves).items():
        params, tokens, error = found.furthest
        ahead = (found.at(n, fit.TOKENS_A_PARAMETER * n) for n in fit.AHEAD.values())
        rows.append(
            (
                name,
                regions,
                len({point[:2] for point in curves[name, regions]}),
                _scale_of(*found.largest),
                ", ".join(f"{value:.3g}" for value in found.terms),
                f"{100 * found.error:.2f} %",
                f"{_scale_of(params, tokens)}: {100 * error:+.1f} %",
                ", ".join(found.undetermined) or "-",
                *(f"{loss:.2f} ({low:.2f} to {high:.2f})" for loss, low, high in ahead),
            )
        )
    heads = ("method", "regions", "scales", "up to", "E, A, a, B, b", "error", "furthest off")
    ahead = (f"extrapolated to {name}" for name in fit.AHEAD)
    least, most = (_scale_of(n, fit.TOKENS_A_PARAMETER * n) for n in fit.AHEAD.values())
    return filled(
        "fit",
        per_parameter=fit.TOKENS_A_PARAMETER,
        least=least,
        most=most,
        low=fit.EXPONENTS[0],
        high=fit.EXPONENTS[1],
        table="\n".join(table((*heads, "not determined", *ahead), rows)),
    )


def _scale_of(params: float, tokens: float) -> str:
    return f"{count(params)}, {short(tokens / 1e6)}M tokens"


def _left(evidence: Evidence) -> str:
    ledger = evidence.ledger
    cores, card = (RunEstimate(ledger, of) for of in ("cpu", "gpu"))
    left: dict[str, list[Cell]] = {}
    for step in ordered(ledger, cores.seconds):
        left.setdefault(step.stage, []).extend(step.runs)
    rows = [
        (
            stage,
            len(cells),
            f"{sum(map(cores.seconds, cells)) / 3600:,.1f}",
            f"{sum(map(card.seconds, cells)) / 3600:,.1f}" if all(map(card.knows, cells)) else "-",
            f"{sum(map(cores.flops, cells)):.1e}",
        )
        for stage, cells in left.items()
    ]
    heads = ("stage", "runs", "core-hours", "or process-hours", "FLOPs")
    told = "\n".join(table(heads, rows))
    again = evidence.command("campaign")
    return filled("left", table=told, campaign=again) if rows else "Nothing."


def _excluded(evidence: Evidence) -> str:
    campaign, ledger = evidence.campaign, evidence.ledger
    rows = [(f"`{entry.file}`", entry.reason) for entry in ledger.excluded]
    for cell, record in ledger.found.items():
        best = evidence.points.of(cell.arm, cell.size)
        if not cell.tunes and cell.point != best:
            path = record_path(campaign, cell, record["config_digest"])
            why = f"at learning rates that {best} has replaced" if best else ""
            file = path.relative_to(campaign.records).as_posix()
            rows.append((f"`{file}`", why or "its rates are being tuned"))
    if not rows:
        return "None: no run failed, and no record was left out."
    return "\n".join(table(("record", "reason"), rows))


def _origin(evidence: Evidence) -> str:
    records = list(evidence.ledger.found.values())
    changed = sum(bool(r["code"]["changed"]) for r in records)
    machines = Counter(
        f"{r['machine']['system']}, {r['machine']['cpus']} cores, {r['machine']['device']}, "
        f"jax {r['versions']['jax']}"
        for r in records
    )
    digests = Counter(f"`{(r['corpus_digest'] or '')[:10]}`" for r in records)
    rows = [
        f"{len(records)} runs, {hours(records)}.",
        f"Commits: {len({r['code']['commit'] for r in records})}. Each record names its own; "
        f"{changed} ran with changed files.",
        f"Machine: {_counted(machines)}.",
        f"Corpus (digest): {_counted(digests)}.",
    ]
    rows += [f"{evidence.campaign.origin}."] if evidence.campaign.origin else []
    return "\n".join(f"- {row}" for row in rows)


def _counted(of: Counter[str]) -> str:
    return ", ".join(f"{what} ({n})" for what, n in sorted(of.items()))
