"""What the command line says of the fields of a config, and of a checked run."""

import yaml

from experiments.__main__ import main
from experiments.config import get_config
from experiments.train.fields import descriptions, listing


def test_descriptions_come_from_where_the_defaults_stand():
    found = descriptions()
    assert found["batch"] == "sequences a region trains on per step"
    assert found["microbatches"].startswith("Microbatches of a region's batch in the pipeline; 0 =")
    assert found["data.val_fraction"].startswith("expected share of documents held out")
    assert found["inner.learning_rate"].startswith("peak, per inner step.")
    assert "2502.16982, section 2.2" in found["inner.muon_rms"]  # over several lines
    assert found["inner.b1"] == found["inner.eps"] == "AdamW's moments."
    assert found["eval.every"].startswith("inner steps between evaluations")


def test_every_field_is_listed_with_its_value():
    shown = listing(get_config()).splitlines()
    assert "  --config.steps=600" in shown
    assert "  --config.method.outer.name='nesterov'" in shown
    assert "  --config.tokens=unset" in shown
    names = [line.strip() for line in shown if line.startswith("  --config.")]
    assert len(names) == len(set(names)) > 90


def test_help_knows_the_config_it_is_given(capsys):
    assert main(["train", "--help", "--config=configs/noloco.py", "--config.steps=7"]) == 0
    shown = capsys.readouterr().out
    assert "--config.steps=7\n" in shown and "--config.method.gamma" in shown


def test_a_misspelt_field_beside_help_is_named(capsys):
    assert main(["train", "--help", "--config.stepz=7"]) == 2
    assert "did you mean steps?" in capsys.readouterr().err


def test_the_checked_config_with_what_follows_from_it(capsys, tmp_path):
    config = ["--config=configs/diloco.py", "--config.steps=0", "--config.tokens=1000000"]
    assert main(["train", *config, "--print-config", f"--workdir={tmp_path / 'run'}"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["config"]["tokens"] == 1000000 and shown["config"]["steps"] == 0
    derived = shown["derived"]
    assert derived["steps"] == -(-1000000 // derived["tokens_per_step"])
    assert derived["model"]["layers"] == 4 and derived["inner"]["b2"] == 0.95
    assert not (tmp_path / "run").exists()
