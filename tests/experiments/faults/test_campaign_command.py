"""`faults`: a script drawn by a printed seed, jobs under it, and one process told what happened."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.faults import main as faults
from experiments.faults.scripts import read


@pytest.fixture
def ran(monkeypatch):
    """`calls` that the commands were given in place of running them, their exit `codes`, and
    `anchors` by folder."""
    ran = SimpleNamespace(calls=[], codes={"launch": 0, "train": 0}, anchors={})

    def fake(name):
        def command(argv):
            ran.calls.append((name, argv))
            return ran.codes[name]

        return command

    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr("experiments.regions.main.main", fake("launch"))
    monkeypatch.setattr("experiments.train.main.main", fake("train"))
    same = {"w": np.arange(3.0)}
    monkeypatch.setattr(faults, "_anchor", lambda path: ran.anchors.get(path.name, same))
    return ran


def test_the_seed_is_printed_and_gives_the_script_again(ran, tmp_path, capsys):
    given = ["--count=6", "--regions=3", "--config.batch=1"]
    assert main(["faults", *given, f"--workdir={tmp_path / 'a'}"]) == 0
    seed = int(capsys.readouterr().out.split()[1].rstrip(":"))
    assert main(["faults", *given, f"--seed={seed}", f"--workdir={tmp_path / 'b'}"]) == 0
    scripts = [read(str(tmp_path / name / faults.SCRIPT), 3, 240) for name in "ab"]
    assert scripts[0] == scripts[1] and len(scripts[0][0]) == 6 + 6
    (launch, argv), (train, told) = ran.calls[:2]
    assert (launch, train) == ("launch", "train")
    assert f"--faults={tmp_path / 'a' / faults.SCRIPT}" in argv and "--config.batch=1" in argv
    assert f"--config.faults={tmp_path / 'a' / 'jobs' / 'happened.yaml'}" in told
    assert "--config.batch=1" in told


@pytest.mark.parametrize("what", ["another anchor", "launch", "train"])
def test_what_is_wrong_is_named_with_the_command_that_repeats_it(what, ran, tmp_path, capsys):
    if what == "another anchor":
        ran.anchors["region1"] = {"w": np.array([0.0, 1.0, np.nextafter(2.0, 3.0)])}
    else:
        ran.codes[what] = 4
    given = ["--count=2", "--seed=5", f"--workdir={tmp_path}"]
    assert main(["faults", *given]) == 1
    said = capsys.readouterr().out
    assert "--seed=5 --count=2 --regions=3" in said
    parts = {"another anchor": "region 1 has another anchor", "launch": "launch ended with code 4"}
    assert parts.get(what, "one process ended with code 4") in said


def test_refusals(capsys):
    assert main(["faults", "--regions=1", "--count=0"]) == 2
    said = capsys.readouterr().err
    assert "--regions: at least 2" in said and "--count: at least 1" in said


@pytest.mark.slow
def test_a_campaign_of_a_few_faults(tiny, root, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # it adds to them
    given = [*tiny.arguments(root), "--config.method.period=6", "--config.batch=1"]
    given = [argument for argument in given if not argument.startswith("--config.regions")]
    given += ["--config.data.seq_len=16", "--config=diloco", "--count=4", "--seed=3"]
    assert main(["faults", *given, f"--workdir={root / 'faults'}"]) == 0
