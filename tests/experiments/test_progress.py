"""What a person sees."""

import importlib
import io
import re
import types

import pytest
from rich.console import Console

from experiments import progress
from experiments.__main__ import COMMANDS, main
from experiments.compare.plan import ERROR, RunSpec
from experiments.compare.progress import Progress, TimeLeft
from experiments.progress import (
    LiveLines,
    Now,
    Work,
    duration,
    open_display,
    size,
    steps_of,
    tracked,
)

NOW = Now(
    step=20,
    steps=300,
    loss=2.34567,
    eval_loss=None,
    tokens_per_second=12345.6,
    bytes_sent=5.95e6,
    seconds_left=None,
)


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_job_says_is_shown_as_it_is(terminal):
    """Names of rich's signs, such as `:b:`, and its markup may stand in addresses and paths."""
    said, stream = "address='a:b:0' of run[/x] is none", io.StringIO()
    with LiveLines(Console(file=stream, force_terminal=terminal, width=80)) as lines:
        lines.print(said)
    assert said in stream.getvalue()


@pytest.mark.parametrize(
    "count,text",
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (5.95e6, "5.95 MB"), (3e15, "3e+03 TB")],
)
def test_size(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    "seconds,text",
    [(59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_lines(terminal):
    stream = io.StringIO()
    display = open_display(Console(file=stream, force_terminal=terminal, width=80), 300, False)
    display.update(NOW)
    later = Now(
        **{**vars(NOW), "step": 40, "eval_loss": 2.5, "eval_step": 30, "seconds_left": 61.0}
    )
    display.update(later)
    display.close()
    shown = stream.getvalue()
    assert "40/300" in shown and "eval 2.500 at step 30" in shown and "1 min 01 s left" in shown
    assert "12,346 tokens/s  5.95 MB sent/region" in shown
    plain = "step 20/300  loss 2.346  12,346 tokens/s  5.95 MB sent/region\n"
    assert (plain in shown) is not terminal


def test_quiet_shows_nothing():
    stream = io.StringIO()
    display = open_display(Console(file=stream), 300, quiet=True)
    display.update(NOW)
    display.close()
    assert stream.getvalue() == ""


def test_help_lists_the_commands_that_exist(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert {"quick", "train", "report", "sample", "export"} <= set(COMMANDS)
    for name, (module, about) in COMMANDS.items():
        assert f"{name:8} {about}" in shown and about
        described = importlib.import_module(f"experiments.{module}").__doc__
        assert described.partition("\n\n")[0].replace("\n", " ") == about
    for name in ("train", "report", "sample", "export", "quick"):
        assert main([name, "--help"]) == 0
        assert "--help" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_of_a_comparison(tmp_path, terminal):
    names = ("here", "elsewhere", "done")
    runs = [RunSpec(name, 0, {"steps": 300}, tmp_path / name) for name in names]
    config = {"keep_checkpoints": True, "parallel": 2}
    comparison = types.SimpleNamespace(config=config, runs=runs, seeds=(0,))
    stream, output = io.StringIO(), tmp_path / "output.txt"
    console = Console(file=stream, force_terminal=terminal, width=100)
    output.write_text("reading\nstep 3/9  loss 1.0\nstep 6/9  lo")
    runs[1].workdir.mkdir()
    (runs[1].workdir / ERROR).write_text("Boom: it broke\n")
    with Progress(comparison, runs[:2], console) as progress:
        progress.display(runs[0]).update(NOW)
        progress.look({output: runs[1]})
        output.write_text("step 9/9  loss 0.5\n")
        progress.look({output: runs[1]})  # too soon after the last look
        if terminal:
            progress._live.refresh()
        progress.ended(runs[1], 61.0)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())  # colours, the cursor
    text = " ".join(text.split())  # a heading may be broken between words
    assert "1 of 3 runs are complete already" in text
    assert "step 20/300" in text and "step 3/9" in text
    assert "step 6/9" not in text and "step 9/9" not in text  # half a line, or not looked at
    assert ("how long it takes is known after the first steps" in text) is terminal
    assert "…" not in text
    assert "[2/3] elsewhere seed 0: failed: Boom: it broke (1 min 01 s" in text
    assert ("0 s so far" in text) is terminal


def test_the_time_left_follows_what_was_measured():
    time = TimeLeft({"a": 100, "b": 100, "c": 50}, parallel=1)
    time.starts("a", 0.0)
    assert time.left(5.0) is None
    time.at("a", 10, 30.0)
    assert time.left(30.0) is None  # what of it was set-up is not known
    time.at("a", 20, 40.0)
    # A second a step, 20 s of set-up: 80 are left here, 120 and 70 of those that wait.
    assert time.pace("a") == 1.0 and time.left(40.0) == pytest.approx(80 + 120 + 70)
    assert time.left(45.0) == pytest.approx(75 + 120 + 70)
    time.ends("a")
    time.starts("b", 120.0)
    assert time.left(125.0) == pytest.approx(115 + 70)
    time.at("b", 10, 150.0)
    time.at("b", 20, 180.0)
    # Its own pace is three seconds: no set-up, and the mean of both for the one that waits.
    assert time.left(180.0) == pytest.approx(3 * 80 + (20 + 0) / 2 + 2 * 50)
    assert TimeLeft({"a": 10}, 1).left(0.0) is None


def test_runs_side_by_side_share_the_time():
    time = TimeLeft({"a": 10, "b": 10}, parallel=2)
    for name in ("a", "b"):
        time.starts(name, 0.0)
        time.at(name, 1, 1.0)
        time.at(name, 2, 2.0)
    assert time.left(2.0) == pytest.approx(8.0)
    time.ends("a")
    assert time.left(2.0) == pytest.approx(8.0)  # the longest one decides


def test_runs_of_so_many_tokens_tell_their_steps():
    time = TimeLeft({"a": None, "b": None}, parallel=1)
    time.starts("a", 0.0)
    time.at("a", 10, 10.0, 40)
    time.at("a", 20, 20.0, 40)
    assert time.left(20.0) == pytest.approx(20 + 40)  # the other one is taken to be as long


def test_a_step_is_read_from_its_line():
    assert steps_of(NOW.line()) == (20, 300)
    assert steps_of("reading the corpus") is None


# -- work that is no run -----------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


def _console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def test_work_without_a_terminal_tells_a_line_every_ten_seconds(clock):
    console = _console()
    with Work("export", 4, console) as work:
        for done, (seconds, now) in enumerate([(0, "a"), (9, "b"), (12, "c"), (21, "d")]):
            clock.seconds = seconds
            work.at(now, done)
        clock.seconds = 36
        work.at("", 4)
    # Two of four parts in 12 s: as long again; then all are done.
    assert console.file.getvalue().splitlines() == [
        "export: 2/4  12 s left  c",
        "export: 4/4  0 s left",
    ]


def test_parts_of_another_kind_begin_anew_and_a_told_time_counts(clock):
    console = _console()
    with Work("data", None, console) as work:
        clock.seconds = 100
        work.at("reads", 50)
        clock.seconds = 120
        work.at("tokenizes", 10, 40)  # when these began is not known before
        clock.seconds = 130
        work.at("tokenizes", 20, 40)
        clock.seconds = 140
        work.at("tokenizes", 30, 40, seconds_left=90)
    assert console.file.getvalue().splitlines() == [
        "data: 50  reads",
        "data: 10/40  tokenizes",
        "data: 20/40  20 s left  tokenizes",
        "data: 30/40  1 min 30 s left  tokenizes",
    ]


def test_tracked_yields_all_and_names_what_comes_next(clock, monkeypatch):
    console = _console()
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    seen = []
    for item in tracked(["x", "y", "z"], "bench", lambda item: item.upper()):
        seen.append(item)
        clock.seconds += 20
    assert seen == ["x", "y", "z"]
    assert console.file.getvalue().splitlines() == [
        "bench: 1/3  40 s left  Y",
        "bench: 2/3  20 s left  Z",
    ]


def test_work_in_a_terminal_is_a_bar_that_goes_and_inner_work_has_its_own(clock):
    console = _console(terminal=True)
    with Work("plan", 10, console) as work:
        clock.seconds = 5
        work.at("H=30", 5)
        with Work("timed", 2, console) as inner:
            inner.at("one", 1)
            assert inner._bars is work._bars
            shown = [task.description for task in work._bars.tasks]
            left = work._bars.tasks[0].fields["left"]
        assert len(work._bars.tasks) == 1
    assert shown == ["plan", "timed"] and left == "5 s left"
    assert work._bars.finished or not work._bars.live.is_started
    assert not Work._open


def test_quiet_work_shows_nothing(clock):
    console = _console()
    with Work("data", None, console, quiet=True) as work:
        clock.seconds = 100
        work.at("reads", 50)
    assert not console.file.getvalue()


def test_stdout_of_a_command_stays_clean(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
    small = ("--config.model=nano", "--config.methods={'diloco': {'preset': 'diloco'}}")
    command = ["plan", "--config=configs/plan/template.py", *small]
    assert main([*command, f"--workdir={tmp_path / 'plan'}"]) == 0
    told = capsys.readouterr()
    assert "plan: settings tried: " in told.err and "left" in told.err
    assert "settings tried: " not in told.out
