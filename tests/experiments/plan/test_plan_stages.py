"""What the compiler says of DiLoCoX in pipeline stages, on shapes alone."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest

from experiments.plan.compile import compile_violations, compiled_bytes
from experiments.plan.model import read_model
from lowcomm_jax.models import PRESETS
from lowcomm_jax.network import uniform
from lowcomm_jax.planner.plan import Workload
from lowcomm_jax.planner.shapes import decoder_shapes

COMMAND = (
    "-m experiments plan --config=configs/plan/dilocox_107b.py --config.mesh.fsdp=1 "
    "--config.compile=True"
)


def workload(mesh, **changes):
    network = uniform(2, 1.0, compute_s=1.0)
    fields = {"tokens_per_step": 2 * 4 * 64.0, "microbatch_tokens": 64, **changes}
    return Workload(
        decoder_shapes(PRESETS["scaling_35m"]), 1e6, network=network, mesh=mesh, **fields
    )


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_a_stage_holds_its_part_of_both_optimizers():
    with jax.numpy_dtype_promotion("standard"):
        found = compiled_bytes("nano", workload({"stage": 2}), rank=4)
    assert found["pipeline"]["stages"] == 2 and found["pipeline"]["microbatches"] == 4
    # nano: 4 blocks and a tied table of 256 x 128, none of it padded, halved; the rest are tokens,
    # counters, seeds and weights.
    blocks = 4 * (4 * 128 * 128 + 3 * 128 * 448 + 2 * 128)
    held = 4 * (blocks + 256 * 128 + 128) / 2
    assert held * 3 <= found["programs"]["inner step"]["arguments"] < held * 3 + 4096
    # Parameters, anchor, residual, and the warm bases of rank 4.
    assert held * 3 < found["programs"]["send"]["arguments"] < held * 3.3
    # Anchor and momentum, the other region's payload and one's own.
    assert held * 2 < found["programs"]["anchor update"]["arguments"] < held * 2.3


def test_what_cannot_be_compiled_is_refused():
    found = compile_violations(read_model("nano"), 2, {"stage": 5, "fsdp": 4}, 0, 1e6)
    for part in ("5 stages for 4 blocks", "are 40 devices, here are", "microbatch_tokens is 0"):
        assert any(part in line for line in found), found
    found = compile_violations(read_model("nano"), 2, {"stage": 2}, 64, 1e6, "zb")
    assert found == ["pipeline_schedule: schedule 'zb' is unknown: use gpipe or 1f1b"]
    found = compile_violations(read_model("nano"), 2, {"stage": 2}, 2048, 2048.0)
    assert "less than a microbatch" in found[0]
    own = read_model({"name": "own_models:pairs", "vocab_size": 258})
    assert "use plan --target" in compile_violations(own, 2, {"stage": 2}, 2048, 1e6)[0]


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_1f1b_needs_less_in_the_inner_step_alone():
    # Enough tokens for activations, not the optimizer, to need the most.
    work = workload({"stage": 2}, microbatch_tokens=1024, tokens_per_step=2 * 16 * 1024.0)
    with jax.numpy_dtype_promotion("standard"):
        found = {s: compiled_bytes("nano", work, 4, s) for s in ("gpipe", "1f1b")}
    assert found["1f1b"]["pipeline"]["schedule"] == "1f1b"
    used = {s: found[s]["programs"]["inner step"]["temporaries"] for s in found}
    assert used["1f1b"] < used["gpipe"]
    one, other = (found[s]["programs"]["anchor update"] for s in ("1f1b", "gpipe"))
    assert one == other


@pytest.mark.slow
def test_the_107b_configuration_lowers_on_sixteen_virtual_devices(tmp_path):
    flags = "--xla_force_host_platform_device_count=16"
    done = subprocess.run(
        [sys.executable, *COMMAND.split(), f"--workdir={tmp_path}"],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"8 stages of 10\s+blocks, 8 microbatches", done.stdout)
    compiled = json.loads((tmp_path / "plan.json").read_text())["compiled"]
    programs = compiled["programs"]
    assert compiled["pipeline"]["padding"] < 0.03  # 78 blocks in 8 x 10
    # Parameters and two moments: 12 bytes of an eighth of 111e9, padding included.
    assert programs["inner step"]["arguments"] == pytest.approx(12 * 111.2e9 / 8, rel=0.01)
    assert programs["anchor update"]["arguments"] < programs["inner step"]["arguments"]
