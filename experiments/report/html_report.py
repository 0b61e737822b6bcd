"""The HTML report: one file that opens without a network connection, in light and dark.

Tables sort when a heading is clicked; runs are shown and hidden by the buttons at the top; points
tell their numbers when pointed at.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.progress import size, thousands
from experiments.report import against
from experiments.report.against import Deviation
from experiments.report.columns import brief, columns
from experiments.report.costs import costs, mean_costs
from experiments.report.html_data import (
    Plotted,
    bytes_at,
    exchange_curves,
    exchanges_at,
    loss_curves,
    staleness,
    step_curves,
    tokens_at,
    utilisation_curves,
    virtual_at,
)
from experiments.report.html_page import page, section, table
from experiments.report.html_plots import ChartAxis, line_chart, timeline
from experiments.report.html_plots import staleness as staleness_chart
from experiments.report.runlog import RunLog, adaptive, adapts, mean_batch
from experiments.report.virtual import PICTURE_STEPS, Links, last_steps

_TOKENS = ChartAxis("tokens, all regions", thousands)
_BYTES = ChartAxis("bytes sent per region", size, log=True)
_SECONDS = ChartAxis("virtual time", brief, log=True)
_GBPS = ChartAxis("Gbit/s of the slowest link", lambda v: f"{v:.3g}", log=True)
_SHARE = ChartAxis("utilisation", "{:.0%}".format, low=0.0, high=1.0)
_PLAIN = "{:.3g}".format


def document(
    title: str,
    about: Sequence[str],
    entries: Sequence[Plotted],
    rows: Mapping[str, Mapping[str, Any]],
    networks: Mapping[str, Links],
    plans: Mapping[str, Sequence[Deviation]] | None = None,
) -> str:
    """The report's page.

    Args:
      title: its heading.
      about: sentences below the table.
      entries: the runs or variants that are plotted, in the order of their colours.
      rows: name -> row of the table, as in compare.json's `variants`.
      networks: by name, those that the runs are replayed on.
      plans: name -> how a run compares with its plan; None = with none.
    """
    colour = {entry.name: number for number, entry in enumerate(entries)}
    shown = columns(list(networks), any(row.get("skipped") for row in rows.values()))
    cells = {
        name: [(column.text(row), column.value(row)) for column in shown.values()]
        for name, row in rows.items()
        if name in colour
    }
    headings = [heading.replace("- ", "") for heading in shown]
    notes = "".join(f'<p class="dim">{html.escape(line)}</p>' for line in about)
    sections = [table(headings, cells, colour), notes]
    sections += [_against(name, lines) for name, lines in (plans or {}).items()]
    sections.append(_learning(entries, networks, colour))
    for name, links in networks.items():
        sections.append(_on_network(entries, name, links, colour))
    if not networks:
        text = "no network was named, so there is no virtual time here: give one, --network=lan"
        sections.append(f'<p class="none">{text}</p>')
    sections.append(_inside(entries, colour))
    return page(title, _intro(entries), colour, sections)


def row_of(run: RunLog, networks: Mapping[str, Links]) -> dict[str, Any]:
    """The row of a single run, complete or not."""
    return mean_costs([costs(run, networks)], 1)


def _intro(entries: Sequence[Plotted]) -> str:
    """What the runs are, in a sentence; where they differ, every value."""
    headers = [run.header for entry in entries for run in entry.runs]

    def all_of(name: str) -> str:
        return "/".join(dict.fromkeys(f"{header[name]:,}" for header in headers))

    corpora = " and ".join(dict.fromkeys(str(header["data"]["corpus"]) for header in headers))
    text = (
        f"{all_of('regions')} regions, {all_of('params')} parameters, corpus {corpora}, "
        f"{all_of('steps')} inner steps of {all_of('tokens_per_step')} tokens"
    )
    return f'<p class="dim">{html.escape(text)}</p>'


def _against(name: str, lines: Sequence[Deviation]) -> str:
    """A row a figure of a run's plan, as `report --against` prints them."""
    rows = {
        line.what: list(zip(against.cells(line), (line.planned, line.seen, line.ratio)))
        for line in lines
    }
    heading = html.escape(against.title_of(name))
    verdict = f'<p class="dim">{html.escape(against.verdict(lines))}</p>'
    return f"<h2>{heading}</h2>{verdict}{table(against.HEADINGS, rows, first='figure')}"


def _learning(
    entries: Sequence[Plotted], networks: Mapping[str, Links], colour: Mapping[str, int]
) -> str:
    """Loss against tokens, virtual time on every network, bytes, and exchanges where they vary."""
    loss = _loss_axis(entries)
    against = [("loss against tokens", _TOKENS, tokens_at)]
    for name, links in networks.items():
        against.append((f"loss against virtual time on {name}", _SECONDS, virtual_at(links)))
    against.append(("loss against bytes", _BYTES, bytes_at))
    if any(adapts(entry.runs[0]) for entry in entries):
        exchanged = ChartAxis("exchanges so far", _PLAIN, log=True)
        against.append(("loss against exchanges", exchanged, exchanges_at))
    charts = [
        line_chart(title, loss_curves(entries, x_of), axis, loss, colour)
        for title, axis, x_of in against
    ]
    note = "Evaluation loss of the anchor, in nats per token; the first fall is cut off."
    return section("Loss", charts, note)


def _loss_axis(entries: Sequence[Plotted]) -> ChartAxis:
    """From the lowest loss to the highest after half of the run: the first fall is steep."""
    curves = [c for c in loss_curves(entries, tokens_at) if len(c.x) > 1]
    early = [next(y for x, y in zip(c.x, c.y) if x >= 0.5 * c.x[-1]) for c in curves]
    low = min((min(c.y) for c in curves), default=None)
    return ChartAxis("eval loss", _PLAIN, low=low, high=max(early, default=None))


def _on_network(
    entries: Sequence[Plotted], name: str, links: Links, colour: Mapping[str, int]
) -> str:
    use, network = utilisation_curves(entries, links), links.network
    lanes = [timeline(entry.name, last_steps(entry.runs[0], links)) for entry in entries]
    return section(
        f"On the network {name}",
        [line_chart("utilisation against bandwidth", use, _GBPS, _SHARE, colour), *lanes],
        f"Slowest link {network.slowest_gbps:.3g} Gbit/s, longest delay "
        f"{network.delay_RxR.max() * 1e3:.3g} ms. Utilisation is the share of the time that "
        "regions compute; the curve replays the same events on links faster or slower by one "
        f"factor. Timelines: the last {PICTURE_STEPS} inner steps, each with its own scale.",
    )


def _inside(entries: Sequence[Plotted], colour: Mapping[str, int]) -> str:
    """What the methods did: staleness, disagreement of the regions, ranks."""
    figures = [staleness_chart(staleness(entries), colour)]
    for title, label, value in (
        (
            "disagreement of the regions",
            "distance from their mean",
            lambda row: row["disagreement"],
        ),
        ("codec error", "share of the change not read", _codec_error),
        (
            "measured rank",
            "rank of the mean change",
            lambda row: next((e["rank"] for e in row["events"] if e.get("rank") is not None), None),
        ),
        (
            "batch of a trainer",
            "sequences asked for",
            lambda row: mean_batch(row) if adaptive(row) else None,
        ),
        ("trainers", "trainers of a region", lambda row: len(row.get("trainers", ())) or None),
    ):
        curves = step_curves(entries, value)
        if curves:
            figures.append(line_chart(title, curves, _TOKENS, ChartAxis(label, _PLAIN), colour))
    growth = exchange_curves(entries)
    if growth:
        axis = ChartAxis("exchanges so far", _PLAIN)
        figures.append(line_chart("exchanges against tokens", growth, _TOKENS, axis, colour))
    return section(
        "Inside the methods",
        figures,
        "Disagreement: root mean square distance of the regions' weights from their mean, over "
        "what was sent, at the moment of the send; a codec's error is part of it. Codec error: "
        "||decoded - change|| / ||change||; with error feedback the residual is part of it.",
    )


def _codec_error(row: Mapping[str, Any]) -> float | None:
    """Mean over the regions that sent and what they sent at this step."""
    errors = [
        error
        for event in row["events"]
        for error, took_part in zip(event.get("codec_error", ()), event["participants"])
        if took_part
    ]
    return float(np.mean(errors)) if errors else None
