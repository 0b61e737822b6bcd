"""A run trained on a network: its virtual time, and what the method draws from the links."""

import pytest

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.report.runlog import read_run
from experiments.report.virtual import Links, on_network
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


def test_slots_come_from_the_network(tiny, root):
    counts = {}
    for name, gbps in (("fast", 1.0), ("slow", 1e-7)):
        (root / f"{name}.yaml").write_text(NETWORK.format(gbps=gbps))
        links = f"--config.network={root / name}.yaml"
        assert train(tiny, root, name, links, "--config.method.gamma=0.9") == 0
        metrics = root / name / "metrics.jsonl"
        counts[name] = len(sends(metrics))
        end = next(r for r in read_records(metrics) if r["kind"] == "end")
        assert end["virtual"]["wall_s"] >= 24 * 2.0
    assert counts == {"fast": 24, "slow": 6}


def test_the_last_synchronisation_is_on_no_clock(tiny, root):
    """Of a run the record of its end, a replay of its steps and `watch` tell the same time."""
    (root / "links.yaml").write_text(NETWORK.format(gbps=1e-5))
    arguments = tiny.arguments(
        root,
        "--config=diloco",
        "--config.steps=5",
        "--config.method.period=2",
        f"--config.network={root / 'links.yaml'}",
        f"--workdir={root / 'run'}",
    )
    assert main(["train", *arguments, "--quiet"]) == 0
    run, links = read_run(root / "run"), parse(f"{root / 'links.yaml'}")
    replayed, end = on_network(run, Links.paced(links, None)).clock, run.end["virtual"]
    assert run.end["bytes_sent"][0] == pytest.approx(3 / 2 * run.steps[-1]["bytes_sent"][0], abs=2)
    assert end["wall_s"] == pytest.approx(replayed.wall_s, rel=1e-9)
    assert end["utilisation"] == pytest.approx(replayed.utilisation, rel=1e-9)
    assert end["sent_R"] == pytest.approx(replayed.sent_R, rel=1e-9)
    waits = [region.waiting for region in Watch(root / "run").look()["regions"]]
    assert waits == pytest.approx([s / replayed.wall_s for s in end["exposed_R"]], rel=1e-9)
    assert min(waits) > 0


@pytest.mark.parametrize(
    "setting,part",
    [
        ("--config.method.gamma=0.9", "or a network"),
        ("--config.network=lan", "regions"),
        ("--config.network=no_such", "no_such"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(tiny, root, capsys, setting, part):
    assert train(tiny, root, "refused", setting) == 2
    assert part in capsys.readouterr().err
