"""The quick comparison on a tiny model: its table, checked against the metrics files by hand."""

import html
import json
import re

import compare_cases
import numpy as np
import pytest
from compare_cases import STEPS
from rich.console import Console
from scipy import stats

from configs.compare import quick
from experiments.__main__ import main as command
from experiments.cli import RefusedError
from experiments.compare import quick as quick_command
from experiments.compare.at_equal import sentence
from experiments.compare.main import compare
from experiments.compare.plan import plan
from experiments.metrics import read_records

PERIOD, R, STEP_SECONDS = 4, 4, 0.02


def config(root):
    found = quick.get_config()
    variants = quick.methods(period=PERIOD, fragments=2, overlap=1)
    with found.unlocked():
        found.variants = {n: variants[n] for n in ("allreduce", "diloco", "streaming")}
        found.panels.all.variants = tuple(found.variants)[::-1]
        found.parallel = 1
        found.compile_cache = "off"
        found.common.update(compare_cases.tiny(root))
        found.common.log = {"every": 4}
    return found


@pytest.fixture(scope="module")
def found(root):
    workdir = root / "work"
    with (root / "said").open("w") as said:
        console = Console(width=80, record=True, file=said)
        assert compare(config(root), workdir, console) == 0
    result = json.loads((workdir / "compare.json").read_text())
    logs = {n: read_records(workdir / n / "seed0" / "metrics.jsonl") for n in result["variants"]}
    return workdir, result, logs, console.export_text()


def of(kind, records):
    return [r for r in records if r["kind"] == kind]


def sent_per_region(records):
    """From the sends alone: payload bytes once, twice three quarters of it in two passes."""
    total = 0.0
    for row in of("step", records):
        for event in (e for e in row["events"] if e["kind"] == "send"):
            share = {"two_shot": 2 * (R - 1) / R, "gather": R - 1}[event["route"]]
            total += share * event["nbytes"]
    return total


def half(sums, counts):
    """Half of a 95 % interval of sum / count over documents, written out."""
    n, loss = len(counts), sums.sum() / counts.sum()
    variance = sum((s - loss * c) ** 2 for s, c in zip(sums, counts)) * n / (n - 1)
    return stats.t.ppf(0.975, n - 1) * np.sqrt(variance) / counts.sum()


def test_bytes_and_compression(found):
    _, result, logs, shown = found
    rows = result["variants"]
    params = logs["allreduce"][0]["trained_params"]
    allreduce = STEPS * 2 * (R - 1) / R * 4 * params
    assert sent_per_region(logs["allreduce"]) == pytest.approx(allreduce, rel=1e-3)
    for name, records in logs.items():
        end = of("end", records)[0]
        before = np.mean(of("step", records)[-1]["bytes_sent"])
        assert rows[name]["bytes_sent"] == np.mean(end["bytes_sent"]) >= before
        assert before == pytest.approx(sent_per_region(records), rel=1e-3)
        ratio = rows["allreduce"]["bytes_sent"] / rows[name]["bytes_sent"]
        assert rows[name]["compression"] == pytest.approx(ratio, rel=1e-3)
        assert f"{rows[name]['compression']:.3g}x" in shown
        assert rows[name]["tokens"] == of("step", records)[-1]["tokens"]
    assert rows["diloco"]["compression"] == pytest.approx(PERIOD, rel=1e-3)
    # Of a model this small, some leaves have too few blocks for full slices, which are filled up.
    assert rows["streaming"]["compression"] > 3.9 * PERIOD


def test_time_on_the_network(found):
    _, result, _, shown = found
    rows = {n: row["networks"]["us_4_regions"] for n, row in result["variants"].items()}
    assert rows["allreduce"]["speedup"] == pytest.approx(1.0, rel=1e-9)
    for row in rows.values():
        assert row["speedup"] == pytest.approx(
            rows["allreduce"]["seconds"] / row["seconds"], rel=1e-9
        )
        assert row["allreduce_seconds"] == pytest.approx(rows["allreduce"]["seconds"], rel=1e-9)
        # Every region computes for as long; the last to be done makes the time.
        assert row["utilisation"] >= STEPS * STEP_SECONDS / row["seconds"] - 1e-12
        assert f"{row['utilisation']:.0%}" in shown and f"{row['speedup']:.3g}x" in shown
    # The payload is small, so that the longest way there and back (2 x 32 ms) is all of a round.
    waits = {"allreduce": STEPS, "diloco": STEPS // PERIOD}
    for name, rounds in waits.items():
        by_hand = STEPS * STEP_SECONDS + rounds * 2 * 0.032
        assert rows[name]["seconds"] == pytest.approx(by_hand, rel=0.05)
    stale = {name: row["staleness"] for name, row in result["variants"].items()}
    assert stale == {"allreduce": 0, "diloco": 0, "streaming": 1}


def test_losses_and_their_intervals_over_documents(found):
    _, result, logs, shown = found
    sums = {n: np.array(of("eval", r)[-1]["document_sum"], float) for n, r in logs.items()}
    counts = np.array(of("eval_set", logs["diloco"])[0]["count"], float)
    differences = result["panels"][0]["differences"]
    for name, records in logs.items():
        row, last = result["variants"][name], of("eval", records)[-1]
        assert last["final"] and row["loss"]["mean"] == last["anchor"]
        assert row["loss"]["half"] is None  # one seed
        assert row["document_interval"] == pytest.approx(half(sums[name], counts), rel=1e-6)
        assert f"{last['anchor']:.3f}±{row['document_interval']:.3f}" in shown
        paired = differences[name]["loss"]["documents_half"]
        if name == "allreduce":
            assert paired is None
        else:
            by_hand = half(sums[name] - sums["allreduce"], counts)
            assert paired == pytest.approx(by_hand, rel=1e-6)
    assert "one seed: ± is a 95 % interval over these documents" in " ".join(shown.split())


def test_at_equal_time_and_at_equal_bytes(found):
    workdir, result, logs, _ = found
    by_time, by_bytes = result["at_equal"]
    assert (by_time["of"], by_bytes["of"]) == ("time", "bytes")  # the honest one first
    seconds = {n: r["networks"]["us_4_regions"]["seconds"] for n, r in result["variants"].items()}
    assert by_time["budget"] == pytest.approx(min(seconds.values()))
    assert by_time["network"] == "us_4_regions"
    assert by_bytes["budget"] == min(r["bytes_sent"] for r in result["variants"].values())
    # DiLoCo is done first, Streaming sends least: they stand at their end.
    for entry, name in ((by_time, "diloco"), (by_bytes, "streaming")):
        assert entry["losses"][name] == of("eval", logs[name])[-1]["anchor"]
        assert entry["losses"]["allreduce"] > of("eval", logs["allreduce"])[-1]["anchor"]
    # AllReduce has sent as much within its first step: a share of its way to the first evaluation.
    before, after = (e["anchor"] for e in of("eval", logs["allreduce"])[:2])
    sent = np.mean(of("step", logs["allreduce"])[3]["bytes_sent"])
    share = by_bytes["budget"] / sent
    assert by_bytes["losses"]["allreduce"] == pytest.approx(before + share * (after - before))
    text = sentence(result["at_equal"], "allreduce", 1)
    assert text.index("equal time") < text.index("equal bytes") and "one seed" in text
    page = html.unescape((workdir / "report.html").read_text())
    assert text in page
    for entry in (by_time, by_bytes):
        assert f"{min(entry['losses'].values()):.3f}" in text
    assert sentence([], "allreduce", 1) == ""


def test_what_comes_is_said(tmp_path):
    comparison = plan(quick.get_config(), tmp_path)
    with (tmp_path / "said").open("w") as said:
        quick_command.announce(comparison, Console(width=200, file=said))
    title, runs, _, page = (tmp_path / "said").read_text().splitlines()
    assert "streaming" in title and "7 runs of 140 steps, 4 regions each" in runs
    assert page == f"the page will be {tmp_path / 'report.html'}"


def test_curves_have_ten_points():
    common = quick.get_config().common
    assert common.steps / common.eval.every >= 10


def test_progress_the_page_and_a_second_look(found):
    workdir, result, _, shown = found
    for step in (4, 8, 12):
        assert re.search(rf"diloco +step {step}/12  loss \d", shown)
    assert "[3/3] streaming seed 0: eval loss" in shown
    assert "measured by the first steps: about" in shown
    assert re.search(r"3 runs took .*: .* of set-up .*, .* of training, .* of evaluation", shown)
    page = workdir / "report.html"
    text = page.read_text()
    for row in result["variants"].values():
        assert f'data-value="{row["loss"]["mean"]!r}"' in text
        assert f'data-value="{row["networks"]["us_4_regions"]["seconds"]!r}"' in text
    page.unlink()
    (workdir / "compare.json").unlink()
    console = Console(width=80, record=True, file=(workdir / "said").open("w"))
    assert compare(config(workdir.parent), workdir, console) == 0
    assert page.read_text() == text
    assert json.loads((workdir / "compare.json").read_text()) == result


def test_the_page_of_single_runs(found, capsys):
    workdir = found[0]
    folders = [str(workdir / name / "seed0") for name in ("allreduce", "diloco")]
    page = workdir / "pages" / "two.html"
    options = [f"--html={page}", "--network=us_4_regions", "--step_seconds=0.02"]
    assert command(["report", *folders, *options]) == 0
    shown = capsys.readouterr().out
    assert str(page) in "".join(shown.split())
    assert "seed0" not in shown.partition("loss in nats")[0]  # both are: their folders tell
    text = page.read_text()
    assert ">diloco</th>" in text and "streaming" not in text
    seconds = found[1]["variants"]["diloco"]["networks"]["us_4_regions"]["seconds"]
    assert f'data-value="{seconds!r}"' in text


def test_every_method_passes_its_checks(tmp_path):
    whole = quick.get_config()
    with whole.unlocked():
        whole.common.mesh = {"region": 1, "fsdp": 1}  # the virtual devices are not the machine's
    found = plan(whole, tmp_path)
    assert found.config["baseline"] == "allreduce" and len(found.variants) >= 6
    assert {run.fields["mesh"]["stage"] for run in found.runs} == {1}


def test_networks_that_do_not_fit_are_refused(tmp_path, capsys):
    whole = quick.get_config()
    with whole.unlocked():
        whole.common.mesh = {"region": 1, "fsdp": 1}
        whole.networks = ("lan_", "aws:Oregon,Tokyo")
    with pytest.raises(RefusedError) as error:
        plan(whole, tmp_path)
    assert "lan_" in str(error.value)
    assert "has 2 regions" in str(error.value) and "diloco 4" in str(error.value)
    settings = ["--config.networks=('lan',)", "--config.step_seconds=-1.0"]
    assert command(["quick", f"--workdir={tmp_path / 'w'}", *settings]) == 2
    assert "step_seconds=-1.0" in capsys.readouterr().err
