"""`plan` end to end: tables, JSON, picture, and what a wrong config is told."""

import importlib
import io
import json
import time

import pytest
from rich.console import Console

from experiments import bench_wan
from experiments import plan as plan_command


def run(name, folder, **overrides):
    config = importlib.import_module(f"configs.plan.{name}").get_config()
    config.update(overrides)
    text = io.StringIO()
    result = plan_command.main(config, folder, Console(file=text, width=160))
    return result, text.getvalue()


@pytest.mark.parametrize("name", ["template", "dilocox_107b", "streaming_100b"])
def test_shipped_configs_run(name, tmp_path):
    started = time.perf_counter()
    result, text = run(name, tmp_path / "out")
    assert time.perf_counter() - started < 10.0 and result["planning_seconds"] < 2.0
    assert json.loads((tmp_path / "out" / "plan.json").read_text()) == json.loads(
        json.dumps(result)
    )
    assert (tmp_path / "out" / "plan.png").read_bytes()[:4] == b"\x89PNG"
    for row in result["rows"]:
        assert row["method"]["name"] in text and 0 < row["utilisation"] <= 1 + 1e-9
        assert row["hours"] > 0 and row["memory"]["state_total"] > 0


def test_dilocox_table_shows_errors_and_confidence(tmp_path):
    result, text = run("dilocox_107b", tmp_path)
    assert "357" in text and "+50.8%" in text and "recalled" in text
    speedup = next(r for r in result["rows"] if r["method"]["name"] == "dilocox")["speedup"]
    assert speedup == pytest.approx(395.3, abs=0.1)
    assert "never catch up" in text and "outside the law's domain" in text


def test_loss_is_given_inside_the_domain(tmp_path):
    result, _ = run("template", tmp_path)
    losses = {r["method"]["name"]: r["loss"] for r in result["rows"]}
    assert 2.4 < losses["allreduce"] < losses["streaming"] < 2.6
    assert result["best"]["penalty_nats"] <= 0.03


def test_compute_seconds_from_devices():
    fields = {
        "model": {"layers": 2, "width": 8, "mlp": 32, "heads": 2, "vocab": 50, "gated": False},
        "network": "lan",
        "devices_per_region": 3,
        "flops_per_device": 1e6,
        "mfu": 0.5,
        "tokens_per_step": 400,
        "methods": ["diloco"],
    }
    work, methods = plan_command.workload(fields)
    size = sum(p.size for p in work.params)
    assert work.step_s == pytest.approx(6 * size * 100 / (3 * 1e6 * 0.5))
    assert work.tokens == 20 * size and methods[0].name == "diloco"
    with pytest.raises(ValueError, match="'mfu' is missing: give it, or give compute_s"):
        plan_command.workload({**fields, "mfu": 0})


def test_bad_configs_name_everything():
    fields = {
        "model": "2b",
        "network": {"regions": 2, "bandwidth_gbps": 0},
        "methods": {"mine": {"preset": "nope"}},
        "published": "everything",
        "speed": 1,
    }
    with pytest.raises(ValueError) as caught:
        plan_command.workload(fields)
    for part in (
        "field 'speed' is unknown",
        "'tokens_per_step' is missing",
        "model '2b' is unknown",
        "bandwidth r0 -> r1 is 0 Gbit/s",
        "preset 'nope' is unknown",
        "published 'everything'",
    ):
        assert part in str(caught.value)


def test_bench_wan_runs_small(tmp_path):
    text = io.StringIO()
    result = bench_wan.measure(sizes=(50, 100), rounds=4, console=Console(file=text, width=120))
    assert [row["regions"] for row in result["clock"]] == [50, 100]
    assert all(row["seconds"] > 0 for row in result["clock"] + result["idle"])
    assert "regions" in text.getvalue()
