"""`bench wan`: what it prints, and that the work it times grows about linearly with the regions."""

import io
import sys

import pytest
from rich.console import Console

from experiments.bench import wan


def test_it_prints_the_fitted_exponent_and_the_idle_shares():
    text = io.StringIO()
    console = Console(file=text, width=120)
    result = wan.measure(sizes=(50, 100), rounds=4, repeats=1, console=console)
    assert [row["regions"] for row in result["clock"]] == [50, 100]
    assert all(row["seconds"] > 0 for row in result["clock"] + result["idle"])
    assert f"cost ~ regions ** {result['exponent']['clock']:.2f}" in text.getvalue()
    assert result["together"] < result["step"][0]["microseconds"]
    shares = [(round(r["barrier_idle"], 2), round(r["pair_idle"], 2)) for r in result["shares"]]
    assert shares == [(0.56, 0.28), (0.66, 0.30), (0.72, 0.30)]  # as `nolocosim` says


def test_exponent_of_known_growth():
    rows = [{"regions": n, "seconds": 3e-6 * n**1.3} for n in (10, 30, 70)]
    assert wan.fitted_exponent(rows) == pytest.approx(1.3)


def calls(work) -> int:
    """Count the function calls of some work, Python's and C's."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_simulation_of_pairs_does_work_in_proportion_to_its_regions():
    wan.noloco_seconds(20, 6)  # imports and caches
    rows = [
        {"regions": n, "seconds": calls(lambda n=n: wan.noloco_seconds(n, 6))}
        for n in (60, 120, 240, 480)
    ]
    assert 0.9 < wan.fitted_exponent(rows) < 1.1
