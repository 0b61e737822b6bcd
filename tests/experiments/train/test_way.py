"""A run computes its model in the fastest way that its devices' memory allows, and keeps to it."""

import json
import math

import pytest

from experiments.__main__ import main
from experiments.cli import load_config
from experiments.train import devices, way
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


@pytest.mark.parametrize("fits", [0, 1, 2, 3])
def test_the_fastest_way_that_fits_is_taken(job, monkeypatch, fits):
    """The compiler is asked about ways until one fits, but not about those that cannot."""
    options, asked, room = ways(job.model), [], 100
    kept = [math.inf, 90, 50, 10] if fits > 1 else [90, 80, 50, 10]
    monkeypatch.setattr(way, "_room", lambda job: room)
    monkeypatch.setattr(way, "kept_bytes", lambda job, config: kept[options.index(config)])

    def needed(job, config, exchange):
        asked.append(options.index(config))
        return room if options.index(config) >= fits else room + 1

    monkeypatch.setattr(way, "needed_bytes", needed)
    found = way.fastest_way(job, job.model, None)
    assert found.model == options[fits]
    assert found.line.startswith(f"remat={options[fits].remat}")
    assert asked == [i for i in range(min(fits + 1, 3)) if kept[i] <= room]


def test_what_is_kept_is_less_than_what_is_needed(job):
    """So a way is never left out that would fit."""
    fastest, smallest = ways(job.model)[0], ways(job.model)[-1]
    needed = way.needed_bytes(job, fastest, None)
    assert 0 < way.kept_bytes(job, smallest) < way.kept_bytes(job, fastest) < needed < 1e8


def test_what_a_person_sets_is_not_chosen_again(job, monkeypatch):
    monkeypatch.setattr(way, "_room", lambda job: 1)
    given = ways(job.model)[1]
    assert way.fastest_way(job, given, None) == way.Way(given)


def test_the_choice_is_said_and_stays_with_the_run(job, command, monkeypatch, capsys):
    def given(room, fits):
        monkeypatch.setattr(way, "_room", lambda job: room)
        monkeypatch.setattr(way, "_fits", lambda job, config, exchange, room: fits)

    given(10**9, False)
    assert main(["train", *command, f"--workdir={job.workdir}"]) == 0
    said = "remat=full, the loss in 8 parts: the fastest in 1.0 GB"
    assert f"computed {said}" in capsys.readouterr().out
    stored = json.loads((job.workdir / way.STORED).read_text())
    assert (stored["remat"], stored["loss_tiles"]) == ("full", 8)
    given(10**9, True)
    found = way.fastest_way(job, job.model, None).line
    assert found.startswith(said)  # though another would fit by now
    given(2 * 10**9, True)
    found = way.fastest_way(job, job.model, None).line
    assert found.startswith("remat=none: the fastest in 2.0 GB")


def test_a_share_of_the_memory_is_taken_unless_the_environment_has_one(monkeypatch):
    for name in (*devices.MEMORY, *devices._PREALLOCATE):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as given:
        given.setenv(devices.MEMORY[1], "0.3")
        devices.take_memory()
        assert devices.MEMORY[0] not in devices.os.environ
    devices.take_memory()
    assert devices.os.environ[devices.MEMORY[0]] == "0.92"
