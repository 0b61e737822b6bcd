"""`report --network`: a finished run replayed on a network, checked by hand."""

import io
from dataclasses import replace
from unittest.mock import MagicMock

import made_runs
import numpy as np
import pytest
from rich.console import Console

from experiments.__main__ import main as command
from experiments.cli import RefusedError
from experiments.report.costs import costs
from experiments.report.main import virtual_table
from experiments.report.runlog import RunLog
from experiments.report.virtual import Links, check, on_network, seconds_at
from lowcomm_jax.network import Jitter, parse, uniform

R, PARAMS, STEP = 3, 1000, 0.25


def run(period=4, steps=12):
    """A run that sends its whole model, blocking, every `period` steps."""
    rows = []
    for t in range(1, steps + 1):
        events = []
        if t % period == 0:
            send = made_runs.event("send", t, R, nbytes=4 * PARAMS)
            events = [send, made_runs.event("land", t, R, nbytes=0, route="")]
        rows.append({"step": t, "events": events})
    header = made_runs.header(R, tokens_per_step=96)
    return RunLog("run", header, rows, [], [], np.zeros(1), None)


def network(sync_seconds):
    """Equal links on which exchanging the whole model takes `sync_seconds`."""
    bits_per_link = 8 * 2 / R * 4 * PARAMS
    return uniform(R, bits_per_link / sync_seconds / 1e9, delay_s=0.0, compute_s=1.0)


def test_hours_utilisation_and_allreduce_by_hand():
    virtual = on_network(run(), Links(network(2.0), STEP))
    assert virtual.clock.wall_s == pytest.approx(12 * STEP + 3 * 2.0)
    assert virtual.clock.utilisation == pytest.approx(12 * STEP / (12 * STEP + 3 * 2.0))
    assert virtual.allreduce_s == pytest.approx(12 * (STEP + 2.0))
    assert not virtual.uneven


@pytest.mark.parametrize("pace, each", [(None, 0.125), ("network", 1.0), (STEP, STEP)])
def test_terminal_page_figures_and_comparisons_have_one_clock(pace, each, monkeypatch):
    """None: this run's machine; the network's own; a number."""
    monkeypatch.setattr("experiments.report.virtual._own_step_seconds", lambda run: 0.125)
    monkeypatch.setattr("experiments.report.costs.summarise", lambda run: MagicMock())
    terminal = on_network(run(), Links(network(2.0), pace))
    assert terminal.step_seconds == each
    assert terminal.clock.wall_s == pytest.approx(12 * each + 3 * 2.0)
    page = costs(run(), {"n": Links(network(2.0), pace)})["networks"]["n"]
    assert page["seconds"] == terminal.clock.wall_s
    assert page["allreduce_seconds"] == terminal.allreduce_s
    (figure,) = seconds_at(run(), Links(network(2.0), pace), [12])
    assert figure == terminal.clock.wall_s


def test_the_seconds_of_a_file_count_where_none_are_given(tmp_path):
    links = "regions: 3\nbandwidth_gbps: 1\n"
    (tmp_path / "mine.yaml").write_text(links + "compute_s: [0.5, 0.5, 0.8]\n")
    (tmp_path / "links.yaml").write_text(links)
    mine, bare = parse(str(tmp_path / "mine.yaml")), parse(str(tmp_path / "links.yaml"))
    paces = [[Links.paced(x, pace).step_seconds for pace in (None, STEP)] for x in (mine, bare)]
    assert paces == [["network", STEP], [None, STEP]]
    assert Links.paced(parse("us_4_regions"), None).step_seconds is None
    assert on_network(run(), Links.paced(mine, None)).step_seconds == 0.5


def test_short_times_are_not_rounded_to_seconds():
    virtual = on_network(run(), Links(network(0.001), 0.0011))
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(virtual_table(["run"], [virtual]))
    shown = console.export_text()
    assert f"{virtual.clock.wall_s:.3g} s" in shown and f"{virtual.allreduce_s:.3g} s" in shown
    assert " 0 s" not in shown


def test_seconds_of_a_step_need_a_network(tmp_path, capsys):
    for value in ("0.5", "-1"):
        assert command(["report", str(tmp_path), f"--step_seconds={value}"]) == 2
        assert "--step_seconds needs --network" in capsys.readouterr().err
    assert command(["report", "--step_seconds=0.5"]) == 2
    said = capsys.readouterr().err
    assert "which runs?" in said and "--step_seconds needs --network" in said
    for pace in ("-1.0", "nan", "inf"):
        assert command(["report", "x", "--network=lan", f"--step_seconds={pace}"]) == 2
        assert f"--step_seconds={pace}: must be positive" in capsys.readouterr().err


def test_runs_whose_paces_differ_much_are_named():
    """As a run of one log interval, whose pace counts compilation, beside a longer one."""
    fast, slow = (replace(run(), name=name) for name in ("long", "short"))
    for one, speed in ((fast, 320.0), (slow, 32.0)):
        for row in one.steps:
            row |= {"tokens_per_second": speed, "tokens": 96 * row["step"], "bytes_sent": [0]}
            row |= {"participation": None}
    measured = Links(network(2.0), None)
    said = measured.paces_apart([fast, slow])
    assert said.startswith("steps took 1 s in short and 0.1 s in long")
    assert "give --step_seconds" in said
    for pace in ("network", STEP):
        assert Links(network(2.0), pace).paces_apart([fast, slow]) is None
    assert measured.paces_apart([fast]) is None and measured.paces_apart([fast, fast]) is None


def test_slower_regions_stay_slower():
    steady = network(2.0)
    uneven = steady.with_compute([1.0, 1.0, 3.0])
    virtual = on_network(run(), Links(uneven, STEP))
    assert virtual.clock.compute_R == pytest.approx([12 * STEP, 12 * STEP, 36 * STEP])
    # The baseline waits for the slowest region at every step, too.
    assert virtual.allreduce_s == pytest.approx(12 * (3 * STEP + 2.0))


def test_the_baseline_meets_the_same_jitter():
    """DDP replayed is its own baseline, whatever the network does."""
    noisy = replace(
        network(2.0),
        compute_jitter=Jitter("lognormal", 0.4),
        transfer_jitter=Jitter("lognormal", 0.6),
        first_use_s=0.7,
    )
    virtual = on_network(run(period=1), Links(noisy, STEP))
    assert virtual.clock.wall_s == pytest.approx(virtual.allreduce_s, rel=1e-12)


@pytest.mark.parametrize("here, speed", [([0, 1, 2], 48.0), ([0, 2], 32.0), ([1], 16.0)])
def test_the_pace_of_regions_that_are_jobs(here, speed, monkeypatch):
    """16 tokens a second each, 32 tokens a step: 2 s, whoever's logs are there."""
    one = run()
    one.header["here"] = here
    for row in one.steps:
        row |= {"present": [True] * R} if len(here) > 1 else {}
    summary = MagicMock(tokens_per_second=speed)
    monkeypatch.setattr("experiments.report.virtual.summarise", lambda run: summary)
    assert on_network(one, Links(network(2.0), None)).step_seconds == pytest.approx(2.0)


def test_uneven_regions_compute_only_their_own_steps():
    slow = run()
    for row in slow.steps:
        row["active"] = [True, True, row["step"] % 2 == 0]
    virtual = on_network(slow, Links(network(2.0), STEP))
    assert virtual.uneven
    assert virtual.clock.compute_R == pytest.approx([12 * STEP, 12 * STEP, 6 * STEP])


def test_everything_that_does_not_fit_is_refused_together():
    with pytest.raises(RefusedError) as error:
        check([run(), run(steps=0)], "us_4_regions", None)
    text = str(error.value)
    assert "run has 3 regions, network us_4_regions has 4" in text
    assert "or give the file 3 regions" in text
    assert "has made no step yet" in text
    with pytest.raises(RefusedError, match="us_4_region"):
        check([run()], "us_4_region", None)
