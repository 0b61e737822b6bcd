"""A run trained on a network: its virtual time, and what the method draws from the links."""

import pytest

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.report.runlog import read_run
from experiments.report.virtual import on_network, step_seconds_on
from experiments.watch.view import Watch
from lowcomm_jax.network import parse


def train(tiny, root, name, *more):
    arguments = tiny.arguments(
        root,
        "--config=cocodc",
        "--config.steps=24",
        "--config.method.period=8",
        "--config.method.fragments=2",
        "--config.method.overlap=1",
        f"--workdir={root / name}",
        *more,
    )
    return main(["train", *arguments])


NETWORK = """
name: slow
regions: [a, b, c]
compute_s: 2.0
bandwidth_gbps: {gbps:.8f}
delay_ms: 10
"""


def sends(path):
    rows = [r for r in read_records(path) if r["kind"] == "step"]
    return [r["step"] for r in rows for e in r["events"] if e["kind"] == "send"]


def test_slots_come_from_the_network(tiny, tmp_path):
    tiny.corpus(tmp_path / "texts")
    counts = {}
    for name, gbps in (("fast", 1.0), ("slow", 1e-7)):
        (tmp_path / f"{name}.yaml").write_text(NETWORK.format(gbps=gbps))
        links = f"--config.network={tmp_path / name}.yaml"
        assert train(tiny, tmp_path, name, links, "--config.method.gamma=0.9") == 0
        metrics = tmp_path / name / "metrics.jsonl"
        counts[name] = len(sends(metrics))
        end = next(r for r in read_records(metrics) if r["kind"] == "end")
        assert end["virtual"]["wall_s"] >= 24 * 2.0
    assert counts == {"fast": 24, "slow": 6}


def test_the_last_synchronisation_is_on_no_clock(tiny, tmp_path):
    """Of a run the record of its end, a replay of its steps and `watch` tell the same time."""
    tiny.corpus(tmp_path / "texts")
    (tmp_path / "slow.yaml").write_text(NETWORK.format(gbps=1e-5))
    arguments = tiny.arguments(
        tmp_path,
        "--config=diloco",
        "--config.steps=5",
        "--config.method.period=2",
        f"--config.network={tmp_path / 'slow.yaml'}",
        f"--workdir={tmp_path / 'run'}",
    )
    assert main(["train", *arguments, "--quiet"]) == 0
    run, links = read_run(tmp_path / "run"), parse(f"{tmp_path / 'slow.yaml'}")
    replayed, end = on_network(run, links, step_seconds_on(links, None)).clock, run.end["virtual"]
    assert run.end["bytes_sent"][0] == pytest.approx(3 / 2 * run.steps[-1]["bytes_sent"][0], abs=2)
    assert end["wall_s"] == pytest.approx(replayed.wall_s, rel=1e-9)
    assert end["utilisation"] == pytest.approx(replayed.utilisation, rel=1e-9)
    assert end["sent_R"] == pytest.approx(replayed.sent_R, rel=1e-9)
    waits = [region.waiting for region in Watch(tmp_path / "run").look()["regions"]]
    assert waits == pytest.approx([s / replayed.wall_s for s in end["exposed_R"]], rel=1e-9)
    assert min(waits) > 0


def test_a_round_that_cannot_hide_its_payload_is_refused(tiny, tmp_path, capsys):
    tiny.corpus(tmp_path / "texts")
    (tmp_path / "slow.yaml").write_text(NETWORK.format(gbps=1e-7))
    arguments = tiny.arguments(
        tmp_path,
        "--config=dilocox",
        "--config.mesh.stage=1",
        "--config.method.rank=2",
        f"--config.network={tmp_path / 'slow.yaml'}",
        f"--workdir={tmp_path / 'run'}",
    )
    assert main(["train", *arguments]) == 2
    assert "the payload travels for" in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting,part",
    [
        ("--config.method.gamma=0.9", "or a network"),
        ("--config.network=lan", "regions"),
        ("--config.network=no_such", "no_such"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(tiny, tmp_path, capsys, setting, part):
    tiny.corpus(tmp_path / "texts")
    assert train(tiny, tmp_path, "run", setting) == 2
    assert part in capsys.readouterr().err
