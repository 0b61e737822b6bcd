"""A tiny run from the command line: metrics, report, samples, export, and a second start."""

import csv
import dataclasses
import functools
import inspect
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from rich.console import Console

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.report import main as report_main
from experiments.report.main import table
from experiments.report.runlog import document_interval, read_run, summarise
from experiments.train import compile_cache
from lowcomm_jax.data import tokenizers as tokenizers_of_run
from lowcomm_jax.sync import round_programs

ROOT = Path(__file__).resolve().parents[3]
STEPS, PERIOD, REGIONS = 23, 4, 3


WAY: list[str] = []  # files of the calls that lead to the run's compiled step


@pytest.fixture(scope="module")
def folder(root, tiny):
    first = round_programs.make_inner_program

    def make_inner_program(*arguments):
        program = first(*arguments)

        @functools.wraps(program)
        def traced(*given, **named):  # by the call that compiles it
            if not WAY:
                files = [call.filename for call in reversed(inspect.stack())]
                mine = [Path(file) for file in files if Path(file).is_relative_to(ROOT)]
                WAY.extend(dict.fromkeys(str(file.relative_to(ROOT)) for file in mine))
            return program(*given, **named)

        return traced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_programs, "make_inner_program", make_inner_program)
        assert main(["train", *command(tiny, root)]) == 0
    return root


def command(tiny, root):
    return tiny.arguments(
        root,
        "--config=diloco",
        f"--config.steps={STEPS}",
        f"--config.method.period={PERIOD}",
        "--config.log.every=5",
        "--config.eval.every=10",
        "--config.eval.per_region=True",
        "--config.checkpoint.every=10",
        f"--workdir={root / 'run'}",
        "--config.log.tensorboard=True",
        "--quiet",
    )


@pytest.fixture(scope="module")
def records(folder):
    return read_records(folder / "run" / "metrics.jsonl")


def of(records, kind):
    return [r for r in records if r["kind"] == kind]


def test_the_way_from_the_command_to_the_compiled_step(folder):
    """As docs/architecture.md has it: at most five files."""
    del folder
    assert [file for file in WAY if not file.startswith("tests/")] == [
        "experiments/__main__.py",
        "experiments/train/main.py",
        "experiments/train/loop.py",
        "lowcomm_jax/engine.py",
        "lowcomm_jax/sync/sync_loop.py",
    ]


def test_the_schema(records):
    header, eval_set = records[0], records[1]
    assert header["kind"] == "header"
    assert header["method"] == "diloco" and header["config"]["method"]["period"] == PERIOD
    assert header["tokens_per_step"] == REGIONS * 2 * 32
    assert header["fragment_bytes"] == [4 * header["trained_params"]]
    assert len(header["data"]["corpus_digest"]) == 64 and "jax" in header["versions"]
    assert len(eval_set["document"]) == len(eval_set["count"]) >= 2
    steps = of(records, "step")
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    for step in steps:
        for name in ("loss", "ce", "accuracy", "grad_norm", "bytes_sent", "bytes_received"):
            assert len(step[name]) == REGIONS and np.isfinite(step[name]).all(), name
        assert step["loss_mean"] == pytest.approx(np.mean(step["loss"]))
        at_boundary = step["step"] % PERIOD == 0
        assert [e["kind"] for e in step["events"]] == (["send", "land"] if at_boundary else [])
        assert (step["disagreement"] or 0) > 0 if at_boundary else step["disagreement"] is None
        assert step["participation"] == (1.0 if at_boundary else None)
    # The last sequence of a shard is short: a few of its places count no token.
    places = STEPS * header["tokens_per_step"]
    assert 0.95 * places < steps[-1]["tokens"] < places
    seconds = [s["seconds"] for s in steps]
    assert seconds == sorted(seconds)
    # Chunks end at log intervals and wherever something else is due.
    assert sum(i["steps"] for i in of(records, "interval")) == STEPS
    assert set(of(records, "interval")[0]["phases"]) == {
        "data",
        "dispatch",
        "wait",
        "eval",
        "checkpoint",
    }


def test_evaluations(records):
    evals = of(records, "eval")
    assert [(e["step"], e["final"]) for e in evals] == [
        (0, False),
        (10, False),
        (20, False),
        (STEPS, True),
    ]
    count = sum(records[1]["count"])
    for e in evals:
        assert len(e["regions"]) == REGIONS
        assert e["anchor"] == pytest.approx(sum(e["document_sum"]) / count, rel=1e-5)
    start, final = evals[0], evals[-1]
    assert start["anchor"] == pytest.approx(np.log(320), abs=0.3)
    assert final["anchor"] < start["anchor"] - 0.5
    # In step 10 the regions have left the anchor; after the last synchronisation all agree.
    assert abs(evals[1]["mean_of_regions"] - evals[1]["anchor"]) > 1e-6
    assert final["regions"] == pytest.approx([final["anchor"]] * REGIONS, rel=1e-6)


def test_the_reports_arithmetic(folder, records):
    summary = summarise(read_run(folder / "run"))
    header, end, final = records[0], of(records, "end")[0], of(records, "eval")[-1]
    rounds = STEPS // PERIOD + 1  # and the last synchronisation
    sent = round(2 * 4 * header["trained_params"] * (REGIONS - 1) / REGIONS)
    assert end["bytes_sent"] == [rounds * sent] * REGIONS
    assert summary.bytes_sent == rounds * sent
    assert header["allreduce_bytes_per_step"] == sent
    assert summary.compression == pytest.approx(STEPS / rounds)
    assert (summary.step, summary.complete) == (STEPS, True)
    assert summary.loss == final["anchor"] and summary.best == min(
        e["anchor"] for e in of(records, "eval")
    )
    assert summary.interval == document_interval(
        np.array(final["document_sum"]), np.array(records[1]["count"])
    )
    assert summary.tokens == of(records, "step")[-1]["tokens"]
    assert summary.staleness == 0 and summary.participation == 1.0
    console = Console(width=80, record=True)
    console.print(table([summary, summary]))
    shown = console.export_text()
    assert f"{summary.loss:.4f} ± {summary.interval:.3f}" in shown
    assert f"{STEPS / rounds:.3g}x" in shown


def test_the_own_network_is_left_out_where_another_clock_is_shown(folder):
    found = dataclasses.replace(summarise(read_run(folder / "run")), virtual_seconds=90.0)
    found = dataclasses.replace(found, utilisation=0.5)
    for own_network in (True, False):
        console = Console(width=80, record=True)
        console.print(table([found], own_network))
        assert ("virtual time" in console.export_text()) is own_network


def test_the_picture_and_the_report_command(folder, capsys):
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    run = str(folder / "run")
    assert main(["report", run, run, f"--png={folder / 'both.png'}"]) == 0
    assert "both.png" in capsys.readouterr().out
    assert (folder / "both.png").stat().st_size > 10_000


def test_the_numbers_for_other_programs(folder, records, capsys):
    table, whole = folder / "out" / "numbers.csv", folder / "out" / "all.json"
    report = ["report", str(folder / "run"), f"--csv={table}", f"--json={whole}"]
    assert main(report) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    losses = [r["loss"] for r in of(records, "step")]
    found = {
        (int(r["step"]), int(r["region"])): float(r["value"])
        for r in rows
        if (r["kind"], r["metric"]) == ("step", "loss")
    }
    assert found == {
        (step, region): loss
        for step, by_region in enumerate(losses, 1)
        for region, loss in enumerate(by_region)
    }
    anchors = [float(r["value"]) for r in rows if (r["kind"], r["metric"]) == ("eval", "anchor")]
    assert anchors == [r["anchor"] for r in of(records, "eval")]
    run = json.loads(whole.read_text())["runs"]["run"]
    assert run["steps"] == of(records, "step") and run["end"] == records[-1]


def test_tensorboard_gets_every_number(folder, records):
    losses = {}
    for event in events_of(folder / "run" / "tensorboard"):
        for value in event.summary.value:
            if value.tag == "step/loss/region1":
                losses[event.step] = value.simple_value
    expected = [r["loss"][1] for r in of(records, "step")]
    assert list(losses) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(losses.values()), expected, rtol=1e-6)


def events_of(folder):
    """The records of an event file: length, its checksum, the event, its checksum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    (file,) = folder.iterdir()
    data, at = file.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        at += length + 16


def test_an_evaluation_is_shown_with_its_step_and_few_documents_are_named(tiny, folder, capsys):
    own = ("workdir", "quiet", "steps=", "every", "per_region", "val_fraction")
    arguments = [a for a in command(tiny, folder) if not any(name in a for name in own)]
    arguments += ["--config.steps=8", "--config.log.every=2", "--config.eval.every=4"]
    arguments += ["--config.data.val_fraction=0.05", f"--workdir={folder / 'shown'}"]
    assert main(["train", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    seen = [(line.split("/")[0], line.partition(" at ")[2].split("  ")[0]) for line in steps]
    assert seen == [(f"step {n}", f"step {0 if n <= 4 else 4}") for n in (2, 4, 6, 8)]
    found = read_run(folder / "shown").header["data"]["validation_documents"]
    assert found < 5
    (line,) = [line for line in lines if "raise data.val_fraction" in line]
    assert line.startswith(f"warning: {found} validation document")


def test_no_interval_is_explained_where_none_is_shown(folder, monkeypatch, capsys):
    arguments = ["report", str(folder / "run"), f"--png={folder / 'none.png'}"]
    assert main(arguments) == 0
    assert "± is a 95 % interval" in capsys.readouterr().out
    alone = dataclasses.replace(summarise(read_run(folder / "run")), interval=None)
    monkeypatch.setattr(report_main, "summarise", lambda run: alone)
    assert main(arguments) == 0
    assert "±" not in capsys.readouterr().out


def test_a_second_start_shows_the_complete_run(tiny, folder, records, capsys):
    assert main(["train", *command(tiny, folder)]) == 0
    assert "is complete" in capsys.readouterr().out
    assert read_records(folder / "run" / "metrics.jsonl") == records


def test_samples_continue_the_prompt(folder, capsys, monkeypatch):
    monkeypatch.setattr(compile_cache, "enable", lambda folder: None)  # not the user's
    run = f"--workdir={folder / 'run'}"
    assert main(["sample", run, "--prompt=regi", "--length=9", "--seed=3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("regi")
    assert main(["sample", run, "--prompt=regi", "--length=9", "--seed=3"]) == 0
    assert capsys.readouterr().out == first
    assert main(["sample", run, "--length=9000"]) == 2
    assert "max_seq_len" in capsys.readouterr().err


def test_an_export_is_complete_and_anyone_may_read_it(folder, capsys):
    out = folder / "handed_on"
    assert main(["export", f"--workdir={folder / 'run'}", f"--output={out}"]) == 0
    capsys.readouterr()
    found = {path.name: path.stat().st_mode for path in out.iterdir()}
    assert found.keys() == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert len(set(found.values())) == 1  # those of any file that is written here
    backend = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "naïve\n\t 数 €\x00\xff <|end|"
    own = tokenizers_of_run.ByteTokenizer()
    assert backend.encode(text).ids == own.encode(text).tolist()
    assert backend.decode(own.encode(text)) == text
    ends = json.loads((out / "generation_config.json").read_text())
    described = json.loads((out / "tokenizer_config.json").read_text())
    assert backend.token_to_id(described["eos_token"]) == ends["eos_token_id"] == own.eos_id
    assert backend.token_to_id(described["pad_token"]) == ends["pad_token_id"] == own.pad_id


def test_an_export_of_an_older_step(folder, capsys):
    arguments = ["export", f"--workdir={folder / 'run'}", f"--output={folder / 'older'}"]
    assert main([*arguments, "--step=20"]) == 0
    assert "step 20 written" in capsys.readouterr().out
    assert main([*arguments, "--step=21"]) == 2
    printed = capsys.readouterr().err
    assert "no checkpoint of step 21" in printed and f"it holds [20, {STEPS}]" in printed


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_patch_makes_the_newer_export_of_the_older_one(dtype, folder, capsys):
    run, out = f"--workdir={folder / 'run'}", folder / f"patched_{dtype}"
    patch, older, newer = out / "20.safetensors", out / "older", out / "newer"
    assert main(["export", run, "--since=20", f"--output={patch}"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"step 20 to {STEPS}: ") and f"{patch.stat().st_size:,} bytes" in told
    assert main(["export", run, "--step=20", f"--dtype={dtype}", f"--output={older}"]) == 0
    assert main(["export", run, "--dtype=bfloat16", f"--output={newer}"]) == 0
    onto = f"--onto={older}"
    assert main(["export", f"--apply={patch}", onto, f"--output={out / 'made'}"]) == 0
    assert "its digest is as written" in capsys.readouterr().out
    for place in ("made", "older"):  # the latter in its own place
        if place == "older":
            assert main(["export", f"--apply={patch}", onto, f"--output={older}"]) == 0
        found = {file.name: file.read_bytes() for file in (out / place).iterdir()}
        assert found == {file.name: file.read_bytes() for file in newer.iterdir()}
    assert main(["export", f"--apply={patch}", onto, f"--output={older}"]) == 2
    assert "made for weights" in capsys.readouterr().err


def test_a_patch_that_cannot_be_written_or_applied(folder, tmp_path, capsys):
    run, out, patch = f"--workdir={folder / 'run'}", f"--output={tmp_path / 'o'}", tmp_path / "p"

    def told(*arguments):
        assert main(["export", *arguments]) == 2
        assert not (tmp_path / "o").exists()
        return capsys.readouterr().err

    assert f"--since={STEPS}: not older than step {STEPS}" in told(run, f"--since={STEPS}", out)
    assert f"it holds [20, {STEPS}]" in told(run, "--since=10", out)
    assert "--dtype has no effect beside --since" in told(run, "--since=20", "--dtype=float32", out)
    assert "--onto is missing" in told(f"--apply={patch}", out)
    both = told(f"--apply={patch}", "--onto=x", run, "--step=20", out)
    assert "--workdir has no effect beside --apply" in both and "--step has no effect" in both
    assert "--onto has no effect without --apply" in told(run, "--onto=x", out)
    assert f"--apply={patch}: there is no such file" in told(f"--apply={patch}", "--onto=x", out)
    patch.write_bytes(b"no patch")
    onto = [f"--onto={tmp_path}", out]
    assert "no export lies there that can be read" in told(f"--apply={patch}", *onto)
    assert main(["export", run, f"--output={tmp_path / 'export'}"]) == 0
    onto = [f"--onto={tmp_path / 'export'}", out]
    folder_given = told(run, "--since=20", f"--output={tmp_path}")
    assert "a folder; a patch is one file" in folder_given
    assert "no patch, or a damaged one" in told(f"--apply={patch}", *onto)


def test_a_sample_of_an_older_step(folder, capsys):
    arguments = ["sample", f"--workdir={folder / 'run'}", "--count=20", "--prompt=ab"]
    texts = []
    for step in (["--step=20"], ["--step=20"], []):
        assert main([*arguments, *step]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert main([*arguments, "--step=21"]) == 2
    assert f"it holds [20, {STEPS}]" in capsys.readouterr().err


def test_a_start_from_weights_that_mean_something_else(tiny, folder, capsys):
    """Of the same shapes: bytes and bpe:300 have a vocabulary of 320, and heads share a width."""
    arguments = [a for a in command(tiny, folder) if "workdir" not in a]
    other = ["--config.data.tokenizer=bpe:300", "--config.model.heads=4"]
    other += ["--config.model.kv_heads=2", "--config.model.head_dim=4"]
    start = f"--config.model.init_from={folder / 'run'}"
    capsys.readouterr()
    assert main(["train", *arguments, *other, start, f"--workdir={folder / 'else'}"]) == 2
    told = capsys.readouterr().err
    assert "trained another model" in told and "tokenizer has other tokens" in told


def test_export_and_start_from_it(tiny, folder, capsys):
    out = folder / "exported"
    assert main(["export", f"--workdir={folder / 'run'}", f"--output={out}"]) == 0
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 16
    final = of(read_records(folder / "run" / "metrics.jsonl"), "eval")[-1]["anchor"]
    for start in (out, folder / "run"):
        arguments = [a for a in command(tiny, folder) if "workdir" not in a and "steps" not in a]
        again = folder / f"from_{start.name}"
        extra = [f"--config.model.init_from={start}", "--config.steps=1", f"--workdir={again}"]
        extra.append("--config.inner.warmup_steps=0")
        assert main(["train", *arguments, *extra]) == 0
        started = of(read_records(again / "metrics.jsonl"), "eval")[0]["anchor"]
        assert started == pytest.approx(final, rel=1e-5)
    capsys.readouterr()
