"""A tiny gossip run from the command line: how far the regions are apart, as recorded and shown."""

import numpy as np
import pytest
from rich.console import Console

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.report.main import table
from experiments.report.runlog import read_run, summarise
from lowcomm_jax.rules import topology

STEPS, PERIOD, REGIONS = 16, 3, 3


@pytest.fixture(scope="module")
def run(root, tiny):
    command = tiny.arguments(
        root,
        "--config=noloco",
        f"--config.steps={STEPS}",
        f"--config.method.period={PERIOD}",
        "--config.eval.every=6",
        f"--workdir={root / 'run'}",
        "--quiet",
    )
    assert main(["train", *command]) == 0
    return root / "run"


def test_what_is_recorded(run):
    records = read_records(run / "metrics.jsonl")
    assert records[0]["consensus"] == {
        "alpha": 0.5,
        "gamma": 0.7,
        "group_size": 2,
        "variant": "heavy_ball",
        "names": ["alpha", "gamma"],
    }
    evals = [r for r in records if r["kind"] == "eval"]
    assert evals[0]["anchor_variance"] < 1e-9 < evals[-1]["anchor_variance"]
    # Every region ends on its own anchor: the models differ, and so does their average.
    final = evals[-1]["regions"]
    assert len(final) == REGIONS and np.ptp(final) > 1e-6
    assert evals[-1]["mean_of_regions"] == pytest.approx(evals[-1]["anchor"], rel=1e-6)
    events = [e for r in records if r["kind"] == "step" for e in r["events"]]
    landings = [e for e in events if e["kind"] == "land"]
    assert len(landings) == STEPS // PERIOD
    assert max(landings[0]["pull_norm"]) == 0 < max(landings[1]["pull_norm"])
    assert landings[0]["groups"] == [list(g) for g in topology.Gossip(2, 0).groups(1, REGIONS)]
    assert [r["disagreement"] for r in records if r.get("disagreement")]


def test_what_is_shown(run):
    summary = summarise(read_run(run))
    # k = 2/3 of a deviation is seen by pairs of 3 regions, one of them alone.
    records = [r for r in read_records(run / "metrics.jsonl") if r["kind"] == "step"]
    pulls = [e["pull_norm"] for r in records for e in r["events"] if e["kind"] == "land"][1:]
    first, last = (np.mean(np.square(pull)) for pull in (pulls[0], pulls[-1]))
    assert summary.contraction == pytest.approx((last / first) ** (1 / (len(pulls) - 1)))
    assert 0 < summary.expected_contraction < 1
    console = Console(width=80, record=True)
    console.print(table([summary]))
    shown = console.export_text()
    for part in ("single regions", "variance of the anchors", f"{summary.contraction:.3f}"):
        assert part in shown
