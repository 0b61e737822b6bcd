"""The page by itself: its numbers, its independence of the network, and a browser that opens it."""

import dataclasses
import html.parser
import json
import math
import re
import shutil
import subprocess

import made_runs
import matplotlib.figure
import numpy as np
import pytest

from experiments.cli import RefusedError
from experiments.report import html_report
from experiments.report import main as report
from experiments.report.html_data import Curve, Plotted, bytes_at, staleness, utilisation_curves
from experiments.report.html_plots import ChartAxis, line_chart, locator
from experiments.report.runlog import RunLog
from experiments.report.virtual import Links
from lowcomm_jax.network import uniform

R, PARAMS, TOKENS = 3, 1000, 96
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


def event(kind, t, fragment, sent, late=0):
    nbytes, route = (sent, "two_shot") if kind == "send" else (0, "")
    more = {"fragment": fragment, "key": f"{fragment}@{t - late}", "staleness": [late] * R}
    return made_runs.event(kind, t, R, nbytes=nbytes, route=route, **more)


def run(period, late, steps=24, seed=0):
    """A run that sends one of two fragments every `period` steps and lands it `late` later."""
    rows, evals, sent = [], [], 0
    for t in range(1, steps + 1):
        number = t // period
        events = []
        if t % period == 0:
            events.append(event("send", t, number % 2, 2 * PARAMS))
            sent += 2 * PARAMS
        if t > late and (t - late) % period == 0:
            events.append(event("land", t, (t - late) // period % 2, 0, late))
        fields = {"bytes_sent": [sent] * R, "disagreement": 1 / t if events else None}
        fields["events"] = events[::-1] if late else events  # what came first lands first
        rows.append(made_runs.step(t, R, tokens=TOKENS * t, tokens_per_second=1e3, **fields))
    for t in (0, 8, 16, steps):
        loss = 5 / (1 + t / 4) + 0.1 * period + seed
        found = {"step": t, "tokens": TOKENS * t, "final": t == steps}
        found |= dict.fromkeys(("anchor", "mean_of_regions"), loss)
        evals.append(found | {"document_sum": [loss * 3 + 0.1, loss * 5 - 0.1]})
    header = made_runs.header(
        R,
        method="made up <&>",
        steps=steps,
        tokens_per_step=TOKENS,
        allreduce_bytes_per_step=16 * PARAMS // 3,
        data={"corpus": "python"},
    )
    end = {"step": steps, "tokens": TOKENS * steps, "bytes_sent": [sent + 7] * R, "seconds": 1.0}
    return RunLog("seed0", header, rows, evals, [], np.array([3, 5]), end)


LONG = "the seeds of a method with a long name"
NETWORK = dataclasses.replace(
    uniform(R, 0.001, delay_s=0.01, compute_s=0.25),
    regions=("a", "a region of a long name, too", "c"),
)
LINKS = Links(NETWORK, 0.25)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    entries = [
        Plotted("often", (run(3, 2),)),
        Plotted("ten <late>", (run(10, 4),)),
        Plotted(LONG, (run(6, 0), run(6, 0, seed=1))),
    ]
    networks = {"three": LINKS}
    rows = {e.name: html_report.row_of(e.runs[0], networks) for e in entries}
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html_report.document("A & B", ["note <1>"], entries, rows, networks))
    return path


class Parts(html.parser.HTMLParser):
    """Tags, their attributes, and whether every tag is closed where it should be."""

    void = ("meta", "link")

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_whole_and_asks_for_nothing(page):
    text = page.read_text()
    parts = Parts(text)
    assert not parts.open
    for tag, attributes in parts.found:
        for name in ("src", "href", "xlink:href"):
            # Nothing but what is in the page; "#": a part of the same picture.
            assert attributes.get(name, "data:").startswith(("data:", "#")), (tag, attributes)
        for value in attributes.values():
            assert "nan" not in str(value).split(" ") and "inf" not in str(value)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    words = " ".join(parts.words)
    for part in (
        "A & B",
        "note <1>",
        "ten <late>",
        "3 regions",
        "loss against bytes",
        "loss against virtual time on three",
        "utilisation against bandwidth",
    ):
        assert part in words, part
    assert text.count('aria-label="timeline of') == 3


def document(entries):
    rows = {e.name: html_report.row_of(e.runs[0], {}) for e in entries}
    return html_report.document("t", [], entries, rows, {})


def test_the_same_page_twice(page):
    entries = [Plotted("often", (run(3, 2),))]
    assert document(entries) == document(entries)
    assert "no network was named" in document(entries)


def test_the_heading_is_of_all_runs():
    one, other = run(3, 2), run(6, 0, steps=48)
    other.header.update(params=2000, tokens_per_step=192, data={"corpus": "text:b"})
    entries = [Plotted("one", (one,)), Plotted("other", (other,))]
    heading = "3 regions, 1,000/2,000 parameters, corpus python and text:b, "
    heading += "24/48 inner steps of 96/192 tokens"
    assert heading in document(entries)


def test_skipped_steps_are_on_the_page_where_there_are_any():
    well, ill = run(3, 2), run(3, 2)
    for row in (*well.steps, *ill.steps):
        row["skipped"] = [0.0] * R
    for row in ill.steps[4:6]:
        row["skipped"] = [1.0, 0.0, 1.0]
    for names in (("well",), ("well", "ill")):
        entries = [Plotted(n, ({"well": well, "ill": ill}[n],)) for n in names]
        text = document(entries)
        assert ("steps skipped" in text) is ("ill" in names)
    assert '<td data-value="4.0">4</td>' in text and '<td data-value="0.0">0</td>' in text


def test_the_curves_by_hand():
    often = run(3, 2)
    assert bytes_at(often) == [0, 2 * 2 * PARAMS, 5 * 2 * PARAMS, 8 * 2 * PARAMS + 7]
    found = staleness([Plotted("often", (often,)), Plotted("late", (run(10, 4),))])
    assert [(s.name, s.fragment, s.low, s.mean, s.high) for s in found] == [
        ("often", "0", 2, 2.0, 2),
        ("often", "1", 2, 2.0, 2),
        ("late", "0", 4, 4.0, 4),
        ("late", "1", 4, 4.0, 4),
    ]
    blocking = run(6, 0)
    (curve,) = utilisation_curves([Plotted("b", (blocking,))], LINKS)
    for gbps, share in zip(curve.x, curve.y):
        # Two-shot: two passes, in each a third of the payload over every link, and the delay.
        one = 2 * (2 * PARAMS / R / (gbps * 1e9 / 8) + 0.01)
        assert share == pytest.approx(24 * 0.25 / (24 * 0.25 + 4 * one), rel=1e-6)
    assert curve.x[0] == pytest.approx(1e-5) and curve.x[-1] == pytest.approx(1e-2)


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_curves_are_drawn_where_a_loss_is_not_finite(lost, tmp_path):
    """The picture begins at the losses after 3 % of a run; one may not be finite just there."""
    well, ill = (run(3, 2, steps=120) for _ in range(2))
    for t, (row, other) in enumerate(zip(well.steps, ill.steps), 1):
        row["loss"] = other["loss"] = [9 / t, 8 / t, 7 / t]
        row["loss_mean"] = other["loss_mean"] = 8 / t
    ill.steps[3] |= {"loss": [2.0, lost, 1.0], "loss_mean": lost}
    for name, runs in (("both", [well, ill]), ("one", [ill])):
        for one in runs:
            one.header["here"] = range(R)
        report.loss_curves(runs, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_curves_bear_the_numbers_of_their_regions(tmp_path, monkeypatch):
    """Merged logs have a column for every region, and NaN for one whose log is missing."""
    one = run(3, 2)
    one.header["here"] = [0, 2]
    for t, row in enumerate(one.steps, 1):
        row["loss"], row["loss_mean"] = [9 / t, math.nan, 7 / t], math.nan
    drawn = {}

    def keep(figure, path, **_):
        drawn.update({line.get_label(): line.get_ydata()[0] for line in figure.axes[0].lines})

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    report.loss_curves([one], tmp_path / "a.png")
    labels = {label: first for label, first in drawn.items() if "training" in label}
    assert labels == {"region 0, training": 9.0, "region 2, training": 7.0}


def test_points_lie_where_their_numbers_say():
    """x: a logarithm, of which 0 is left out; y: linear; numbers, colour and run beside them."""
    curve = Curve("a <b>", [0.0, 1.0, 10.0, 1000.0], [9.0, 2.0, 4.0, 3.0])
    axes = ChartAxis("x", "{:g}".format, log=True), ChartAxis("y", "{:.1f}".format)
    text = line_chart("c", [curve], *axes, {"a <b>": 9})
    assert text.count('data-run="a &lt;b&gt;"') == 2  # line and points
    points = re.findall(r'<title>(.*?)</title>.*?<use [^>]*x="([\d.]+)" y="([\d.]+)"', text, re.S)
    assert [title for title, _, _ in points] == [
        "a &lt;b&gt;: 2.0, 1",
        "a &lt;b&gt;: 4.0, 10",
        "a &lt;b&gt;: 3.0, 1000",
    ]
    x, y = np.array([point[1:] for point in points], float).T
    assert x[1] > x[0] and (x[2] - x[0]) / (x[1] - x[0]) == pytest.approx(3.0, abs=1e-4)
    assert y[1] < y[0] and (y[2] - y[0]) / (y[1] - y[0]) == pytest.approx(0.5, abs=1e-4)
    line = re.search(r'd="M ([\d.]+) ([\d.]+)[^"]*"[^>]*stroke: var\(--s1\)[^>]*', text)
    assert (float(line[1]), float(line[2])) == pytest.approx((x[0], y[0]), abs=1e-3)
    assert "stroke-dasharray" in line[0]  # the colours start over
    same = line_chart("c", [Curve("s", [4.0, 4.0], [1.0, 1.0])], *axes, {"s": 0})
    assert same.count("<use") >= 2 and "nan" not in same
    assert "no run has this" in line_chart("c", [Curve("s", [0.0], [1.0])], *axes, {"s": 0})


def test_names_of_runs_that_share_one(tmp_path):
    folders = [tmp_path / "a" / "seed0", tmp_path / "b" / "seed0"]
    assert report.unlike_names(folders) == ["a", "b"]
    more = [*folders, tmp_path / "b" / "seed1"]
    assert report.unlike_names(more) == ["a/seed0", "b/seed0", "b/seed1"]
    assert report.unlike_names(folders[:1]) == ["seed0"]
    with pytest.raises(RefusedError, match="named twice"):
        report.unlike_names(folders[:1] * 2)


DRIVER = """
<script>
window.addEventListener("load", async () => {
  const column = (n) => [...document.querySelectorAll("tbody tr")].map(r => r.cells[n].textContent);
  const heads = [...document.querySelectorAll("thead button")];
  const out = {asWritten: column(0)};
  heads[1].click(); out.up = column(1);
  heads[1].click(); out.down = column(1);
  heads[0].click(); out.names = column(0);
  out.sorted = [...document.querySelectorAll("thead th")].map(h => h.getAttribute("aria-sort"));
  const pictures = [...document.querySelectorAll("svg")];
  out.empty = pictures.filter(p => p.getBBox().width < 50 || p.getBBox().height < 20).length;
  out.pictures = pictures.length;
  const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top + 3
      || b.bottom <= a.top + 3;  // boxes are higher than letters
  out.labels = [];
  for (const picture of pictures) {
    const whole = picture.getBoundingClientRect();
    const words = [...picture.querySelectorAll("text")];
    const boxes = words.map((word) => word.getBoundingClientRect());
    boxes.forEach((box, i) => {
      const said = words[i].textContent;
      if (box.left < whole.left || box.right > whole.right || box.top < whole.top
          || box.bottom > whole.bottom) out.labels.push(`clipped: ${said}`);
      for (let j = 0; j < i; j++) {
        if (!apart(box, boxes[j])) out.labels.push(`${said} on ${words[j].textContent}`);
      }
    });
  }
  const part = () => getComputedStyle(document.querySelector("svg [data-run=often]")).display;
  const button = document.querySelector(".legend button");
  button.click(); out.hidden = part(); button.click(); out.back = part();
  out.broken = [...document.images].filter(i => !i.complete || !i.naturalWidth).length;
  out.wide = document.documentElement.scrollWidth - window.innerWidth;
  out.background = getComputedStyle(document.body).backgroundColor;
  const said = document.createElement("pre");
  said.id = "said"; said.textContent = JSON.stringify(out); document.body.append(said);
});
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the page is not opened")
@pytest.mark.parametrize("size,dark", [("1366,900", False), ("500,844", True)])
def test_a_browser_opens_it(page, tmp_path, size, dark):
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</body>", f"{DRIVER}</body>"))
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={size}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--enable-logging=stderr",
        "--virtual-time-budget=2000",
        "--dump-dom",
        copy.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert done.returncode == 0 and not console, console
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    found = json.loads(html.unescape(said.group(1)))
    assert found["asWritten"] == ["often", "ten <late>", LONG]
    losses = [float(text.split("±")[0]) for text in found["up"]]
    assert losses == sorted(losses) and len(set(losses)) == 3
    assert found["down"] == found["up"][::-1]
    assert found["names"] == ["often", "ten <late>", LONG]
    assert found["sorted"][0] == "ascending" and not any(found["sorted"][1:])
    # Loss three times, utilisation, three timelines, staleness, disagreement.
    assert (found["pictures"], found["empty"], found["broken"]) == (9, 0, 0)
    assert found["labels"] == []
    assert (found["hidden"], found["back"]) == ("none", "inline")
    assert found["wide"] <= 0  # nothing sticks out sideways
    dark_page = sum(map(int, re.findall(r"\d+", found["background"])[:3])) < 200
    assert dark_page == dark


@pytest.mark.parametrize(
    "low, high", [(3.3, 4.6), (2.8, 12.9), (0.011, 0.018), (1, 2), (0.5, 5e6), (90, 110)]
)
def test_an_axis_has_several_ticks(low, high):
    ticks = locator(True, low, high).tick_values(low, high)
    seen = [tick for tick in ticks if low * 0.99 <= tick <= high * 1.01]
    assert 3 <= len(seen) <= 12 and seen == sorted(set(seen))
