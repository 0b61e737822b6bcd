"""The tables of a comparison at 80 columns: no number is cut off or broken, whatever the names."""

import io

import pytest
from rich.console import Console

from experiments.compare.frontier import costs_of
from experiments.compare.frontier import show as show_points
from experiments.compare.show import show


def reached(mean):
    return {"mean": mean, "half": None, "count": 2, "not_reached": 0}


def result(names):
    """What compare.json holds of variants with these names, with long numbers."""
    row = {
        "loss": {"mean": 12.34567, "half": 0.01234, "count": 2, "verdict": "one"},
        "document_interval": None,
        "tokens": 3070,
        "bytes_sent": 98.76e6,
        "compression": 5.446,
        "staleness": 12,
        "runs": {"0": {}, "1": {}},
        "networks": {"lan": {"seconds": 59.44, "utilisation": 0.55, "speedup": 1.234}},
        "to_target": {key: reached(12_345_678.0) for key in ("steps", "tokens", "bytes_sent")}
        | {"seconds_on_lan": reached(3.254)},
    }
    change = {"mean": -12.3456, "half": 0.0123, "verdict": "no evidence of a difference"}
    change |= {"documents_half": None}
    differences = {n: {"loss": change, "steps_to_target": {"mean": None}} for n in names}
    panel = {"title": "", "baseline": names[0], "differences": differences, "other_bytes": {}}
    return {
        "panels": [panel],
        "variants": dict.fromkeys(names, row),
        "seeds": [0, 1],
        "apart": {},
        "baseline": names[0],
        "target": 2.5,
        "target_from": "config",
        "networks": ["lan"],
        "step_seconds": None,
        "failures": [],
    }


def shown(names, width, how=show):
    console = Console(file=io.StringIO(), width=width, markup=False)
    how(result(names), console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("letters", [5, 25, 40, 74, 200])
def test_numbers_are_whole_beside_long_names(letters, width):
    names = ["a" * letters, "b" * letters]
    text = shown(names, width)
    found = set(text.split())
    for number in ("12.3457", "0.0123", "-12.3456", "12345678", "98.8", "3.07k"):
        assert number in found, (number, text)
    for number in ("12.346±0.012", "5.45x", "59.4", "55%", "1.23x", "12.3M", "12.3", "3.25"):
        assert number in found, (number, text)
    assert "…" not in text
    for name in names:  # folded, and whole
        assert text.count(name[0]) >= 3 * letters
    if width == 80:
        assert max(map(len, text.splitlines())) <= 80, text


def test_short_names_stay_on_a_line():
    text = shown(["diloco", "streaming_diloco_often"], 100)
    assert text.count("streaming_diloco_often") == 3


@pytest.mark.parametrize("letters", [5, 60])
def test_points_with_long_values(letters):
    names = ["a" * letters, "b" * letters]
    points = {n: {"corpus": n, "path": n, "file": n, "inner.rate": 0.00031623} for n in names}

    def how(found, console):
        show_points(found, points, costs_of(found), console)

    found = set(shown(names, 80, how).split())
    for number in ("12.3457", "0.0123", "0.00031623", "98.8", "59.4"):
        assert number in found, shown(names, 80, how)
