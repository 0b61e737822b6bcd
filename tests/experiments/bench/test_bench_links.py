"""Jobs over links of a given rate, and what the virtual clock foretells of them."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from experiments.__main__ import main
from experiments.bench import links, netem, wan

NBYTES, STEP, CONSTANT = 1_000_000, 0.02, 0.05


def log_of(periods):
    """A run of two regions that exchange at the end of every period and wait for it."""
    steps = []
    for step in range(1, periods * links.PERIOD + 1):
        event = {
            "step": step,
            "fragment": 0,
            "key": f"0@{step}",
            "participants": [True, True],
            "nbytes": NBYTES,
            "bytes_sent": [NBYTES] * 2,
            "bytes_received": [NBYTES] * 2,
            "route": "all_gather",
            "groups": None,
        }
        ends = step % links.PERIOD == 0
        events = [{**event, "kind": kind} for kind in ("send", "land")] if ends else []
        steps.append({"step": step, "events": events})
    return SimpleNamespace(steps=steps, header={"regions": 2, "tokens_per_step": 1})


def test_the_clock_foretells_steps_bytes_and_what_an_exchange_costs_beside_them():
    periods = links.WARM_UP + 3
    travel = NBYTES / (100e6 / 8 * netem.GOODPUT) + CONSTANT
    whole = links.PERIOD * STEP + travel
    trained = links.TrainedOverLink(
        log=log_of(periods),
        period_S=np.array([whole, 2 * whole, whole]),
        travel_N=np.full(3, travel),
        waited_S=np.full(3, travel),
    )
    row = links.row("diloco", 100.0, trained, STEP, CONSTANT)
    assert row.foretold == pytest.approx(whole, rel=1e-6)
    assert (row.measured, row.error) == (whole, pytest.approx(0, abs=1e-6))
    assert row.exposed == 1 and shown(row) == "cannot be"


@pytest.mark.parametrize(
    ("waited", "longest", "expected"),
    [(0.012, 0.49, "yes"), (0.3, 0.49, "NO"), (0.3, 0.6, "cannot be")],
)
def test_what_tau_steps_outlast_must_be_hidden(waited, longest, expected):
    """Two exchanges in ten take `longest`, tau steps 0.5 s."""
    travel_N = np.array([0.1, *[0.3] * 7, longest, longest])
    trained = links.TrainedOverLink(
        log=log_of(links.WARM_UP + 3),
        period_S=np.ones(3),
        travel_N=travel_N,
        waited_S=np.array([waited, 0, 0]),
    )
    row = links.row("cocodc", 100.0, trained, 0.5 / links.TAU, CONSTANT)
    assert row.exposed == pytest.approx(waited / travel_N.sum())
    assert (row.travel, row.travel_p90) == (pytest.approx(0.3), pytest.approx(longest))
    assert shown(row) == expected


def shown(row):
    """The last cell of the table."""
    return next(iter(links.table([row]).columns[-1].cells))


def test_the_machine_is_taken_to_drift_evenly_between_the_runs_without_a_limit(monkeypatch):
    ran = []

    def train(method, rate, periods, batch):
        ran.append(rate)
        slower, limit = len(ran), 0 if rate is None else 1  # slower with every run
        return SimpleNamespace(
            period_S=np.full(3, 0.1 * slower + 0.5 + limit),
            waited_S=np.full(3, 0.5),
            travel_N=np.full(3, 0.03 * slower + limit),
        )

    monkeypatch.setattr(links, "train", train)
    monkeypatch.setattr(links, "row", lambda method, rate, trained, *costs: costs)
    found = links.rows(["diloco"], [25.0, 100.0], 3, 4, Console(quiet=True))
    assert list(found) == [pytest.approx((0.02, 0.06)), pytest.approx((0.04, 0.12))]
    assert ran == [None, 25.0, None, 100.0, None]


def test_where_no_link_can_be_made_it_is_said(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(wan, "measure", lambda **_: None)
    assert main(["bench", "wan"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "real links are left out" in shown and "token buckets need root" in shown


def test_what_cannot_be_measured_is_refused_at_once(capsys):
    flags = ["--rates=0,x", "--methods=diloco,pigeons", "--periods=0", "more"]
    assert main(["bench", "wan", *flags]) == 2
    shown = capsys.readouterr().err
    for part in ("--rates=0,x", "'pigeons'", "--periods=0", "'more'"):
        assert part in shown


@pytest.mark.slow
@pytest.mark.skipif(bool(netem.problems()), reason="; ".join(netem.problems()))
def test_two_jobs_train_over_a_link(monkeypatch):
    small = {**links._MODEL, "layers": 2, "width": 32, "head_dim": 8}
    monkeypatch.setattr(links, "_MODEL", small)
    [row] = links.rows(["streaming_diloco"], [50.0], 3, 4, Console(quiet=True))
    assert row.measured > 0 and row.travel > 0 and row.foretold > 0 and 0 <= row.exposed <= 1
