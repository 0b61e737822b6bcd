"""A run in pipeline stages from the command line, and what is refused before it."""

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments.__main__ import main
from experiments.cli import RefusedError
from experiments.config import base
from experiments.metrics import read_records
from experiments.train import main as train
from experiments.train.job import make_model
from experiments.train.resolve import resolve
from experiments.trained.anchor import load_trained
from experiments.trained.sample import sample
from lowcomm_jax.mesh.pipeline_paths import Paths
from lowcomm_jax.models.protocol import param_count


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_run_in_stages_trains_and_leaves_a_model_in_one_piece(tmp_path, tiny, schedule):
    tiny.corpus(tmp_path / "texts")
    command = tiny.arguments(
        tmp_path,
        "--config=diloco",
        "--config.method.period=2",
        "--config.steps=3",
        "--config.regions=2",
        "--config.model.layers=3",
        "--config.mesh.stage=2",
        f"--config.pipeline_schedule={schedule}",
        f"--workdir={tmp_path / 'run'}",
        "--quiet",
    )
    assert main(["train", *command]) == 0
    trained = load_trained(tmp_path / "run")
    header, *records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert header["pipeline"] == {
        "stages": 2,
        "blocks_per_stage": 2,
        "microbatches": 2,
        "schedule": schedule,
        "bubble": 1 / 3,
        "padding": 1 - header["params"] / param_count(trained.run.model),
    }
    losses = [r["loss"] for r in records if r["kind"] == "step"]
    assert len(losses) == 3 and np.isfinite(losses).all()
    assert trained.params["blocks"]["mlp"]["up"]["kernel"].shape[0] == 3
    assert trained.run.whole.config.layers == 3
    assert isinstance(sample(trained, "region", length=2), str)


def test_stages_that_do_not_fit_are_refused(tmp_path):
    config = base("diloco", period=2)
    config.mesh.region, config.mesh.fsdp, config.mesh.stage = 1, 1, 8
    config.batch, config.microbatches = 4, 3
    config.model.layer_loop = "unrolled"
    config.random_routing, config.pipeline_schedule = True, "1f1b"
    with pytest.raises(RefusedError) as error:
        resolve(config, tmp_path)
    for part in (
        "pipeline_schedule: random routing with 1f1b",
        "8 stages for 4 blocks: use at most 4",
        "need layer_loop='scan'",
        "4 regions on 1 slots of the mesh",
        "batch=4 in accumulate=1 does not divide into microbatches=3 over fsdp=1",
    ):
        assert part in str(error.value)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_paths_are_drawn_from_the_seed_of_the_run(tmp_path):
    config = base("diloco", period=2)
    config.regions = config.mesh.region = config.mesh.stage = 2
    config.mesh.fsdp, config.random_routing, config.seed = 1, True, 5
    job = resolve(config, tmp_path)
    assert make_model(job, job.model).paths == Paths(regions=2, stages=2, microbatches=4, seed=5)


def test_fewer_microbatches_than_stages_warn_with_the_bubble(tmp_path, monkeypatch):
    config = base("diloco", period=2)
    config.mesh.region, config.mesh.fsdp, config.mesh.stage = 1, 1, 4
    config.batch, config.microbatches = 4, 2
    text = io.StringIO()

    def stop(job, quiet, trains):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "assemble", stop)
    with pytest.raises(KeyboardInterrupt):
        train.train(resolve(config, tmp_path), Console(file=text), quiet=True)
    assert "2 microbatches for 4 stages: each stage is idle 60% of the time" in text.getvalue()
