"""`plan --goodput` end to end: a fleet, and refusals."""

import collections
import importlib
import io
import json

import pytest
from rich.console import Console

from experiments.__main__ import main as run_command
from experiments.plan.goodput import answer
from lowcomm_jax.planner import goodput_simulation
from lowcomm_jax.planner.goodput import METHODS
from lowcomm_jax.planner.goodput_simulation import INTERRUPTS, INTERRUPTS_WAITING


@pytest.fixture
def few(monkeypatch):
    """A short simulation, where figures do not matter."""
    monkeypatch.setattr(goodput_simulation, "FLEETS", 8)


@pytest.fixture
def operations(monkeypatch):
    """How often each operation on all fleets was done: all that takes long in a simulation."""
    counts = collections.Counter()

    def count(owner, name):
        act = getattr(owner, name)

        def counted(*given):
            counts[name] += 1
            return act(*given)

        monkeypatch.setattr(owner, name, counted)

    count(goodput_simulation, "simulate")
    count(goodput_simulation._Jobs, "next_event")
    count(goodput_simulation._TrainingClock, "next_stop")
    return counts


def run(name, folder, **changes):
    config = importlib.import_module(f"configs.plan.{name}").get_config().to_dict()
    text = io.StringIO()
    result = answer(config | changes, folder, Console(file=text, width=80))
    return result, text.getvalue()


def test_a_fleet_of_ones_own_is_answered_in_a_screen(tmp_path, operations):
    result, text = run("goodput", tmp_path, region_mtbf_hours="99,99,40")
    assert len(text.splitlines()) < 24
    # An operation an interrupt, and a round where regions wait for one another and one has stopped;
    # one a round whatever happens would be 50,000.
    assert operations["simulate"] == len(METHODS)
    assert operations["next_event"] < 2 * INTERRUPTS * len(METHODS), operations
    assert operations["next_stop"] < 20 * INTERRUPTS_WAITING, operations
    assert "…" not in text
    assert [row["method"] for row in result["rows"]] == list(METHODS)
    for row in result["rows"]:
        assert sum(row["lost"].values()) + row["goodput"] == pytest.approx(1.0)
        assert METHODS[row["method"]].title in text
    assert "an interrupt of a region every 99 h, 40 h, of all every 22.1 h" in text
    assert "24 spare ones" in text and "19.7 s (fitted" in text and "DP 600 s\n" in text
    by_name = {row["method"]: row for row in result["rows"]}
    lost = (1 - by_name["dp"]["goodput"]) * (3 * 512 + 24)
    assert f"{lost:,.1f}" in text and f"{lost * 24 * 2.5:,.0f}" in text


def test_the_command_runs_and_takes_overrides(tmp_path, capsys, few):
    given = ["--config.regions=64,32", f"--workdir={tmp_path}"]
    assert run_command(["plan", "--goodput", *given]) == 0
    assert "64 + 32 chips" in capsys.readouterr().out
    assert json.loads((tmp_path / "goodput.json").read_text())["fields"]["regions"] == [64, 32]


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (
            ["--config=configs/plan/template.py"],
            "is not for plan --goodput (it has no chip_mtbf_hours)",
        ),
        (["--config=configs/diloco.py"], "is not for plan --goodput (it has no chip_mtbf_hours)"),
        (["--config.regions=()"], "regions is empty: give the chips of each"),
        (["--config.chip_mtbf_hours=1,2,x"], "chip_mtbf_hours is '1,2,x': give one number, or 3"),
        (["--config.region_mtbf_hours=-4"], "region_mtbf_hours is -4.0: use a number above 0"),
        (["--config.period=0"], "period is 0: use a number above 0"),
        (["--config.overlap=50"], "overlap_s is 100: use at most 25"),
        (["--config.overhead=1.5", "--config.stop_s=-1"], "- overhead is 1.5"),
        (["--config.chps=4"], "there is no such field"),
        (["extra"], "unexpected argument 'extra'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(given, fix, capsys):
    assert run_command(["plan", "--goodput", *given]) == 2
    assert fix in capsys.readouterr().err


def test_a_config_with_a_field_too_few_or_too_many_is_refused(tmp_path):
    config = importlib.import_module("configs.plan.goodput").get_config().to_dict()
    del config["seed"]
    with pytest.raises(ValueError, match="'seed' is missing: give it"):
        answer(config | {"spares": 2}, tmp_path, Console(file=io.StringIO()))
