"""A run computes its model in the fastest way that its devices' memory allows, and keeps to it."""

import json

import jax
import pytest

from experiments.__main__ import main
from experiments.cli import load_config
from experiments.train import way
from experiments.train.resolve import resolve
from lowcomm_jax.models.config import ways

SETTINGS = ("steps=4", "regions=2", "batch=8", "eval.every=0", "inner.warmup_steps=1")


@pytest.fixture
def command(tiny, tmp_path):
    tiny.corpus(tmp_path / "texts")
    return tiny.arguments(tmp_path, "--config=diloco", *(f"--config.{s}" for s in SETTINGS))


@pytest.fixture
def job(command, tmp_path):
    given = [flag.removeprefix("--config.").split("=", 1) for flag in command if "config." in flag]
    config, problems = load_config("diloco", [tuple(pair) for pair in given])
    assert not problems
    return resolve(config, tmp_path / "run")


def test_the_fastest_way_that_fits_is_taken(job, monkeypatch):
    options = ways(job.model)
    needs = way._needs(job, options, None)
    assert needs == sorted(needs, reverse=True)
    assert needs[-1] < needs[0]
    for i, nbytes in enumerate(needs):
        monkeypatch.setattr(way, "_room", lambda job, nbytes=nbytes: nbytes)
        expected = next(j for j, other in enumerate(needs) if other <= nbytes)
        assert expected <= i
        found = way.fastest_way(job, job.model, None)
        assert found.config == options[expected]
        assert found.why.startswith(f"remat={options[expected].remat}")


def test_what_a_person_sets_is_not_chosen_again(job, monkeypatch):
    monkeypatch.setattr(way, "_room", lambda job: 1)
    given = ways(job.model)[1]
    assert way.fastest_way(job, given, None) == way.Way(given)


def test_the_choice_is_said_and_stays_with_the_run(command, tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "run"

    def train(room, *more):
        monkeypatch.setattr(way, "_room", lambda job: room)
        with jax.numpy_dtype_promotion("standard"):
            assert main(["train", *command, f"--workdir={workdir}", *more]) == 0
        return capsys.readouterr().out

    assert "remat=full, the loss in 8 parts: about" in train(1, "--config.checkpoint.every=2")
    stored = json.loads((workdir / "config.json").read_text())["model"]
    assert (stored["remat"], stored["loss_tiles"]) == ("full", 8)
    (workdir / "checkpoints" / "4").rename(tmp_path / "last")
    assert "remat=none" not in train(1 << 50)
    assert json.loads((workdir / "config.json").read_text())["model"] == stored
