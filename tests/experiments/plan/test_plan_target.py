"""`plan --target`: a training config compiled for absent accelerators, and what is refused."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from aot.aot_cases import needs

from experiments import __main__ as command
from experiments.plan.target import mfu_parts
from lowcomm_jax.aot.collectives import Collective
from lowcomm_jax.aot.report import AheadOfTime, ProgramReport
from lowcomm_jax.aot.targets import Target
from lowcomm_jax.aot.timeline import KernelWork

SMALL = (
    "--config.model.preset=nano",
    "--config.model.vocab_size=256",
    "--config.model.layer_loop=scan",
    "--config.model.layers=2",
    "--config.data.seq_len=64",
    "--config.regions=2",
    "--config.batch=8",
)


def ask(*arguments):
    """(exit code, what was printed) of the command in a process of its own."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    run = subprocess.run(
        [sys.executable, "-m", "experiments", "plan", *arguments],
        env=env | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize("target", ["h100:2x2", "v5e:2x2x2slices"])
def test_a_training_config_is_compiled_and_written(target, tmp_path):
    needs(target)
    file = tmp_path / "report.json"
    code, out, err = ask(
        f"--target={target}", "--config=configs/streaming_diloco.py", *SMALL, f"--json={file}"
    )
    assert code == 0, err
    assert "fits" in out and "inner step" in out and "the ledger announces" in out
    report = json.loads(file.read_text())
    assert report["target"] == target and report["fits"] is True
    assert set(report["programs"]) == {
        "inner step",
        "inner steps and exchange",
        "send",
        "anchor update",
        "landing",
    }
    assert 0 <= report["crossing"] - report["announced"] < 1e5
    assert 0 < report["mfu_bound"] < 1
    step = report["programs"]["inner step"]
    rate = "450 GB/s" if target.startswith("h100") else "200 GB/s"
    assert f"at {rate}" in next(line for line in out.splitlines() if "waiting, fsdp" in line)
    assert "other kernels" in out and "launches" in out and "all " in out
    kernels = sum(work["seconds"] for work in step["work"].values())
    assert step["seconds"] == pytest.approx(kernels + step["exposed"])
    assert 0 < step["exposed"] < step["seconds"]
    assert math.prod(report["mfu_parts"].values()) == pytest.approx(report["mfu_bound"])


def test_a_model_of_ones_own_is_compiled_for_a_target():
    needs("v5e:2x2")
    given = ("--config.model=examples.mixture_of_experts:Mixture", "--config.model.over=fsdp")
    sizes = ("--config.model.layers=2", "--config.model.width=16", "--config.model.hidden=16")
    mesh = ("--config.mesh.fsdp=2", "--config.batch=2", "--config.regions=2")
    length = "--config.data.seq_len=16"
    code, out, err = ask("--target=v5e:2x2", "--config=spes", *given, *sizes, *mesh, length)
    assert code == 0, err
    # Tokens go to their experts and back inside the region; between regions only the round does.
    rows = [line for line in out.splitlines() if "all-to-all" in line]
    assert any("inner step" in row and "over fsdp" in row for row in rows), out
    assert not any("inner step" in row and "region" in row for row in rows), out


def test_the_bound_of_mfu_is_told_apart():
    """16 s of arithmetic and 4 s of waiting; 4 of 5 ticks busy; 7 of 10 operations in them used."""
    target = Target.parse("h100:2x2")
    arithmetic = KernelWork(16 * target.accelerator.flops, 0, 1, 20.0)
    waits = Collective("all-gather", ("fsdp",), (), ((0, 1),), 1, 1, "", "", "", "", 1.0, 4.0)
    step = ProgramReport("", {}, 0, {"compute": 16.0}, {"product": arithmetic}, (waits,), (), 0)
    mesh = {"region": 2, "stage": 2, "fsdp": 1, "tensor": 1}
    used = 16 * target.accelerator.flops * 0.8 * 0.7
    report = AheadOfTime(target, mesh, (step,), 0, 0, 0, used)
    parts = mfu_parts(SimpleNamespace(microbatches=4), report)
    assert list(parts.values()) == pytest.approx([0.8, 0.8, 0.7])
    assert report.mfu_bound == pytest.approx(0.8 * 0.8 * 0.7)


def test_a_run_that_does_not_fit_says_what_to_change(monkeypatch, capsys):
    needs("v5e:2x2")
    monkeypatch.setenv("COLUMNS", "160")
    given = (
        "--target=v5e:2x2",
        "--config=configs/diloco.py",
        "--config.model.preset=scaling_1_3b",
        "--config.model.vocab_size=32768",
        "--config.model.compute_dtype=bfloat16",
        "--config.data.seq_len=256",
        "--config.regions=4",
        "--config.batch=1",
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        code = command.main(["plan", *given])
    out = capsys.readouterr().out
    assert code == 1
    assert "does not fit: inner step: " in out and "--config.offload=True" in out


def test_a_mesh_that_does_not_divide_the_target_is_one_line(capsys):
    needs("h100:2x8")
    arguments = ["--target=h100:2x8", "--config=configs/diloco.py", "--config.mesh.fsdp=3"]
    assert command.main(["plan", *arguments, "--config.batch=6", "--config.regions=2"]) == 2
    assert "has 16 devices, and the mesh" in capsys.readouterr().err


def test_a_missing_compiler_is_one_line(monkeypatch, capsys):
    def absent(self):
        raise RuntimeError("target h100:2x8: its compiler needs a package")

    monkeypatch.setattr(Target, "devices", property(absent))
    assert command.main(["plan", "--target=h100:2x8", "--config=configs/diloco.py"]) == 2
    assert "its compiler needs a package" in capsys.readouterr().err
