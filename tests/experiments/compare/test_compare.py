"""A tiny comparison end to end: arithmetic, resuming, a failing variant, a signal."""

import csv
import json
import math
import os
import shutil
import signal

import pytest
from compare_cases import STEPS, compared, config, recording

from experiments.__main__ import main as command
from experiments.cli import RefusedError
from experiments.compare import main as compare
from experiments.compare import runs as compare_runs
from experiments.compare.config import comparison, variant
from experiments.compare.plan import plan
from experiments.metrics import read_records
from experiments.train.loop import TrainingLoop
from lowcomm_jax.interrupt import EXIT_INTERRUPTED


@pytest.fixture(scope="module")
def whole(root):
    return root, *compared(root, root / "whole")


def runs(workdir, name):
    return {s: read_records(workdir / name / f"seed{s}" / "metrics.jsonl") for s in (0, 7)}


def evals(records):
    return [r for r in records if r["kind"] == "eval"]


def test_the_table_against_the_metrics_files(whole):
    root, code, result, shown = whole
    assert code == 0 and not result["failures"]
    finals, sent = {}, {}
    for name in ("often", "seldom"):
        logs = runs(root / "whole", name)
        row = result["variants"][name]
        finals[name] = {s: evals(r)[-1]["anchor"] for s, r in logs.items()}
        sent[name] = sum(sum(r[-1]["bytes_sent"]) / 3 for r in logs.values()) / 2
        a, b = finals[name].values()
        assert a != b  # two seeds, two runs
        assert row["loss"]["mean"] == pytest.approx((a + b) / 2)
        # s = |a - b| / sqrt 2, over sqrt 2; Student's t for 1 degree of freedom
        half = 12.706205 * abs(a - b) / 2
        assert row["loss"]["half"] == pytest.approx(half, rel=1e-6)
        assert row["bytes_sent"] == sent[name]
        assert f"{(a + b) / 2:.4f} ± {half:.4f}" in shown
        curve = row["curve"]
        assert [p["step"] for p in curve] == [0, 4, 8, STEPS]
        network = row["networks"]["aws:Oregon,Virginia,Tokyo"]
        each = [r["networks"]["aws:Oregon,Virginia,Tokyo"] for r in row["runs"].values()]
        assert network["seconds"] == pytest.approx(sum(r["seconds"] for r in each) / 2)
        assert row["staleness"] == 0 and row["document_interval"] is None  # of two seeds
        for i, point in enumerate(curve):
            each = [evals(r)[i]["anchor"] for r in logs.values()]
            assert point["mean"] == pytest.approx(sum(each) / 2)
    assert sent["often"] == 2 * sent["seldom"] > 0  # 4 rounds and 2
    target = max(finals["often"].values())
    assert result["target"] == target and f"{target:.4f}" in shown
    costs = [r["to_target"] for r in result["variants"]["often"]["runs"].values()]
    assert all(cost["steps"] is not None for cost in costs)
    (found,) = result["panels"]
    assert list(found["differences"]) == ["seldom", "often"]
    difference = found["differences"]["seldom"]["loss"]
    by_seed = [finals["seldom"][s] - finals["often"][s] for s in (0, 7)]
    assert list(difference["by_seed"].values()) == pytest.approx(by_seed)
    mean, half = sum(by_seed) / 2, 12.706205 * abs(by_seed[0] - by_seed[1]) / 2
    assert difference["mean"] == pytest.approx(mean)
    assert difference["half"] == pytest.approx(half, rel=1e-6)
    none = "no evidence of a difference"
    assert (difference["verdict"] == none) == (math.fabs(mean) <= difference["half"])
    assert difference["verdict"] in shown
    assert found["other_bytes"] == {"seldom": pytest.approx(-0.5)}
    assert "not at equal bytes: seldom" in shown


def test_finished_runs_are_not_trained_again(whole, monkeypatch, capsys):
    root, _, result, _ = whole
    before = runs(root / "whole", "often")
    monkeypatch.setattr(compare_runs, "train", lambda *_, **__: pytest.fail("trained again"))
    file = root / "config_of_it.py"
    file.write_text(
        "from pathlib import Path\nfrom compare_cases import config\n"
        f"\nget_config = lambda: config(Path({str(root)!r}))\n"
    )
    assert command(["compare", f"--config={file}", f"--workdir={root / 'whole'}"]) == 0
    assert "4 of 4 runs are complete already" in capsys.readouterr().out
    assert json.loads((root / "whole" / "compare.json").read_text()) == result
    assert runs(root / "whole", "often") == before


def test_a_config_with_infinity_is_written(whole):
    root, *_ = whole
    code, result, _ = compared(root, root / "whole", target=math.inf)
    assert code == 0 and result["config"]["target"] is None


def without_seconds(value):
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if k != "seconds"}
    return [without_seconds(v) for v in value] if isinstance(value, list) else value


def without(root, name, *left_out):
    """A copy of the whole comparison in which some runs have not been made."""
    shutil.copytree(root / "whole", root / name)
    for run in left_out:
        shutil.rmtree(root / name / run)
    (root / name / "compare.json").unlink()
    return root / name


def test_a_run_that_fails_is_interrupted_and_continues(whole, monkeypatch):
    root, _, result, _ = whole
    workdir = without(root, "broken", "seldom/seed7")
    run = workdir / "seldom" / "seed7"
    train = compare_runs.train

    def fails(job, *args, **kwargs):
        if job.workdir == run:
            raise FloatingPointError("it blew\nup")
        return train(job, *args, **kwargs)

    monkeypatch.setattr(compare_runs, "train", fails)
    code, found, shown = compared(root, workdir)
    assert code == compare.EXIT_FAILED
    error = {"variant": "seldom", "seed": 7, "error": "FloatingPointError: it blew up"}
    assert found["failures"] == [error]
    assert "failed: seldom seed 7: FloatingPointError: it blew up" in shown
    assert "1 missing" in shown and "one seed, no interval" in shown
    assert without_seconds(found["variants"]["often"]) == without_seconds(
        result["variants"]["often"]
    )
    assert list(found["variants"]["seldom"]["runs"]) == ["0"]
    assert "in fails" in (run / "error.txt").read_text()

    monkeypatch.setattr(compare_runs, "train", train)
    evaluate = TrainingLoop._evaluate

    def interrupts(loop, *arguments, **named):
        evaluate(loop, *arguments, **named)
        if loop.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainingLoop, "_evaluate", interrupts)
    code, _, shown = compared(root, workdir)
    assert code == EXIT_INTERRUPTED and "to continue" in shown
    assert [e["step"] for e in evals(read_records(run / "metrics.jsonl"))] == [0, 4]

    monkeypatch.setattr(TrainingLoop, "_evaluate", evaluate)
    code, found, shown = compared(root, workdir, keep_checkpoints=False)
    assert code == 0 and "3 of 4 runs are complete already" in shown
    assert any(r["kind"] == "resume" for r in read_records(run / "metrics.jsonl"))
    for part in ("variants", "panels"):
        assert without_seconds(found[part]) == without_seconds(result[part])
    page = (workdir / "report.html").read_text()
    assert page == (root / "whole" / "report.html").read_text()
    assert not (run / "error.txt").exists() and not (run / "checkpoints").exists()


def test_processes_side_by_side_and_a_signal(whole, monkeypatch):
    root, _, result, _ = whole
    workdir = without(root, "parallel", "seldom/seed7", "often/seed7")
    start, started = compare_runs._start, []

    def interrupted(*args):
        started.append(start(*args))
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(compare_runs, "_start", interrupted)
    code, found, _ = compared(root, workdir, parallel=2)
    assert code == EXIT_INTERRUPTED and found is None
    assert len(started) == 2 and all(p.returncode is not None for p in started)
    code, found, shown = compared(root, workdir, parallel=2)
    assert code == 0 and len(started) == 4, shown
    for part in ("variants", "panels"):
        assert without_seconds(found[part]) == without_seconds(result[part])


def varied(root, **changes):
    shared = ("common", "networks", "step_seconds", "compile_cache")
    fields = config(root).to_dict()
    given = {k: fields[k] for k in shared} | {"seeds": (0,), **changes}
    return comparison({"diloco": variant("diloco")}, "diloco", **given)


def test_a_field_is_varied(whole):
    root = whole[0]
    console = recording()
    settings = varied(root, vary=("method.period=2,5",))
    # The command line's takes the place of the config's.
    assert compare.compare(settings, root / "varied", console, ["method.period=3,6"]) == 0
    shown = console.export_text()
    with (root / "varied" / "points.csv").open() as file:
        rows = {row["point"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["period=3", "period=6"]
    often, seldom = rows.values()
    finals = {n: evals(runs(root / "whole", n)[0])[-1]["anchor"] for n in ("often", "seldom")}
    assert [float(often["loss"]), float(seldom["loss"])] == list(finals.values())
    assert float(often["sent per region"]) == 2 * float(seldom["sent per region"])
    assert seldom["on frontier: sent per region"] == "True"  # the cheapest always is
    assert f"{finals['often']:.4f}" in shown and "on the frontier" in shown
    assert (root / "varied" / "frontier.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RefusedError, match="is no field"):
        compare.compare(varied(root, vary=("method.nothing=1",)), root / "refused")
    assert not (root / "refused").exists()


def test_every_variant_and_panel_is_varied(whole):
    root = whole[0]
    checked = plan(config(root, vary=("inner.b2=0.9,0.95",)), root / "planned")
    names = [f"{name}+b2=0_{b2}" for name in ("often", "seldom") for b2 in ("9", "95")]
    assert list(checked.variants) == names
    assert checked.config["baseline"] == "often+b2=0_9" == checked.panels[0]["baseline"]
    assert checked.panels[0]["variants"][0] == "seldom+b2=0_9"
    assert checked.points["seldom+b2=0_95"] == {"variant": "seldom", "inner.b2": 0.95}
