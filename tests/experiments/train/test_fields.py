"""What the command line says of the fields of a config, and of a checked run."""

import inspect
import re
from pathlib import Path

import pytest
import yaml

from experiments.__main__ import main
from experiments.cli import fields, listing, load_config
from experiments.config import get_config, plain
from experiments.plan.config import FIELDS
from experiments.train.fields import descriptions, method_descriptions
from experiments.train.methods import DERIVED
from experiments.train.parts import PARTS
from lowcomm_jax import methods

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FILES = [f.stem for f in CONFIGS.glob("*.py") if f.stem not in ("__init__", "network")]
OF_OTHERS = [
    f for room in ("plan", "compare", "paper") for f in sorted((CONFIGS / room).glob("*.py"))
]
OF_OTHERS = [f for f in OF_OTHERS if "def get_config" in f.read_text()]


def test_descriptions_come_from_where_the_defaults_stand():
    found = descriptions({"name": "diloco", "period": 30}, {})
    assert found["batch"] == "sequences a region trains on per step"
    assert found["microbatches"].startswith("Microbatches of a region's batch in the pipeline; 0 =")
    assert found["data.val_fraction"].startswith("expected share of documents held out")
    assert found["inner.learning_rate"].startswith("peak, per inner step.")
    assert "2502.16982, section 2.2" in found["inner.muon_rms"]  # over several lines
    assert found["method.period"] == "H, inner steps per round."
    assert found["model.width"] == "entries of the residual stream. Unset = the preset's."
    assert found["eval.every"].startswith("inner steps between evaluations")


def test_every_field_is_listed_with_its_value():
    shown = listing(plain(get_config()), {}).splitlines()
    assert "  --config.steps=600" in shown
    assert "  --config.method.outer.name='nesterov'" in shown
    assert "  --config.tokens=unset" in shown
    names = [line.strip() for line in shown if line.startswith("  --config.")]
    assert len(names) == len(set(names)) > 90


@pytest.mark.parametrize("name", FILES)
def test_every_field_of_every_config_is_described(name):
    config, _ = load_config(name, ())
    found = descriptions(plain(config)["method"], plain(config)["model"])
    assert not [field for field in fields(config) if not found.get(field)]


@pytest.mark.parametrize("name", methods.NAMES)
def test_every_keyword_of_every_method_is_described(name):
    keywords = [k for k in inspect.signature(methods.NAMES[name]).parameters if k != DERIVED]
    found = method_descriptions({"name": name, **dict.fromkeys(keywords)})
    assert not [keyword for keyword in keywords if not found.get(keyword)]


@pytest.mark.parametrize("key", PARTS)
def test_every_setting_of_every_part_is_described(key):
    for name, maker in PARTS[key].known.items():
        maker = type(maker.codec) if isinstance(maker, tuple) else maker
        settings = inspect.signature(maker).parameters.keys() - {*PARTS[key].derived}
        found = method_descriptions(
            {"name": "diloco", key: {"name": name, **dict.fromkeys(settings)}}
        )
        assert name in found[f"{key}.name"]
        assert not [setting for setting in settings if not found.get(f"{key}.{setting}")], name


def test_a_part_says_what_it_decides_and_its_names():
    found = method_descriptions({"name": "diloco", "landing": None})
    assert found["landing"].startswith("how a region adopts the moved anchor; None = the method's")
    assert "taylor_delay_correction" in found["landing"]


def test_methods_and_parts_of_ones_own_need_no_docstring():
    method = {"name": "own_parts:plain", "period": 3, "mine": {"a": 1}, "codec": {"k": 1}}
    found = method_descriptions({**method, "outer": {"name": "own_parts:drag", "rate": 1.0}})
    assert found["outer.name"].startswith("how the anchor moves")
    assert not {"period", "mine", "mine.a", "outer.rate"} & set(found)


def test_a_factory_of_ones_own_may_be_described_in_another_style():
    found = method_descriptions({"name": "own_parts:by_numpy", "period": 3, "rate": 0.5})
    assert found["period"] == "Steps between two rounds." and found["rate"] == "How fast."


def test_a_line_inside_a_description_is_no_description_of_its_own():
    schedule = {"name": "staggered", "period": 8, "land_after_send": False}
    found = method_descriptions({"name": "diloco", "schedule": schedule})
    assert found["schedule.period"].startswith("H, inner optimizer steps between two syncs")
    assert "whole period: a fragment in flight is sent again" in found["schedule.land_after_send"]


def test_help_knows_the_config_it_is_given(capsys):
    assert main(["train", "--help", "--config=configs/noloco.py", "--config.steps=7"]) == 0
    shown = capsys.readouterr().out
    assert "--config.steps=7\n" in shown and "--config.method.gamma" in shown


def told(command, path, capsys):
    """What help says of each field of a config, and of each section: dotted name -> text."""
    assert main([*command.split(), "--help", f"--config={path}"]) == 0
    found = re.split(r"^  --config\.", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    lines = (entry.partition("\n") for entry in found)
    return {re.match(r"[^=:]+", head)[0]: " ".join(text.split()) for head, _, text in lines}


@pytest.mark.parametrize("path", OF_OTHERS, ids=lambda path: path.stem)
def test_help_of_plans_and_comparisons_describes_every_field_or_its_section(path, capsys):
    command = "plan" if path.parent.name == "plan" else "compare"
    found = told("plan --goodput" if path.stem == "goodput" else command, path, capsys)
    names = fields(load_config(str(path), ())[0])
    assert {*names} <= {*found}
    texts = {name for name, text in found.items() if text}
    assert not [n for n in names if n not in texts and not texts & {*sections(n)}]


def sections(name):
    """Every section that a field is in."""
    return (name[: dot.start()] for dot in re.finditer(r"\.", name))


def test_what_help_says_of_plans_and_comparisons(capsys):
    found = told("plan", "configs/plan/template.py", capsys)
    assert found["tokens"] == "training tokens over all regions; 0 = 20 per parameter"
    assert found["methods.diloco.period"] == "H, inner steps per round."
    assert found["scenario.rank"].startswith("DiLoCoX: the measured rank of every mean")
    assert found["mesh"].startswith("Sizes of the axes") and not found["mesh.fsdp"]
    found = told("quick", "configs/compare/quick.py", capsys)
    assert found["common.steps"] == "inner steps of the run; 0 = as many as `tokens` asks for"
    assert found["draws"] == "number of random points; None = the whole grid"
    assert found["variants"].startswith("By name: `config`, a file in configs/")
    target = "plan --target=h100:1x1"
    assert told(target, "configs/diloco.py", capsys)["batch"].startswith("sequences a region")


def test_help_of_a_comparison_whose_sections_are_texts(tmp_path, capsys):
    """Not a traceback: it is for those who do not know yet what to write."""
    file = tmp_path / "texts.py"
    file.write_text(
        "from experiments.compare.config import comparison, variant\n"
        "def get_config():\n"
        "    common = {'steps': 10, 'model': 'diloco_150m', 'method': 'diloco'}\n"
        "    return comparison({'a': variant('diloco')}, 'a', common=common)\n"
    )
    found = told("compare", file, capsys)
    assert found["common.steps"].startswith("inner steps of the run")


def test_the_template_of_a_plan_has_every_field():
    assert {*load_config("configs/plan/template.py", ())[0]} == {*FIELDS}


def test_help_of_a_plan_shows_what_the_line_sets(capsys):
    assert main(["plan", "--help", "--config=configs/plan/template.py", "--config.mfu=0.3"]) == 0
    shown = capsys.readouterr().out
    assert "--explain" in shown and "--config.mfu=0.3\n" in shown
    assert "--config.methods.diloco.period=30\n" in shown
    assert main(["plan", "--help", "--config.mfus=1", "--config=configs/plan/template.py"]) == 2
    assert "did you mean mfu?" in capsys.readouterr().err


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
