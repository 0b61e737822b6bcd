"""The frame of the HTML report: style, script, sections and the sortable table."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

# Line colours, light and dark; the eighth is followed by the first again.
RUNS = ("#1d5fd1", "#d9480f", "#12843f", "#8e2fb8", "#8a6d00", "#d6256f", "#0a8199", "#5a616c")
_DARK = ("#6ea8ff", "#ff9259", "#52d07c", "#cf8bf3", "#e3c341", "#ff7fb0", "#4fcfe6", "#b9bfc9")
INK, DIM, GRID = "#1b1d21", "#5b616b", "#e8eaee"  # light

_STYLE = """
:root{color-scheme:light dark;--bg:#f7f7f8;--card:#fff;--ink:%(ink)s;--dim:%(dim)s;--edge:#dfe2e7;
--grid:%(grid)s;%(light)s}
@media(prefers-color-scheme:dark){:root{--bg:#121418;--card:#1b1e24;--ink:#e9ebef;--dim:#a2a9b5;
--edge:#333943;--grid:#2a2f38;%(dark)s}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--edge);border-radius:8px}
tbody tr:last-child>*{border-bottom:0}
figure{margin:0;padding:10px 12px;background:var(--card);border:1px solid var(--edge);
border-radius:8px}
svg *{stroke-linejoin:round}
main{max-width:1320px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.6rem;line-height:1.25;margin:.2em 0}h2{font-size:1.15rem;margin:1.8em 0 .6em}
p{margin:.4em 0}.dim,.note,.none{color:var(--dim);font-size:.875rem}
.legend{position:sticky;top:0;z-index:2;display:flex;flex-wrap:wrap;gap:6px;padding:8px 0;
background:var(--bg)}
.legend button{font:inherit;font-size:.875rem;color:var(--ink);background:var(--card);
border:1px solid var(--edge);border-radius:999px;padding:3px 12px;cursor:pointer}
.legend button::before{content:"";display:inline-block;width:.7em;height:.7em;margin-right:.5em;
border-radius:50%%;background:var(--c)}
.legend button[aria-pressed=false]{opacity:.45;text-decoration:line-through}
table{border-collapse:collapse;width:max-content;min-width:100%%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:8px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--edge)}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
thead th{vertical-align:bottom;white-space:normal;font-weight:600;padding:0;min-width:5.6em}
thead button{font:inherit;color:inherit;background:none;border:0;padding:8px 12px;cursor:pointer;
width:100%%;text-align:inherit}
th[aria-sort=ascending] button::after{content:" \\25B2"}
th[aria-sort=descending] button::after{content:" \\25BC"}
tbody th{font-weight:600}tbody th::before{content:"";display:inline-block;width:.7em;height:.7em;
margin-right:.5em;border-radius:50%%;background:var(--c)}
tbody th.plain::before{display:none}
.grid2{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%%,380px),1fr));
align-items:start}
figcaption{font-weight:600;font-size:.95rem;margin-bottom:4px}
svg{display:block;width:100%%;height:auto}
.off{display:none}
%(classes)s
@media(max-width:640px){.legend{position:static}th,td,thead button{padding:7px 8px}}
@media print{.legend{position:static}}
"""

_SCRIPT = """
"use strict";
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    for (const part of document.querySelectorAll("[data-run]")) {
      if (part.dataset.run === button.dataset.name) part.classList.toggle("off", !on);
    }
  });
}
for (const table of document.querySelectorAll("table")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value;
      const compare = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const numbers = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -numbers : numbers;
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(compare));
    });
  });
}
"""


def page(title: str, intro: str, names: Mapping[str, int], sections: Sequence[str]) -> str:
    """The whole page; everything it needs is inside.

    Args:
      intro: HTML below the title.
      names: what the legend lists -> number of its colour.
      sections: HTML.
    """
    buttons = "".join(
        f'<button class="s{number % 8}" type="button" aria-pressed="true" '
        f'data-name="{html.escape(name)}">{html.escape(name)}</button>'
        for name, number in names.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{_style()}</style></head><body><main>"
        f"<h1>{html.escape(title)}</h1>{intro}"
        f'<nav class="legend" aria-label="runs shown">{buttons}</nav>'
        f"{''.join(sections)}</main><script>{_SCRIPT}</script></body></html>\n"
    )


def section(heading: str, figures: Sequence[str], note: str = "") -> str:
    """A heading, a sentence, and cards side by side where there is room."""
    note = f'<p class="dim">{html.escape(note)}</p>' if note else ""
    return f'<h2>{html.escape(heading)}</h2>{note}<div class="grid2">{"".join(figures)}</div>'


def table(
    headings: Sequence[str],
    rows: Mapping[str, Sequence[tuple[str, float | None]]],
    colour: Mapping[str, int] | None = None,
    first: str = "run",
) -> str:
    """A table that sorts when a heading is clicked.

    Args:
      headings: of all columns but the first, the names.
      rows: name -> (text, number it sorts by) of every cell; None sorts last.
      colour: name -> number of its colour, shown beside it; None = the names have none.
      first: heading of the names.
    """
    head = "".join(
        f'<th scope="col"><button type="button">{html.escape(h)}</button></th>'
        for h in (first, *headings)
    )
    body = ""
    for name, cells in rows.items():
        label = html.escape(name)
        mark = "plain" if colour is None else f"s{colour[name] % 8}"
        body += f'<tr><th scope="row" class="{mark}" data-value="{label}">{label}</th>'
        body += "".join(
            f'<td data-value="{"" if value is None else repr(float(value))}">'
            f"{html.escape(shown)}</td>"
            for shown, value in cells
        )
        body += "</tr>"
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def css_colours() -> dict[str, str]:
    """Colour of the light page -> the CSS variable that it is, for pictures drawn in the former."""
    runs = {ink: f"var(--s{i})" for i, ink in enumerate(RUNS)}
    return {**runs, INK: "var(--ink)", DIM: "var(--dim)", GRID: "var(--grid)"}


def _style() -> str:
    """The CSS; its variables are --bg, --card, --ink, --dim, --edge, --grid, --s0 ...

    Light and dark follow the reader's own setting.
    """
    light, dark = (";".join(f"--s{i}:{c}" for i, c in enumerate(runs)) for runs in (RUNS, _DARK))
    classes = "".join(f".s{i}{{--c:var(--s{i})}}" for i in range(len(RUNS)))
    colours = {"ink": INK, "dim": DIM, "grid": GRID, "light": light, "dark": dark}
    return _STYLE % {**colours, "classes": classes}
