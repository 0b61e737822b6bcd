"""A folder belongs to one run at a time, and its config is never half written."""

import os
import socket
import subprocess
import sys

import pytest

from experiments.__main__ import main
from experiments.cli import RefusedError, load_config, split_config
from experiments.compare.plan import ERROR
from experiments.compare.runs import attempt
from experiments.config import plain
from experiments.progress import plain_console
from experiments.workdir import (
    CONFIG,
    LOCK,
    OccupiedError,
    occupied,
    read_config,
    write_config,
)

HOLD = """
import pathlib, sys
from experiments.workdir import occupied
with occupied(pathlib.Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=env, **given) as process:
        assert process.stdout.readline() == "mine\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_with_the_owners_name(owner, tmp_path):
    with pytest.raises(RefusedError) as error, occupied(tmp_path / "run"):
        pass
    assert f"in use by process {owner.pid} on {socket.gethostname()}" in str(error.value)


def test_a_second_run_says_nothing_before_it_is_refused(owner, tiny, tmp_path, capsys):
    tiny.corpus(tmp_path / "texts")
    given = ("--config=diloco", "--config.steps=8", f"--workdir={tmp_path / 'run'}")
    assert main(["train", *tiny.arguments(tmp_path, *given)]) == 2
    said = capsys.readouterr()
    assert f"in use by process {owner.pid}" in said.err and "reading the corpus" not in said.out


def test_a_run_of_a_comparison_in_use_is_refused_and_left_alone(owner, tiny, tmp_path):
    """It does not count as one that has failed."""
    tiny.corpus(tmp_path / "texts")
    given = ("--config=diloco", "--config.steps=8")
    path, overrides, _ = split_config(tiny.arguments(tmp_path, *given))
    config, problems = load_config(path, overrides)
    assert not problems
    with pytest.raises(OccupiedError, match=f"in use by process {owner.pid}"):
        attempt(plain(config), tmp_path / "run", plain_console())
    assert not (tmp_path / "run" / ERROR).exists()


def test_who_was_killed_holds_nothing(owner, tmp_path):
    owner.kill()
    owner.wait()
    with occupied(tmp_path / "run"):
        now = (tmp_path / "run" / LOCK).read_text()
    assert now == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_config_is_replaced_whole(tmp_path, monkeypatch):
    write_config(tmp_path, {"steps": 1})

    def full(self, text, **settings):
        with open(self, "w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(type(tmp_path), "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_config(tmp_path, {"steps": 2})
    assert read_config(tmp_path) == {"steps": 1} and (tmp_path / CONFIG).is_file()
