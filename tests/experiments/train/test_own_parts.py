"""Parts of one's own, named in a config: built, refused, and found again by other commands."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import own_parts
import pytest
from refused_lines import lines_of

import lowcomm_jax as lc
from experiments import progress
from experiments.__main__ import main
from experiments.cli import load_config, override
from experiments.config import base, plain
from experiments.train import parts
from experiments.train.fields import method_descriptions
from experiments.train.methods import make_method
from experiments.train.parts import inner_config
from lowcomm_jax.compression import Integer, PerTensor
from lowcomm_jax.optimizers import InnerConfig, make_optimizer

ONE = {"name": "diloco", "period": 4}


def made(**fields):
    method, problems = make_method({**ONE, **fields}, ("blocks",), 5)
    assert problems == []
    return method


def problems_of(**fields):
    _, problems = make_method({**ONE, **fields})
    assert problems
    return "\n".join(problems)


# -- what is built -----------------------------------------------------------------------------


def test_a_codec_by_name_or_with_settings():
    codec = made(codec="own_parts:RowSign").codec
    assert codec.default == own_parts.RowSign() and codec.stacked == ("blocks",)
    codec = made(codec={"name": "own_parts:RowSign", "scale": 0.3, "error_feedback": 0.5}).codec
    assert codec.codec.default.scale == 0.3 and codec.decay == 0.5
    codec = made(codec={"name": "own_parts:RowSign", "rules": [("norm", "fp32")]}).codec
    assert codec.rules[0][1].name == "fp32"
    codec = made(codec="own_parts:whole_codec").codec
    assert (codec.stacked, codec.seed) == (("blocks",), 5)  # settled by the run


def test_a_codec_itself_is_named_as_its_class_is():
    codec = made(codec="own_parts:SIGNS").codec
    assert codec.default == own_parts.RowSign(0.3)
    assert (codec.stacked, codec.seed) == (("blocks",), 5)
    codec = made(codec={"name": "own_parts:SIGNS", "scale": 0.2, "error_feedback": 0.5}).codec
    assert codec.codec.default.scale == 0.2 and codec.decay == 0.5
    assert made(name="sparseloco", codec="own_parts:SIGNS").codec.default == own_parts.SIGNS
    codec = made(codec={"name": "topk", "values": "own_parts:SIGNS"}).codec
    assert codec.default.values == own_parts.SIGNS
    config = base("diloco", period=4, codec={"name": "own_parts:SIGNS", "scale": 0.2})
    assert plain(config)["method"]["codec"] == {"name": "own_parts:SIGNS", "scale": 0.2}
    given = {"name": "own_parts:FACTORS", "rank": 3}
    assert method_descriptions({"name": "diloco", "codec": given})["codec.rank"] == "r."


def test_a_codec_that_holds_another_takes_its_name_and_needs_what_has_no_default():
    codec = made(codec={"name": "own_parts:Halves", "half": 0.5, "values": "int8"}).codec
    assert codec.default == own_parts.Halves(0.5, Integer(8))
    assert "own_parts:Halves needs its setting 'half'" in problems_of(codec="own_parts:Halves")
    assert "own_parts:Unfinished" in problems_of(codec="own_parts:Unfinished")
    found = problems_of(codec={"name": "own_parts:Halves", "half": 1.0, "value": 2})
    assert "has no setting 'value': choose from half, values" in found


def test_a_method_takes_a_codec_of_leaves_as_it_is():
    codec = dataclasses.replace(lc.methods.diloco(5), codec=own_parts.RowSign()).codec
    assert codec == PerTensor(own_parts.RowSign())


def test_an_inner_optimizer_of_ones_own():
    section = dataclasses.asdict(InnerConfig(b1=0.5, clip_norm=None, weight_decay=0.0))
    inner, problems = inner_config({**section, "optimizer": "own_parts:lion"})
    assert not problems and not inner.violations(1000)
    optimizer = make_optimizer(dataclasses.replace(inner, schedule="constant"), 1000)
    params = {"w": jnp.ones((2, 2))}
    given = {"w": jnp.array([[2.0, -3.0], [0.1, 0.0]])}
    moved, _ = optimizer.update(given, optimizer.init(params), params)
    rate = inner.learning_rate / inner.warmup_steps
    np.testing.assert_allclose(moved["w"], -rate * np.sign(given["w"]), rtol=1e-6)
    for name, line in {
        "own_parts:nothing": "own_parts has no function 'nothing'",
        "own_parts:fours": "it returned a Gossip",
        "lamb": "choose one of adamw, adopt, muon, sgd",
    }.items():
        inner, problems = inner_config({**section, "optimizer": name})
        problems = problems or inner.violations(1000)
        assert line in problems[0], problems


def test_factories_that_build_their_codecs_take_ones_own():
    name = {"name": "dilocox", "codec": "own_parts:whole_codec"}
    assert made(**name).codec.default == own_parts.RowSign()
    assert made(name="sparseloco", codec="own_parts:whole_codec").codec.seed == 5


def test_the_outer_rule_moves_the_anchor():
    rule = made(outer={"name": "own_parts:drag", "rate": 0.3, "limit": None}).outer
    moved, _ = rule.update(jnp.full(2, 2.0), rule.init(jnp.ones(2)), jnp.ones(2), staleness=0)
    np.testing.assert_allclose(moved, -0.6, rtol=1e-6)
    assert made(name="own_parts:plain", outer="average").outer is not None


def test_parts_that_the_factory_does_not_take_replace_the_methods_own():
    method = made(schedule={"name": "own_parts:late", "period": 6, "delay": 2})
    assert (method.schedule.period, method.schedule.fragments, method.schedule.delay) == (6, 2, 2)
    rule = made(landing={"name": "own_parts:fading", "half_life": 2.0}).landing
    left, _ = rule.update(jnp.full(2, 8.0), rule.init(jnp.ones(2)), jnp.ones(2), staleness=4)
    np.testing.assert_allclose(left, 2.0)
    assert made(landing={"name": "blend", "alpha": 0.3}).landing is not None  # the package's
    noloco = made(name="noloco", topology="own_parts:fours")
    assert noloco.topology.group_size == 4 and noloco.topology.consensus.group_size == 4
    assert made(inner_batching={"name": "own_parts:thirds", "start": 2}).inner_batching.start == 6


def test_every_part_of_a_method_has_a_row():
    fields = set(type(made()).__dataclass_fields__)
    assert set(parts.PARTS) <= fields
    for key, row in parts.PARTS.items():
        for name, maker in row.known.items():
            kind = type(maker.codec) if key == "codec" else maker
            assert kind.__module__.startswith("lowcomm_jax."), name


# -- what is refused ---------------------------------------------------------------------------


OF_CODECS = {  # `compression.make` says what there is, too
    "sise=3: own_parts:fours has no such setting": "has no setting 'sise': choose from none",
    "rate is missing: own_parts:drag needs it": "own_parts:drag needs its setting 'rate'",
}


@pytest.mark.parametrize("key", list(parts.PARTS))
@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("nothing_here:part", "No module named 'nothing_here'; name a module that Python finds"),
        ("own_parts:parts", "own_parts has no function 'parts'"),
        ("own_parts:number", "own_parts has no function 'number'"),
        ("own_parts:text", "it returned a str, and must return "),
        ({"name": "own_parts:fours", "sise": 3}, "sise=3: own_parts:fours has no such setting"),
        ({"name": "own_parts:drag"}, "rate is missing: own_parts:drag needs it"),
        ("no_such", "no_such"),
        (7, "is a int, which no config.json holds"),
    ],
)
def test_every_part_is_refused_with_one_clear_line(key, value, line):
    found = problems_of(**{key: value})
    line = OF_CODECS.get(line, line) if key == "codec" else line
    assert line in found and f"method.{key}" in found and "\n" not in found


def test_a_module_that_fails_is_told_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_parts.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    line = "broken_parts cannot be imported: RuntimeError: no licence"
    assert line in problems_of(codec="broken_parts:codec")
    assert line in problems_of(name="broken_parts:method")


def test_a_method_of_ones_own_must_be_one():
    assert "must return a lowcomm_jax.methods.Method" in problems_of(name="own_parts:text")
    assert make_method({"name": "own_parts:plain", "period": 3, "extra": 1})[1] == []
    assert "method.period is missing" in problems_of(name="own_parts:plain", period=None)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"name": "ddp", "landing": "own_parts:fading"}, "ddp exchanges a gradient at every step"),
        ({"name": "ddp", "schedule": "own_parts:late"}, "ddp exchanges a gradient"),
        ({"name": "noloco", "outer": "average"}, "noloco checks its outer rule's coefficients"),
        ({"name": "eager_diloco", "schedule": "own_parts:late"}, "with land_after_send=True"),
    ],
)
def test_a_part_that_the_method_cannot_have_is_refused(fields, line):
    if fields.get("schedule"):
        fields["schedule"] = {"name": fields["schedule"], "period": 4}
    known = {} if fields["name"] == "ddp" else {"period": 4}
    method, problems = make_method({**known, **fields})
    assert method is None and line in problems[0] and len(problems) == 1


def test_topologies_go_with_methods_that_gossip():
    assert "gossip needs anchors='per_region'" in "\n".join(
        lines_of(made(topology="own_parts:fours"), 8)
    )


def test_settings_of_one_leafs_codec_are_refused_with_a_whole_one():
    spec = {"name": "own_parts:whole_codec", "reduce": "all_gather"}
    assert "it is a whole codec, reduce: only a codec of leaves takes it" in problems_of(codec=spec)
    spec = {"name": "own_parts:RowSign", "rules": "noone"}
    assert "rules='noone' is unknown" in problems_of(codec=spec)


# -- configs and command lines -----------------------------------------------------------------


def test_all_keywords_of_an_own_part_are_fields():
    outer = {"name": "own_parts:drag", "rate": 0.3}
    config = base("diloco", period=4, outer=outer, landing={"name": "own_parts:fading"})
    assert config.method.landing.half_life == 2.0 and config.method.outer.limit is None
    for change in ("method.outer.limit=0.5", "method.outer.rate=0.4", "method.landing.half_life=1"):
        assert override(config, *change.split("=")) is None
    assert plain(config)["method"]["outer"] == {**outer, "rate": 0.4, "limit": 0.5}
    assert make_method(plain(config)["method"])[1] == []


@pytest.mark.parametrize("name", ["diloco", "dilocox", "configs/streaming_diloco.py"])
def test_the_command_line_names_parts(name):
    config, problems = load_config(
        name,
        [
            ("method.codec", "own_parts:whole_codec"),
            ("method.outer", "average"),  # was a section with settings of another rule
            ("method.landing", "own_parts:fading"),
        ],
    )
    assert problems == []
    method, problems = make_method(plain(config)["method"])
    assert problems == [] and method.codec.default == own_parts.RowSign()
    assert method.landing is not None
    config.method.codec = {"name": "own_parts:RowSign", "scale": 0.3}  # text and mapping alike
    assert make_method(plain(config)["method"])[1] == []


# -- a run -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_of_own_parts_is_resumed_sampled_exported_and_reported(
    tmp_path, tiny, monkeypatch, capsys
):
    tiny.corpus(tmp_path / "texts")
    folder = tmp_path / "run"
    given = tiny.arguments(
        tmp_path,
        "--config=diloco",
        "--config.steps=8",
        "--config.method.period=4",
        "--config.method.codec=own_parts:RowSign",
        "--config.method.outer=own_parts:steady",
        "--config.method.landing=own_parts:fading",
        "--config.eval.every=0",
        "--config.checkpoint.every=4",
        f"--workdir={folder}",
        "--quiet",
    )
    for _ in range(2):  # trained, and found complete
        assert main(["train", *given]) == 0
    stored = json.loads((folder / "config.json").read_text())["method"]
    assert stored["outer"] == "own_parts:steady" and stored["codec"] == "own_parts:RowSign"
    assert main(["sample", f"--workdir={folder}", "--length=4"]) == 0
    output = tmp_path / "exported"
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
    assert main(["export", f"--workdir={folder}", f"--output={output}"]) == 0
    assert (output / "model.safetensors").is_file()
    told = capsys.readouterr().err
    assert "export: 1/3" in told and "left  writes the weights" in told
    assert main(["report", str(folder)]) == 0
