"""`tests/campaigns.py`: a script drawn by a seed, jobs under it, one process told what happened."""

import os
from pathlib import Path
from types import SimpleNamespace

import campaigns
import numpy as np
import pytest

from experiments.faults.scripts import read


@pytest.fixture
def ran(monkeypatch):
    """`calls` that commands were given in place of running them, their `scripts`, their exit
    `codes`, and `anchors` by folder."""
    ran = SimpleNamespace(calls=[], codes={"launch": 0, "train": 0}, anchors={}, scripts=[])

    def command(arguments, log, until):
        ran.calls.append(arguments)
        for given in arguments:
            if given.startswith("--faults="):
                ran.scripts.append(Path(given.removeprefix("--faults=")).read_text())
        return ran.codes[arguments[0]]

    monkeypatch.setattr(campaigns, "command", command)
    same = {"w": np.arange(3.0)}
    monkeypatch.setattr(campaigns, "anchor", lambda path: ran.anchors.get(path.name, same))
    return ran


def test_the_seed_is_printed_and_gives_the_script_again(ran, tmp_path, capsys):
    given = [str(tmp_path), "--count=6", "--config=diloco", "--config.batch=1"]
    assert campaigns.main(given) == 0
    seed = int(capsys.readouterr().out.split()[1].rstrip(":"))
    (launch, *how), (train, *told) = ran.calls
    assert campaigns.main([*given, f"--seed={seed}"]) == 0
    assert ran.scripts[0] == ran.scripts[1] and ran.scripts[0].count("\n") == 6 + 6
    assert (launch, train) == ("launch", "train")
    workdir = tmp_path / str(seed)
    assert f"--faults={workdir / campaigns.SCRIPT}" in how and "--config.batch=1" in how
    assert f"--config.faults={workdir / 'jobs' / 'happened.yaml'}" in told
    assert "--config.batch=1" in told


@pytest.mark.parametrize("what", ["another anchor", "launch", "train"])
def test_what_is_wrong_is_named_and_the_script_stays(what, ran, tmp_path, capsys):
    if what == "another anchor":
        ran.anchors["region1"] = {"w": np.array([0.0, 1.0, np.nextafter(2.0, 3.0)])}
    else:
        ran.codes[what] = 4
    assert campaigns.main([str(tmp_path), "--config=diloco", "--count=2", "--seed=5"]) == 1
    said = capsys.readouterr().out
    parts = {"another anchor": "region 1 has another anchor", "launch": "launch ended with code 4"}
    assert parts.get(what, "train ended with code 4") in said
    assert len(read(str(tmp_path / "5" / campaigns.SCRIPT), 3, 80)[0]) == 6 + 2


def test_the_list_has_texts_of_its_own_and_takes_seeds(ran, tmp_path, capsys):
    assert campaigns.main([str(tmp_path), "1013", "1004"]) == 0
    said = capsys.readouterr().out
    assert "3 diloco store 1013 equal" in said and "4 diloco store 1004 equal" in said
    assert f"--config.data.corpus=text:{tmp_path / 'texts'}" in ran.calls[0]
    assert (tmp_path / "texts" / "regions.txt").is_file()


@pytest.mark.parametrize("given", ["--regions=1", "--count=0", "--count=9 --steps=9", "--batch=1"])
def test_refusals(given, tmp_path):
    with pytest.raises(SystemExit):
        campaigns.main([str(tmp_path), "--config=diloco", *given.split()])


@pytest.mark.slow
def test_a_campaign_of_a_few_faults(tiny, root, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # it adds to them
    cut = ("--config.regions", "--compile_cache")
    given = [argument for argument in tiny.arguments(root) if not argument.startswith(cut)]
    given += ["--config.method.period=6", "--config.batch=1", "--config.data.seq_len=16"]
    given += ["--config=diloco", "--count=4", "--seed=3"]
    assert campaigns.main([str(root / "faults"), *given]) == 0
