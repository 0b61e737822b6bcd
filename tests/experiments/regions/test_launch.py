"""Jobs of a run on one machine: the launcher, what it shows, and the merged report."""

import json
import shutil
import signal
from types import SimpleNamespace

import pytest
import yaml
from launched import entered, reached, start
from rich.console import Console

from experiments.__main__ import main
from experiments.config import base, plain
from experiments.faults.happened import FILE, Happened, Settings, parsed
from experiments.faults.rendezvous_cut import cut_all
from experiments.regions import main as launch
from experiments.report.runlog import read_run, summarise
from experiments.train.assemble import run_id
from experiments.workdir import METRICS

STEPS = 24


def command(tiny, root, *more):
    return [
        "launch",
        "--config=diloco",
        *tiny.arguments(root),
        "--config.regions=2",
        "--config.method.period=6",
        f"--config.steps={STEPS}",
        "--config.log.every=6",
        *more,
    ]


def test_two_jobs_end_with_the_loss_of_one_process(tiny, root, capfd):
    workdir = root / "a%20b #?|100%"  # not one of these characters stands so in a url
    assert main(command(tiny, root, f"--workdir={workdir}", "--config.eval.every=12")) == 0
    assert any((workdir / launch.RENDEZVOUS).iterdir()) and not (root / "a b #?|100%").exists()
    shown = capfd.readouterr().out
    assert "region 1" in shown and f"step {STEPS}/{STEPS}" in shown
    alone = ["train", *command(tiny, root)[1:], "--config.eval.every=12", "--quiet"]
    assert main([*alone, f"--workdir={root / 'alone'}"]) == 0
    jobs, one = summarise(read_run(workdir)), summarise(read_run(root / "alone"))
    assert jobs.complete and jobs.loss == one.loss and jobs.tokens == one.tokens
    assert jobs.bytes_sent == one.bytes_sent  # of two regions, two-shot and all-gather are alike
    run, whole = read_run(workdir), read_run(root / "alone")
    assert [step["loss"] for step in run.steps] == [step["loss"] for step in whole.steps]
    sends = [e for step in run.steps for e in step["events"] if e["kind"] == "send"]
    assert all(event["participants"] == [True, True] for event in sends)
    body = yaml.safe_load((workdir / FILE).read_text())
    settings = Settings(2, STEPS, "diloco", 6, 0)
    assert parsed(body, "", settings) == (Happened(settings, {}, {}, {}, ()), [])


def test_refused_before_any_job_starts(tiny, root, capsys):
    arguments = command(
        tiny, root, f"--workdir={root / 'none'}", "--config.method.name=eager_diloco"
    )
    assert main([*arguments, "--exchange=pigeons"]) == 2
    shown = capsys.readouterr().err
    assert "pigeons" in shown and not (root / "none").exists()


def test_a_backslash_is_refused(tiny, root, capsys):
    """TensorStore would write to another folder."""
    folder = root / "a\\b"
    assert main(command(tiny, root, f"--workdir={folder}")) == 2
    assert f"--workdir={folder}/region0: no backslash" in capsys.readouterr().err
    assert not folder.exists() and not (root / "a").exists()


def test_ports_that_all_regions_would_take_are_refused(tiny, root, capsys):
    given = ["--config.address=127.0.0.1:7000", "--config.listen=0.0.0.0:7001"]
    assert main(command(tiny, root, f"--workdir={root / 'none'}", *given)) == 2
    shown = capsys.readouterr().err
    for name in ("address=127.0.0.1:7000", "listen=0.0.0.0:7001"):
        assert f"{name}: all regions run on this machine" in shown
    assert not (root / "none").exists()


def test_addresses_are_no_part_of_what_a_run_is():
    def identity(**changes):
        config = base("diloco", period=6)
        with config.unlocked():
            config.update(changes)
        return run_id(plain(config), "texts")

    there = {"address": "public:17000", "listen": "0.0.0.0:7000"}
    assert identity(**there) == identity() != identity(seed=1)


def launched_in_vain(tiny, root, monkeypatch, name, act=lambda jobs: 0):
    """Exit code of a launcher whose jobs are not started: `act` does in their place what they do,
    and returns the code of the run."""
    monkeypatch.setattr(launch, "run", lambda jobs, console, injector: act(jobs))
    return main(command(tiny, root, f"--workdir={root / name}"))


def test_a_rendezvous_that_was_left_away_is_brought_back(tiny, root, monkeypatch, capsys):
    folder = root / "away" / launch.RENDEZVOUS
    folder.mkdir(parents=True)
    (folder / "run").write_text("its record")
    cut_all(folder)
    assert launched_in_vain(tiny, root, monkeypatch, "away") == 0
    assert (folder / "run").read_text() == "its record"
    cut_all(folder)
    folder.unlink()  # it was killed before the file stood there
    assert launched_in_vain(tiny, root, monkeypatch, "away") == 0
    assert (folder / "run").is_file()
    cut_all(folder)
    folder.unlink()
    folder.mkdir()
    assert launched_in_vain(tiny, root, monkeypatch, "away") == 2
    assert "there are both" in capsys.readouterr().err


@pytest.mark.parametrize("code, ends", [(0, 1), (1, 1), (75, 75)])
def test_what_cannot_be_told_replaces_no_exit_code(tiny, root, monkeypatch, capsys, code, ends):
    name = f"untold-{code}"

    def ran_and_lost_its_landings(jobs):
        for job in jobs:
            job.workdir.mkdir(parents=True)
            (job.workdir / METRICS).write_text('{"kind":"header"}\n')
        (root / name / FILE).write_text("of an earlier start")
        return code

    assert launched_in_vain(tiny, root, monkeypatch, name, ran_and_lost_its_landings) == ends
    shown = capsys.readouterr().out
    assert f"{FILE} cannot be written" in shown and "region0/landings.jsonl is missing" in shown
    assert not (root / name / FILE).exists()


def test_of_a_run_that_was_refused_nothing_is_told(tiny, root, monkeypatch, capsys):
    assert launched_in_vain(tiny, root, monkeypatch, "refused", lambda jobs: 1) == 1
    assert capsys.readouterr().out == "" and not (root / "refused" / FILE).exists()


def test_a_launcher_that_fails_leaves_no_fault_on():
    ended = []

    def act(over):
        raise OSError("no space left")

    job = SimpleNamespace(code=None, held=False, processes=[], start=lambda: None)
    injector = SimpleNamespace(act=act, end_all=lambda: ended.append(True))
    with pytest.raises(OSError, match="no space left"):
        launch.run([job], Console(quiet=True), injector)
    assert ended == [True]


@pytest.mark.slow
def test_an_interrupted_run_continues_as_if_it_had_never_stopped(tiny, root):
    """Over the store or between peers: the numbers of one that was never stopped, between peers."""
    more = ["--config.steps=1200", "--config.log.every=5", "--config.inner.warmup_steps=3"]

    def started(name, exchange):
        given = [a for a in command(tiny, root, *more) if a != "--config=diloco"]
        given += [f"--exchange={exchange}", f"--workdir={root / name}"]
        return start(*given, "--config=streaming_diloco")

    def runs(name):
        return [read_run(root / name / f"region{region}") for region in range(2)]

    def ended(name, exchange):
        launcher = started(name, exchange)
        shown = launcher.communicate(timeout=300)[0]
        assert launcher.returncode == 0, shown
        return runs(name)

    whole = ended("whole", "peers")
    for exchange in ("store", "peers"):
        stopped = f"stopped-{exchange}"
        launcher = started(stopped, exchange)
        reached(launcher, root / stopped / "region0", 30)
        launcher.send_signal(signal.SIGTERM)
        shown = launcher.communicate(timeout=120)[0]
        assert launcher.returncode == 75, shown
        steps = [run.steps[-1]["step"] for run in runs(stopped)]
        assert 30 <= steps[0] == steps[1] < 1200
        for one, other in zip(ended(stopped, exchange), whole):
            assert [s["loss"] for s in one.steps] == [s["loss"] for s in other.steps]
            assert one.evals[-1]["anchor"] == other.evals[-1]["anchor"]


@pytest.mark.slow
def test_a_region_that_has_lost_its_newest_checkpoint_comes_in_late(tiny, root):
    steps, workdir = 1200, root / "behind"
    arguments = command(tiny, root, f"--workdir={workdir}", f"--config.steps={steps}")
    arguments += ["--config.log.every=10", "--config.checkpoint.every=30"]
    launcher = start(*arguments)
    reached(launcher, workdir / "region1", 70)
    launcher.send_signal(signal.SIGTERM)
    shown = launcher.communicate(timeout=120)[0]
    assert launcher.returncode == 75, shown
    newest = max((workdir / "region1" / "checkpoints").iterdir(), key=lambda x: int(x.name))
    shutil.rmtree(newest)
    again = start(*arguments)
    shown = again.communicate(timeout=300)[0]
    assert again.returncode == 0, shown
    # The launcher shows the newest line of a region, and perhaps not this one.
    assert entered((workdir / "region1" / "output.txt").read_text()) is not None
    ends = [read_run(workdir / f"region{r}") for r in range(2)]
    assert [end.end["step"] for end in ends] == [steps, steps]
    assert ends[0].evals[-1]["anchor"] == ends[1].evals[-1]["anchor"]


@pytest.mark.parametrize(("records", "restarts"), [([], 1), ([{"kind": "end"}], 2)])
def test_who_is_complete_and_was_not_counted_is_not_started_again(tmp_path, records, restarts):
    """Its job would only say so again."""
    (tmp_path / METRICS).write_text("".join(json.dumps(one) + "\n" for one in records))
    job = SimpleNamespace(name="region 0", says="", workdir=tmp_path, restarts=2, code=None)
    job.start, told = (lambda: None), []
    launch._ended(job, 1, SimpleNamespace(print=told.append))
    assert job.restarts == restarts and job.code == (1 if records else None) and told
