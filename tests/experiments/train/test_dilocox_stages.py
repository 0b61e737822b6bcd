"""`configs/dilocox.py` trains in pipeline stages: its devices, where its state lies, resume."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from launched import comparable

from experiments.__main__ import main
from experiments.cli import RefusedError, load_config
from experiments.train.assemble import assemble
from experiments.train.resolve import resolve
from experiments.train.starting import starting_params
from experiments.train.stopping import Stopping
from lowcomm_jax.interrupt import EXIT_INTERRUPTED
from lowcomm_jax.mesh import stages

ROOT = Path(__file__).resolve().parents[3]
R, S = 4, 2
SMALL = {
    "regions": R,
    "model.layers": 3,
    "mesh.region": 0,
    "method.period": 2,
    "method.rank": 2,
}
eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def command(tiny, root, *more):
    small = [f"--config.{name}={value}" for name, value in SMALL.items()]
    return tiny.arguments(root, "--config=configs/dilocox.py", *small, *more)


def job_of(tiny, root):
    tiny.corpus(root / "texts")
    fields = [a.removeprefix("--config.").split("=", 1) for a in command(tiny, root)]
    overrides = [tuple(f) for f in fields if not f[0].startswith("--")]
    config, problems = load_config("configs/dilocox.py", overrides)
    assert not problems
    return resolve(config, root / "run")


@eight
def test_both_optimizers_and_the_residuals_lie_in_stages(tiny, tmp_path):
    job = job_of(tiny, tmp_path)
    assert dict(job.mesh.shape) == {"region": R, "stage": S, "fsdp": 1, "tensor": 1}
    run = assemble(job)
    state = run.engine.init(starting_params(run))
    parts = {"anchor": state.anchor, "outer": state.outer, "residuals": state.codec}
    parts |= {"inner": state.inner}
    for name, tree in parts.items():
        leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.size > 2 * R]
        assert leaves, name
        for leaf in leaves:
            axis = stages.stage_axis(leaf.sharding.spec)
            assert axis is not None, (name, leaf.shape, leaf.sharding)
            assert leaf.sharding.shard_shape(leaf.shape)[axis] * S == leaf.shape[axis]


@eight
@pytest.mark.slow
def test_the_config_trains_and_continues(tiny, tmp_path, monkeypatch):
    tiny.corpus(tmp_path / "texts")
    more = ["--config.steps=7", "--config.eval.every=0", "--config.checkpoint.every=0", "--quiet"]
    commands = {
        name: ["train", *command(tiny, tmp_path, *more, f"--workdir={tmp_path / name}")]
        for name in ("broken", "whole")
    }
    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "at", lambda self, step, state: step >= 3)
        assert main(commands["broken"]) == EXIT_INTERRUPTED
    found = {}
    for name, arguments in commands.items():
        assert main(arguments) == 0
        found[name] = comparable(tmp_path / name)
    assert found["broken"][1:] == found["whole"][1:]
    header, *records = found["whole"]
    assert header["pipeline"]["stages"] == S and header["pipeline"]["blocks_per_stage"] == 2
    losses = np.array([r["loss"] for r in records if r["kind"] == "step"])
    assert losses.shape == (7, R) and losses[-1].mean() < losses[0].mean()


def test_a_processor_is_cut_into_the_devices_that_a_mesh_names():
    """In a process of its own, since JAX has its devices here."""
    sizes = {"region": 0, "stage": 2, "fsdp": 0, "tensor": 3}
    script = f"from experiments.train.devices import provide; provide({sizes}); import jax; "
    done = subprocess.run(
        [sys.executable, "-c", script + "print(jax.device_count())"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) == 6


def test_devices_that_are_missing_are_named_with_the_fix(tmp_path):
    config, _ = load_config("configs/dilocox.py", [("mesh.stage", "16"), ("model.layers", "16")])
    with pytest.raises(RefusedError) as error:
        resolve(config, tmp_path)
    assert "needs 16 devices" in str(error.value)
    assert "use a smaller mesh (mesh.stage=1), or XLA_FLAGS=" in str(error.value)
