"""Cells and digests, the ledger, successive halving, the order, the budget, shards, and one run."""

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from campaign_cases import checked, config, put, record, two_steps
from rich.console import Console

from evidence.campaign import run as command
from evidence.campaign import tuning
from evidence.campaign.cells import Cell, digest_of, fields_of, record_path
from evidence.campaign.config import arm, claim, stage, variant
from evidence.campaign.config import size as sized
from evidence.campaign.config import tuning as halving
from evidence.campaign.estimate import RunEstimate
from evidence.campaign.ledger import LARGEST_BYTES, Records, read, write
from evidence.campaign.order import UNKNOWN, ordered, runnable
from evidence.campaign.plan import plan, widened
from evidence.campaign.run import train_cell
from experiments import progress
from experiments.cli import RefusedError, load_config
from experiments.compare.vary import parse_axis
from experiments.train.loop import StuckError
from experiments.workdir import occupied
from lowcomm_jax.checkpoint import Checkpoints


def cell(**changes):
    fields = {
        "size": "small",
        "arm": "diloco",
        "rounds": 4,
        "regions": 2,
        "split": "iid",
        "seed": 1,
        "point": "learning_rate=0_2",
    }
    return Cell(**{**fields, **changes})


def test_the_config_of_a_cell(tmp_path):
    campaign = checked(tmp_path)
    fields = fields_of(campaign, cell(regions=4, split="topic"))
    assert fields["steps"] == 8 and fields["method"]["period"] == 2
    assert fields["regions"] == 4 and fields["batch"] == 2  # 8 sequences of all regions
    assert fields["seed"] == 1 and fields["data"]["sharding"] == "topic"
    assert fields["data"]["seq_len"] == 8 and fields["eval"]["every"] == 4
    assert fields["method"]["outer"] | {"learning_rate": 0.2} == fields["method"]["outer"]
    assert fields_of(campaign, cell(tunes=True))["eval"]["every"] == 0
    assert (
        "period" not in fields_of(campaign, cell(arm="ddp", point="learning_rate=1e-3"))["method"]
    )


def test_a_digest_is_of_what_decides_numbers(tmp_path):
    fields = fields_of(checked(tmp_path), cell())
    places = {**fields, "data": {**fields["data"], "cache_dir": "/elsewhere"}, "log": {"every": 9}}
    assert digest_of(dict(reversed(places.items()))) == digest_of(fields)
    assert digest_of({**fields, "seed": 2}) != digest_of(fields)
    texts = [{**fields, "data": {**fields["data"], "corpus": f"text:/{x}"}} for x in "ab"]
    assert digest_of(texts[0]) == digest_of(texts[1]) != digest_of(fields)


def test_a_record_is_written_and_read(tmp_path):
    campaign = checked(tmp_path)
    made = record(campaign, cell(), 2.5)
    path = write(campaign, cell(), made)
    assert path == record_path(campaign, cell(), made["config_digest"])
    assert json.loads(path.read_text()) == made
    assert "[0, 0, 0, 0.0, 6.0]," in path.read_text()  # a row a line
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    ledger = read(campaign)
    assert ledger.loss(cell()) == 2.5 and ledger.done(cell()) and not ledger.excluded
    with pytest.raises(ValueError, match="evaluate less often"):
        write(campaign, cell(), {**made, "curve": [[1.0] * 5] * (LARGEST_BYTES // 20)})


def test_what_does_not_count_has_its_reason(tmp_path):
    campaign = checked(tmp_path)
    kept = [record(campaign, cell(seed=s), 2.0 + s) for s in range(2)]
    others = {
        "made with another config": record(campaign, cell(), 2.5, config_digest="0" * 64),
        "trained on another corpus": record(campaign, cell(seed=2), 2.5, corpus_digest="e"),
        "it diverged": record(campaign, cell(seed=3), None),
    }
    for reason, field, value in (
        ("at learning rates that the campaign does not try", "point", "learning_rate=9"),
        ("the campaign no longer has this cell", "arm", "gone"),
    ):
        others[reason] = record(campaign, cell(), 2.5)
        others[reason]["cell"][field] = value
    ledger = Records(campaign, [("f", r) for r in (*kept, *others.values())])
    assert {entry.reason for entry in ledger.excluded} == set(others)
    assert set(ledger.found) == {cell(seed=0), cell(seed=1)}
    assert ledger.loss(cell(seed=3)) == math.inf and ledger.loss(cell(seed=9)) is None


def test_a_broken_record_is_refused_by_name(tmp_path):
    campaign = checked(tmp_path)
    campaign.records.mkdir()
    (campaign.records / "half.json").write_text("{")
    (campaign.records / "old.json").write_text('{"version": 0}')
    with pytest.raises(RefusedError) as refused:
        read(campaign)
    assert "half.json" in str(refused.value) and "version 0" in str(refused.value)


# -- learning rates --------------------------------------------------------------------------------


def test_halving_keeps_the_best_of_each_rung(tmp_path):
    campaign = checked(tmp_path)
    ledger, low, high = Records(campaign), "learning_rate=0_2", "learning_rate=0_5"
    first = tuning.missing(ledger, "diloco", "small")
    assert {(c.point, c.seed, c.rounds) for c in first} == {
        (point, seed, 2) for point in (low, high) for seed in (100, 101)
    }
    assert all(c.tunes for c in first)
    assert len(tuning.left(ledger, "diloco", "small")) == 6
    # The mean over seeds decides: 2.0 and 4.0 against 2.9 and 2.9.
    loss = {(low, 100): 2.0, (low, 101): 4.0, (high, 100): 2.9, (high, 101): 2.9}
    put(ledger, first, lambda c: loss[c.point, c.seed])
    second = tuning.missing(ledger, "diloco", "small")
    assert {(c.point, c.rounds) for c in second} == {(high, 4)} and len(second) == 2
    assert tuning.settled(ledger, "diloco", "small") is None
    put(ledger, second, lambda c: 2.7)
    assert tuning.settled(ledger, "diloco", "small") == high
    assert tuning.settled(ledger, "diloco", "large") is None  # a size of its own


def test_points_next_to_the_best_are_tried_beyond_the_grid(tmp_path):
    """On both axes; no point twice, and no more often than the campaign says."""
    over = ("inner.learning_rate=2e-3,5e-3", "method.outer.learning_rate=0.2,0.5")
    alone = ("inner.learning_rate=1e-3,2e-3,5e-3,1e-2",)
    changes = {"arms": {"diloco": arm("diloco", over), "ddp": arm("ddp", alone)}}
    changes["claims"] = {"equal": claim("It is as good", "0", "diloco", "ddp", 0.01, "a gap")}
    rungs = {"rungs": ((2, 4), (4, 2)), "seeds": (100,)}
    campaign = checked(tmp_path, **changes, tuning=halving(**rungs, widen=2))
    ledger = Records(campaign)

    def loss(cell):
        inner, outer = (float(x.split("=")[1].replace("_", ".")) for x in cell.point.split("+"))
        return 2.0 + abs(np.log(inner / 1e-3)) + abs(np.log(outer / best_outer))

    best_outer, ran = 0.5, []
    while cells := tuning.missing(ledger, "diloco", "small"):
        ran.append([c.point.replace("learning_rate=", "") for c in cells])
        put(ledger, cells, loss)
    assert len(ran[0]) == 4 and ran[1] == ["inner_2e-3+outer_0_5", "inner_2e-3+outer_0_2"]
    assert ran[2] == ["inner_1e-3+outer_0_5", "inner_2e-3+outer_1_0"]
    assert ran[3] == ["inner_5e-4+outer_0_5", "inner_1e-3+outer_0_2", "inner_1e-3+outer_1_0"]
    assert len(ran) == 4
    found = tuning.settled(ledger, "diloco", "small")
    assert found == "inner_learning_rate=1e-3+outer_learning_rate=0_5"
    ledger, best_outer = Records(campaign), 9.0
    while cells := tuning.missing(ledger, "diloco", "small"):
        put(ledger, cells, loss)
    found = tuning.settled(ledger, "diloco", "small")
    assert found == "inner_learning_rate=1e-3+outer_learning_rate=1_0", "after two times"
    narrow = checked(tmp_path, **changes, tuning=halving(**rungs))
    assert len(narrow.arms["diloco"].points) == 4
    ledger = Records(narrow)
    while cells := tuning.missing(ledger, "diloco", "small"):
        put(ledger, cells, loss)
    assert tuning.settled(ledger, "diloco", "small").startswith("inner_learning_rate=2e-3+")


@pytest.mark.parametrize(
    ("text", "times", "expected"),
    [
        ("x=2e-3,5e-3", 1, "x=1e-3,2e-3,5e-3,0.01"),
        ("x=1.2e-2,1e-3", 2, "x=2e-4,5e-4,1e-3,1.2e-2,0.02,0.05"),
        ("x=0.5,1.0", 1, "x=0.2,0.5,1.0,2.0"),
        ("x=3", 2, "x=1.0,2.0,3,5.0,10.0"),
    ],
)
def test_values_beyond_are_the_next_of_a_ladder(text, times, expected):
    assert widened(parse_axis(text), times) == expected


def test_only_numbers_above_0_can_be_widened(tmp_path):
    for over in ("method.outer.name=nesterov,sgd", "method.outer.learning_rate=0.0,0.5"):
        arms = {**config(tmp_path)["arms"].to_dict(), "diloco": arm("diloco", (over,))}
        with pytest.raises(RefusedError, match=r"diloco: tuning\.widen=1 is for numbers above"):
            checked(tmp_path, arms=arms, tuning=halving(rungs=((2, 2),), widen=1))


def test_a_failed_run_never_wins(tmp_path):
    campaign = checked(tmp_path)
    ledger = Records(campaign)
    put(
        ledger,
        tuning.missing(ledger, "diloco", "small"),
        lambda c: None if (c.point, c.seed) == ("learning_rate=0_2", 100) else 3.0,
    )
    rest = tuning.missing(ledger, "diloco", "small")
    assert {c.point for c in rest} == {"learning_rate=0_5"}
    put(ledger, rest, lambda c: None)
    with pytest.raises(ValueError, match="widen the grid"):
        tuning.settled(ledger, "diloco", "small")
    # What rests on that arm is left out; everything else goes on.
    steps = list(ordered(ledger, lambda c: 1.0))
    assert not [step for step in steps if step.rung.size == "small"] and steps


# -- variants --------------------------------------------------------------------------------------


def with_variants(root, **arms):
    small = config(root).arms.to_dict()
    mine = {"often": variant("diloco", method={"period": 1}), **arms}
    claims = {"often": claim("More is better", "0000.00003", "often", "diloco", 0.0, "a gap")}
    return config(root, arms=small | mine, claims=claims)


def test_a_variant_trains_at_the_rates_of_its_arm(tmp_path):
    campaign = plan(with_variants(tmp_path))
    one, other = (fields_of(campaign, cell(arm=name)) for name in ("often", "diloco"))
    assert one["method"].pop("period") == 1 and other["method"].pop("period") == 2
    assert one == other  # steps, too: tokens are equal
    step = next(ordered(Records(campaign), lambda c: 1.0))
    assert {c.arm for c in step.tunes} == {"diloco"} and len(step.tunes) == 6
    assert {c.arm for c in step.cells} == {"often", "diloco"}
    ledger = Records(campaign)
    while cells := tuning.missing(ledger, "often", "small"):
        put(ledger, cells, lambda c: 2.0 if c.point.endswith("0_5") else 3.0)
    assert all(c.tunes and c.arm == "diloco" for c in ledger.found)
    assert {c.point for c in next(ordered(ledger, lambda c: 1.0)).cells} == {"learning_rate=0_5"}


def test_what_is_wrong_with_a_variant(tmp_path):
    bad = {
        "of_nobody": variant("dilco"),
        "of_a_variant": variant("often"),
        "tuned": variant("diloco", method={"outer": {"learning_rate": 0.1, "momentum": 0.5}}),
    }
    with pytest.raises(RefusedError) as refused:
        plan(with_variants(tmp_path, **bad))
    text = str(refused.value)
    assert "arms.of_nobody: of: 'dilco' is unknown; did you mean diloco?" in text
    assert "arms.of_a_variant: of: 'often' is unknown" in text
    assert "arms.tuned: method.outer.learning_rate is tuned for diloco" in text
    assert "momentum" not in text
    claims = {"x": claim("", "", "diloco", "ddp", 0.0, "", measure="variance")}
    with pytest.raises(RefusedError, match="'variance' is unknown"):
        checked(tmp_path, claims=claims)


# -- order, budget, shards -------------------------------------------------------------------------


def tuned(campaign):
    ledger = Records(campaign)
    for name in campaign.arms:
        for size in campaign.sizes:
            while cells := tuning.missing(ledger, name, size):
                put(ledger, cells, lambda c: 3.0)
    return ledger


def test_the_cheapest_verdict_is_first_and_shared_cells_run_once(tmp_path):
    campaign = checked(tmp_path)
    seconds = lambda c: c.rounds * (10.0 if c.arm == "ddp" else 1.0)  # noqa: E731
    steps = list(ordered(tuned(campaign), seconds))
    assert [(s.stage, s.claim, s.rung.rounds, s.rung.regions) for s in steps] == [
        ("1", "better", 4, 2),  # 3 seeds x 2 arms x 4
        ("1", "better", 8, 2),  # 48; `equal` at 4 rounds costs 3 x 40, DiLoCo being there
        ("1", "equal", 4, 2),
        ("1", "equal", 8, 2),
        ("2", "better", 4, 2),
        ("2", "better", 4, 4),
        ("2", "equal", 4, 2),
        ("2", "equal", 4, 4),
    ]
    assert [len(step.cells) for step in steps] == [6, 6, 3, 3, 8, 8, 4, 4]
    assert [step.seconds for step in steps[:3]] == [24, 48, 120]
    cells = [c for step in steps for c in step.cells]
    assert len(set(cells)) == len(cells) and not any(step.tunes for step in steps)


def test_rates_are_tuned_before_an_arm_is_reported(tmp_path):
    campaign = checked(tmp_path)
    step = next(ordered(Records(campaign), lambda c: 1.0))
    assert {c.arm for c in step.tunes} == {"diloco", "averaging"} and len(step.tunes) == 12
    assert {c.point for c in step.cells} == {UNKNOWN}
    now = list(runnable(Records(campaign), step))
    assert {(c.tunes, c.rounds) for c in now} == {(True, 2)} and len(now) == 8


def test_the_time_of_runs_corrects_the_estimate(tmp_path):
    campaign = checked(tmp_path)
    estimate = RunEstimate(Records(campaign), "cpu")
    guess = estimate.seconds(cell())
    assert guess == pytest.approx(3.0 + 8 * 8 * 8 * 1e3 * 6 / 2.5e10)  # steps, batch, T, N
    on_gpu = record(campaign, cell(rounds=4), 2.0, core_seconds=1.0)
    on_gpu["machine"] = {**on_gpu["machine"], "backend": "gpu"}
    estimate.learn([on_gpu])
    assert estimate.seconds(cell()) == guess and not estimate.knows(cell())
    estimate.learn([record(campaign, cell(rounds=4), 2.0, core_seconds=20.0)])
    assert estimate.knows(cell(rounds=16))
    assert estimate.seconds(cell(rounds=4)) == pytest.approx(20.0)
    estimate.learn([record(campaign, cell(rounds=8), 2.0, core_seconds=30.0)])
    assert estimate.seconds(cell(rounds=16)) == pytest.approx(50.0)  # 10 s and 2.5 s a round
    assert estimate.seconds(cell(rounds=16, arm="ddp", point="")) == pytest.approx(50.0)


class Fake:
    """Stands for training: notes the cells, and gives every run 100 core-seconds."""

    def __init__(self, monkeypatch, stop_after=None):
        self.cells, self.stop_after = [], stop_after
        monkeypatch.setattr(command, "train_cell", self)
        for check in ("corpus_problems", "start_problems"):  # sizes and records are made up
            monkeypatch.setattr(command, check, lambda *_: [])
        monkeypatch.setattr(command.jax, "clear_caches", lambda: None)

    def __call__(self, campaign, cell, workdir):
        if len(self.cells) == self.stop_after:
            return None
        self.cells.append(cell)
        return record(campaign, cell, 2.0, core_seconds=100.0)


def test_a_campaign_stops_at_its_budget_and_goes_on(tmp_path, monkeypatch, capsys):
    file = tmp_path / "config.py"
    file.write_text(
        "import pathlib\nfrom campaign_cases import config\n"
        f"def get_config():\n    return config(pathlib.Path({str(tmp_path)!r}))\n"
    )
    arguments = [f"--config={file}", "--compile_cache=off", f"--workdir={tmp_path / 'runs'}"]
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
    fake = Fake(monkeypatch)
    assert command.main([*arguments, "--core_hours=0.1"]) == 0  # 360 s: three runs and no fourth
    assert len(fake.cells) == 3 and all(c.tunes for c in fake.cells)
    stopped = Fake(monkeypatch, stop_after=2)
    assert command.main(arguments) == 75 and len(stopped.cells) == 2
    rest = Fake(monkeypatch)
    assert command.main([*arguments, "--only=better", "--until=1"]) == 0
    assert not any(c.size == "large" or c.arm == "ddp" for c in rest.cells)
    assert command.main(arguments) == 0
    everything = fake.cells + stopped.cells + rest.cells
    assert len(set(everything)) == len(everything)
    reported = [c for c in everything if not c.tunes]
    # 3 arms x (2 rungs x 3 seeds at `small`, 2 rungs x 4 seeds at `large`); 3 x 2 x 6 that tune.
    assert len(reported) == 3 * (6 + 8) and len(everything) == len(reported) + 36
    assert command.main([*arguments, "--plan"]) == 0
    told = capsys.readouterr()
    assert "campaign: runs: 0/" in told.err and " left  small " in told.err
    shown = told.out
    assert "42 cells and 36 runs of the tuning" in shown and "0.03 of 0.1 core-hours" in shown


def test_a_signal_in_the_last_steps_of_a_run_ends_the_campaign(tmp_path, monkeypatch):
    class Signalled(Fake):
        def __call__(self, *arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(*arguments)

    fake, campaign = Signalled(monkeypatch), checked(tmp_path)
    quiet = Console(quiet=True)
    assert not command.run(Records(campaign), tmp_path / "runs", quiet)
    assert len(fake.cells) == 1 and set(read(campaign).found) == set(fake.cells)  # it is kept


def test_what_another_process_trains_is_waited_for(tmp_path, monkeypatch):
    campaign, fake = checked(tmp_path), Fake(monkeypatch)
    workdir, theirs, estimate = (
        tmp_path / "runs",
        ExitStack(),
        RunEstimate(Records(campaign), "cpu"),
    )
    held = next(command.to_train(Records(campaign), estimate, math.inf))
    assert command.take([held], Records(campaign), workdir, theirs) == held
    naps = []

    def sleep(seconds):
        naps.append(len(fake.cells))
        write(campaign, held, record(campaign, held, 2.0))
        theirs.close()

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert command.run(Records(campaign), workdir, Console(quiet=True))
    assert held not in fake.cells and set(read(campaign).found) == {held, *fake.cells}
    # It was needed: the other points of its rung had run, and other arms; then it alone was left.
    assert len(naps) == 1 and 0 < naps[0] < len(fake.cells)


def test_records_that_a_newer_campaign_adds_meanwhile_do_not_end_this_one(tmp_path, monkeypatch):
    campaign = checked(tmp_path)
    sizes = config(tmp_path).sizes.to_dict() | {"huge": sized(9e3, 8)}
    newer, theirs = checked(tmp_path, sizes=sizes), cell(size="huge")

    class Joined(Fake):
        def __call__(self, *arguments):
            write(newer, theirs, record(newer, theirs, 2.0))
            return super().__call__(*arguments)

    fake, ledger = Joined(monkeypatch), Records(campaign)
    assert command.run(ledger, tmp_path / "runs", Console(quiet=True), 180)
    assert len(fake.cells) == 1 and set(ledger.found) == set(fake.cells)
    assert [entry.reason for entry in ledger.excluded] == ["the campaign no longer has this cell"]


def test_processes_share_the_runs(tmp_path):
    program = f"""
import pathlib, sys, time
from campaign_cases import checked, record
from evidence.campaign import run as command
from evidence.campaign.ledger import read
from rich.console import Console
here = pathlib.Path({str(tmp_path)!r})
campaign, mine = checked(here), []
def train(campaign, cell, workdir):
    mine.append(f"{{cell.size}} {{cell.arm}} {{cell.name}}")
    time.sleep(0.05)
    return record(campaign, cell, 2.0, core_seconds=0.1)
command.train_cell, command._POLL_SECONDS = train, 0.05
(here / sys.argv[1]).touch()
while not all((here / name).exists() for name in "ab"):
    time.sleep(0.01)
assert command.run(read(campaign), here / "runs", Console(quiet=True))
print(*mine, sep=chr(10))
"""
    folders = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[2])))
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", program, name],
            env={**os.environ, "PYTHONPATH": folders},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    trained = [job.communicate(timeout=120)[0].splitlines() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0] and all(trained)
    assert len(set(trained[0] + trained[1])) == len(trained[0]) + len(trained[1]) == 42 + 36


# -- bad input -------------------------------------------------------------------------------------


def test_every_problem_is_listed_at_once(tmp_path):
    bad = config(
        tmp_path,
        arms={
            "ddp": arm("ddp", ("inner.learning_rate=1e-3,2e-3,3e-3",)),
            "diloco": arm("diloco", ("inner.nothing=1,2",)),
            "no one": arm("nowhere", ()),
        },
        claims={"equal": claim("", "", "dilco", "ddp", 0.0, "")},
        stages={"1": stage(("smal",), (4,), (3,), ("random",), seeds=(0, 100))},
        tuning=halving(rungs=((2, 2), (4, 2)), seeds=(100,)),
    )
    with pytest.raises(RefusedError) as refused:
        plan(bad, only=["equal", "other"], until="9", since="0")
    text = str(refused.value)
    for part in (
        "inner.nothing",
        "nowhere",
        "'dilco' is unknown; did you mean diloco?",
        "'smal' is unknown; did you mean small?",
        "'random' is unknown",
        "a verdict needs at least 3",
        "[100] tune learning rates",
        "points must become fewer",
        "--only: 'other' is unknown",
        "--until: '9' is unknown",
        "--since: '0' is unknown",
    ):
        assert part in text, part


def test_budgets_of_arms_must_be_equal(tmp_path):
    arms = {
        "ddp": arm("ddp", ("inner.learning_rate=1e-3,2e-3,3e-3",)),
        "diloco": arm("diloco", ("inner.learning_rate=1e-3,2e-3",)),
        "averaging": arm("local_sgd", ("inner.learning_rate=1e-3,2e-3",)),
    }
    with pytest.raises(RefusedError, match="cannot run") as refused:
        checked(tmp_path, arms=arms)
    assert "equally many points" in str(refused.value)
    with pytest.raises(RefusedError) as refused:
        command.main(["--core_hours=0", "--config.perod=1"])
    assert "--core_hours=0" in str(refused.value) and "perod" in str(refused.value)


def test_a_campaign_is_narrowed_to_some_stages(tmp_path):
    def stages(**ends):
        campaign = plan(config(tmp_path), **ends)
        return {step.stage for step in ordered(Records(campaign), lambda c: 1.0)}

    assert stages() == {"1", "2"}
    assert stages(since="2") == {"2"} == stages(since="2", until="2")
    assert stages(until="1") == {"1"}
    with pytest.raises(RefusedError, match="comes after"):
        plan(config(tmp_path), since="2", until="1")


def test_the_campaign_of_this_repository_passes_its_checks():
    campaign = plan(load_config(command.DEFAULT, [])[0])
    first = {c for one in campaign.claims.values() for c in one.ladder.get("1_first", {}).items()}
    scales = {(rung.size, rung.rounds, rung.regions) for rung, seeds in first if len(seeds) >= 3}
    assert scales == {(s, r, m) for s in ("180k", "700k") for r in (24, 96) for m in (2, 4)}


# -- a real run ------------------------------------------------------------------------------------


def test_two_steps_leave_a_record(root, tmp_path, monkeypatch):
    campaign = plan(two_steps(root))
    monkeypatch.delattr(Checkpoints, "save")  # what is thrown away at once is not written
    ledger = Records(campaign)
    one = cell(rounds=2, point="learning_rate=0_5")
    made = train_cell(campaign, one, tmp_path)
    ledger.add("f", made)
    assert made["failed"] is None and ledger.loss(one) == made["loss"] > 0
    assert made["steps"] == 2 and made["tokens"] == 2 * 4 * 32
    assert [row[0] for row in made["curve"]] == [0, 1, 2] and made["curve"][-1][4] == made["loss"]
    assert 0 < made["bytes_sent"] == made["curve"][-1][2] <= made["allreduce_bytes"]
    assert made["virtual"]["seconds"] > 2 * campaign.step_seconds
    assert not list(tmp_path.iterdir())  # its folder is gone


def test_an_arm_that_cannot_train_is_refused_before_anything_runs(root, tmp_path):
    """The name of an outer step brings no momentum with it; the other arms are as they were."""
    bad = two_steps(root)
    with bad.unlocked():
        bad.arms.heavy = variant("diloco", method={"outer": {"name": "heavy_ball"}})
        bad.claims.heavier = claim("Heavier", "0000.00002", "heavy", "diloco", 0.0, "later")
    campaign = plan(bad)
    (problem,) = command.start_problems(Records(campaign), tmp_path)
    assert problem.startswith("arms.heavy at sizes.small: ") and "momentum" in problem
    good = plan(two_steps(root))
    assert command.start_problems(Records(good), tmp_path) == []


def test_records_of_another_corpus_are_refused_before_anything_runs(root, tmp_path):
    campaign = plan(two_steps(root))
    one = cell(rounds=2, point="learning_rate=0_5")
    ledger = Records(campaign)
    assert not command.corpus_problems(ledger, tmp_path)  # the first run decides
    ledger.add("f", train_cell(campaign, one, tmp_path))
    assert not command.corpus_problems(ledger, tmp_path)
    ledger.found[one] = {**ledger.found[one], "corpus_digest": "e" * 64}
    (problem,) = command.corpus_problems(ledger, tmp_path)
    assert "eeeeeeeeee in the records" in problem and "--config.records=" in problem
    campaign.common["data"] = campaign.common["data"] | {"corpus": f"text:{tmp_path / 'nothing'}"}
    ledger = Records(campaign, [("f", record(campaign, one, 2.0))])
    with pytest.raises(RefusedError, match="nothing"):
        command.corpus_problems(ledger, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_record_that_does_not_count_ends_the_campaign(tmp_path, monkeypatch):
    """It would be trained again and again."""
    campaign = checked(tmp_path)
    for seed in range(2):
        write(campaign, cell(seed=seed), record(campaign, cell(seed=seed), 2.0))
    Fake(monkeypatch)
    made = record(campaign, cell(), 2.0, corpus_digest="e")

    def train(campaign, one, workdir):
        return {**made, "cell": vars(one), "config_digest": digest_of(fields_of(campaign, one))}

    monkeypatch.setattr(command, "train_cell", train)
    with pytest.raises(RefusedError, match="does not count: trained on another corpus"):
        command.run(read(campaign), tmp_path / "runs", Console(quiet=True))


def test_a_run_that_diverges_leaves_its_reason(root, tmp_path, monkeypatch):
    campaign = plan(two_steps(root))

    def stuck(job, console):
        raise StuckError(20, 20)

    monkeypatch.setattr(command, "train", stuck)
    made = train_cell(campaign, cell(rounds=2), tmp_path)
    assert made["failed"] == str(StuckError(20, 20))
    ledger = Records(campaign)
    ledger.add("f", made)
    assert ledger.done(cell(rounds=2)) and not ledger.found


def test_what_says_nothing_of_the_method_is_no_result(root, tmp_path):
    """A corpus that is gone, or a folder in which another process trains: no record, all kept."""
    campaign = plan(two_steps(root))
    one = cell(rounds=2, point="learning_rate=0_5")
    digest = digest_of(fields_of(campaign, one))
    folder = tmp_path / f"small-diloco-{one.name}-{digest[:10]}"
    with occupied(folder):
        (folder / "mine").write_text("a checkpoint")
        with pytest.raises(RefusedError, match="in use by process"):
            train_cell(campaign, one, tmp_path)
        assert (folder / "mine").is_file()
    campaign.common["data"] = campaign.common["data"] | {"corpus": f"text:{tmp_path / 'nothing'}"}
    with pytest.raises(RefusedError, match="nothing"):
        train_cell(campaign, one, tmp_path / "runs")
