"""A model of one's own from the command line: trains, resumes, is compared and planned."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest
from compare_cases import recording
from compare_cases import tiny as tiny_fields
from launched import comparable

from examples.mixture_of_experts import Mixture
from experiments.__main__ import main
from experiments.cli import RefusedError, listing, load_config, model_section
from experiments.compare.config import comparison, variant
from experiments.compare.main import compare
from experiments.compare.plan import plan
from experiments.config import base, plain
from experiments.metrics import read_records
from experiments.plan import main as planning
from experiments.train.fields import descriptions
from experiments.train.loop import TrainingLoop
from experiments.train.resolve import resolve
from lowcomm_jax.interrupt import EXIT_INTERRUPTED
from lowcomm_jax.models import Trainable, build, preset

MIXTURE = "examples.mixture_of_experts:Mixture"
SIZES = ("layers=2", "width=16", "heads=2", "hidden=24", "experts=4")
METHODS = {
    "diloco": ("method.period=4",),
    "streaming_diloco": ("method.period=4", "method.fragments=2", "method.overlap=1"),
    "decoupled_diloco": (
        *("method.period=4", "method.fragments=2", "method.overlap=1"),
        *("method.speeds=(1.0, 0.9, 0.7)", "method.outages=()"),
    ),
    "spes": ("method.period=4", "method.merge_every=8", "method.until=24"),
}


def listed(config):
    """The fields of a config as `train --help` lists them."""
    config = plain(config)
    return listing(config, descriptions(config["method"], config["model"]))


def arguments(tiny, root, workdir, config="diloco", model=MIXTURE, sizes=SIZES, steps=24):
    """A tiny run of a model of one's own; what the built-in decoder alone has is left out."""
    common = [a for a in tiny.arguments(root) if not a.startswith("--config.model.")]
    fields = (*METHODS[config], f"steps={steps}", "eval.every=8", "checkpoint.every=8")
    return [
        f"--config={config}",
        *common,
        *(f"--config.{field}" for field in fields),
        # Before the model: sections come before their fields whatever the order.
        *(f"--config.model.{field}" for field in sizes),
        f"--config.model={model}",
        "--config.inner.learning_rate=0.02",
        f"--workdir={workdir}",
        "--quiet",
    ]


def learnt(folder):
    """Losses of the anchor, and all that a resumed run has in common with one that ran through."""
    records = comparable(folder)
    return [r["anchor"] for r in records if r["kind"] == "eval"], records


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Models of users broadcast; the suite's own code does not."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def whole(root, tiny):
    """A run of the mixture by DiLoCo."""
    with jax.numpy_rank_promotion("allow"):
        assert main(["train", *arguments(tiny, root, root / "whole")]) == 0
    return root / "whole"


def test_the_mixture_trains(whole):
    losses, records = learnt(whole)
    assert losses[-1] < 0.8 * losses[0]
    header, steps = records[0], [r for r in records if r["kind"] == "step"]
    config = header["config"]["model"]
    assert config["name"] == MIXTURE and config["experts"] == 4
    assert config["top_k"] == 2  # the factory's default stands in the run's config
    assert header["flops_per_token"] > 0 and header["params"] == header["trained_params"]
    assert all(0 <= share < 0.5 for share in steps[-1]["dropped"])  # what its aux reports
    assert all(0 < share <= 1 for share in steps[-1]["filled"])


@pytest.mark.parametrize("config", ["streaming_diloco", "decoupled_diloco", "spes"])
def test_the_mixture_trains_by_other_methods(root, tiny, config):
    folder = root / config
    assert main(["train", *arguments(tiny, root, folder, config)]) == 0
    losses, _ = learnt(folder)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("over", ["tensor", "fsdp"])
def test_experts_over_devices_train_as_on_one(whole, root, tiny, over):
    folder = root / f"cut_{over}"
    command = arguments(tiny, root, folder, sizes=(*SIZES, f"over={over}"))
    assert main(["train", *command, "--config.mesh.tensor=2", "--config.mesh.fsdp=2"]) == 0
    np.testing.assert_allclose(learnt(folder)[0], learnt(whole)[0], rtol=1e-3)


def test_it_resumes_bit_for_bit(whole, root, tiny, monkeypatch):
    evaluate, folder = TrainingLoop._evaluate, root / "broken"

    def interrupts(loop, *given, **named):
        evaluate(loop, *given, **named)
        if loop.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TrainingLoop, "_evaluate", interrupts)
    command = ["train", *arguments(tiny, root, folder)]
    assert main(command) == EXIT_INTERRUPTED
    monkeypatch.setattr(TrainingLoop, "_evaluate", evaluate)
    assert main(command) == 0
    assert any(r["kind"] == "resume" for r in read_records(folder / "metrics.jsonl"))
    assert learnt(folder) == learnt(whole)


def test_other_settings_of_the_model_are_another_run(whole, root, tiny, capsys):
    sizes = [*SIZES[:-1], "experts=8"]
    assert main(["train", *arguments(tiny, root, whole, sizes=sizes)]) == 2
    assert "model.experts: 4 -> 8" in capsys.readouterr().err


def test_it_is_reported(whole, capsys):
    assert main(["report", str(whole)]) == 0
    assert "diloco" in capsys.readouterr().out


def test_another_run_starts_from_its_anchor(whole, root, tiny):
    command = arguments(tiny, root, root / "again", steps=4)
    assert main(["train", *command, f"--config.model.init_from={whole}"]) == 0
    assert learnt(root / "again")[0][0] == learnt(whole)[0][-1]


@pytest.mark.parametrize("command", [["export", "--output=out"], ["sample"]])
def test_what_needs_the_decoder_is_refused(whole, command, capsys):
    assert main([*command, f"--workdir={whole}"]) == 2
    error = capsys.readouterr().err
    assert MIXTURE in error and f"{command[0]} needs the built-in decoder" in error


def test_methods_are_compared_on_it(root):
    decoder = {**tiny_fields(root), "regions": 2}
    fields = {k: v for k, v in decoder.items() if k != "model"}
    fields["inner"] = {"warmup_steps": 2, "learning_rate": 0.02}
    pairs = {"name": "own_models:pairs", "scale": 0.1}
    streaming = {"period": 6, "fragments": 1, "overlap": 1}
    variants = {
        "diloco": variant("diloco", method={"period": 3}, model=pairs),
        "streaming": variant("streaming_diloco", method=streaming, model=pairs),
        "decoder": variant("diloco", method={"period": 3}, model=decoder["model"]),
    }
    settings = comparison(variants, "diloco", seeds=(0,), common=fields, compile_cache="off")
    assert compare(settings, root / "compared", recording()) == 0
    result = json.loads((root / "compared" / "compare.json").read_text())
    for name in variants:  # judged on the same documents, with logits and without
        row = result["variants"][name]
        assert row["curve"][-1]["mean"] < row["curve"][0]["mean"]


@pytest.mark.parametrize("searches", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_planned(tmp_path, capsys, monkeypatch, searches):
    if not searches:
        monkeypatch.setattr(planning, "search", lambda work, bound_nats, progress: (None, [], 0))
    config, _ = load_config("configs/plan/template.py", [])
    model = f"{{name: {MIXTURE}, vocab_size: 258}}"
    command = ["plan", "--config=configs/plan/template.py", f"--config.model={model}"]
    methods = {"diloco": {"preset": "diloco", "period": 30}}
    command += [f"--config.methods={methods}"]
    assert main([*command, f"--workdir={tmp_path}"]) == 0
    found, shown = json.loads((tmp_path / "plan.json").read_text()), capsys.readouterr().out
    built = Mixture(258)
    each = built.flops_per_token(config.seq_len) * config.tokens_per_step
    each /= len(found["network"]["regions"])
    speed = config.devices_per_region * config.flops_per_device * config.mfu
    assert found["step_s"] == pytest.approx(each / speed)
    params = jax.eval_shape(built.init, jax.random.key(0))
    assert found["params"] == sum(x.size for x in jax.tree.leaves(params))
    assert "without activations" in shown
    assert (found["best"] is not None) is (found["settings_tried"] > 0) is searches
    planned, problems = load_config(str(tmp_path / "diloco.py"), [])
    assert not problems and planned.model.name == MIXTURE and planned.model.vocab_size == 258


def test_a_plan_says_what_it_needs(tmp_path, capsys):
    command = ["plan", "--config=configs/plan/template.py", f"--workdir={tmp_path}"]
    pairs = "--config.model={name: own_models:pairs, vocab_size: 258}"
    assert main([*command, pairs, "--config.device_gb=80.0", "--config.mesh.stage=2"]) == 2
    error = capsys.readouterr().err
    assert "no flops_per_token: give it one, or give compute_s" in error
    assert "device_gb: a plan knows no activations" in error
    assert "mesh.stage is 2: stages are cut of the built-in decoder alone" in error
    assert main([*command, f"--config.model={MIXTURE}"]) == 2
    assert "takes vocab_size: give {name:" in capsys.readouterr().err


# -- evaluations ----------------------------------------------------------------------------------


def test_evaluations_by_the_loss_equal_those_by_logits(root, tiny):
    found = {}
    for name in ("pairs", "pairs_with_logits"):
        command = arguments(tiny, root, root / name, model=f"own_models:{name}", sizes=(), steps=8)
        assert main(["train", *command]) == 0
        records = read_records(root / name / "metrics.jsonl")
        found[name] = [r for r in records if r["kind"] in ("eval", "eval_set")]
    for by_loss, by_logits in zip(found["pairs"], found["pairs_with_logits"], strict=True):
        if by_loss["kind"] == "eval_set":
            assert by_loss == by_logits
        else:
            assert by_loss["anchor"] == pytest.approx(by_logits["anchor"], rel=1e-5)
            sums = by_loss["document_sum"], by_logits["document_sum"]
            np.testing.assert_allclose(*sums, rtol=1e-4)


# -- what the factory gives -----------------------------------------------------------------------


def refusals(tmp_path, model, **settings):
    config = base("diloco", period=4)
    with config.unlocked():
        config.model = {"name": model, **settings}
    with pytest.raises(RefusedError) as error:
        resolve(config, tmp_path / "run")
    return error.value.problems


@pytest.mark.parametrize(
    "model, part",
    [
        ("nowhere:made", "No module named 'nowhere'; name a module that Python finds"),
        (":pairs", "model=':pairs': it names no module: write module:function"),
        ("own_models:", "model='own_models:': it names no function: write module:function"),
        ("own_models:pair", "own_models has no function 'pair'; did you mean pairs"),
        ("diloco_150m", "a size of the built-in one is model.preset; your own: module:function"),
        (
            "own_models:lone_init",
            "must return a lowcomm_jax.models.Trainable: an object with the functions init",
        ),
        ("own_models:no_functions", "its init and loss_fn must be a function"),
        ("own_models:vector_loss", "loss_fn must return a scalar loss, or (loss, aux)"),
        ("own_models:failing_loss", "loss_fn raises KeyError: 'y'"),
        ("own_models:named", "it takes name; fields of the section have this name: rename it"),
        ("own_models:failing", "it raises KeyError: 'no such thing'; mend it there"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, model, part):
    (line,) = refusals(tmp_path, model)
    assert part in line and model in line


def test_wrong_optional_parts_are_refused(tmp_path):
    found = refusals(tmp_path, "own_models:wrong_parts")
    assert [line.split("its ")[1].partition(":")[0] for line in found] == [
        "specs",
        "flops_per_token",
        "stacked",
        "logits",
    ]
    assert found[1].endswith("it gives something else; give a number above 0, or leave it out")
    assert "it raises KeyError: 'no'" in found[3]


def test_what_a_config_holds_and_a_factory_is_given(tmp_path):
    config = base("diloco", period=4)
    config.model = model_section("own_models:pairs", extra=(3, 4))
    job = resolve(config, tmp_path / "run")
    assert job.config["model"] == {
        "name": "own_models:pairs",
        "init_from": None,
        "vocab_size": None,
        "scale": 0.0,
        "extra": [3, 4],  # as config.json has it
    }
    assert job.model.settings["extra"] == (3, 4) and not job.vocab_settled
    config.model.extra = None  # it switches an optional setting off
    assert resolve(config, tmp_path / "run").model.settings["extra"] is None


def test_settings_that_do_not_fit_are_refused(tmp_path):
    (line,) = refusals(tmp_path, "own_models:pairs", scales=2.0)
    assert "model.scales=2.0: own_models:pairs has no such setting; did you mean scale?" in line
    (line,) = refusals(tmp_path, MIXTURE, top_k=9)
    assert "top_k=9: use 1 to experts=4" in line
    (line,) = refusals(tmp_path, MIXTURE, init_from="nowhere")
    assert "give the workdir of another run of this model" in line


def test_stages_are_for_the_decoder(tmp_path):
    config = base("diloco", period=4)
    config.model = model_section(MIXTURE)
    config.mesh.stage = 2
    with pytest.raises(RefusedError, match="stages are cut of the built-in decoder alone"):
        resolve(config, tmp_path / "run")


def test_settings_are_typed_and_described():
    config, problems = load_config(
        "diloco", [("model.experts", "8"), ("model", MIXTURE), ("model.vocab_size", "300")]
    )
    assert not problems and (config.model.experts, config.model.vocab_size) == (8, 300)
    shown = listed(config)
    assert "experts of a block." in shown and "--config.model.preset" not in shown
    _, problems = load_config("diloco", [("model", MIXTURE), ("model.experts", "many")])
    assert problems == ["--config.model.experts=many: give a whole number, as 4"]


def test_a_class_is_a_factory():
    config, problems = load_config("diloco", [("model", "own_models:Plain"), ("model.size", "9")])
    assert not problems and config.model.size == 9
    assert "of its vocabulary." in listed(config)


def test_all_runs_of_a_comparison_take_one_model():
    given = [("common.model.experts", "8"), ("common.model", MIXTURE)]
    config, problems = load_config("configs/compare/quick.py", given)
    assert not problems and config.common.model.name == MIXTURE
    assert (config.common.model.experts, config.common.model.top_k) == (8, 2)
    _, problems = load_config("configs/compare/quick.py", [*given, ("common.model.expert", "8")])
    assert "--config.common.model.expert: there is no such field" in problems[0]


def test_a_setting_of_the_model_is_varied(root):
    model = {"name": "own_models:pairs"}
    fields = {k: v for k, v in tiny_fields(root).items() if k != "model"}
    one = {"diloco": variant("diloco", method={"period": 3}, model=model)}
    settings = comparison(one, "diloco", seeds=(0,), common=fields, vary=("model.scale=0.1,0.2",))
    checked = plan(settings, root / "varied")
    assert [run.fields["model"]["scale"] for run in checked.runs] == [0.1, 0.2]


def test_the_built_in_decoder_keeps_its_section():
    config, problems = load_config("diloco", [("model.layers", "2")])
    assert not problems and plain(config)["model"]["layers"] == 2
    assert isinstance(build(preset("nano")), Trainable) and isinstance(Mixture(258), Trainable)


# -- the example ----------------------------------------------------------------------------------


def test_experts_take_at_most_their_capacity():
    model = Mixture(32, layers=2, width=16, heads=2, hidden=24, experts=4, capacity=0.5)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 32)
    batch = {"tokens": tokens, "mask": np.ones((2, 8), np.float32)}
    loss, aux = jax.jit(model.loss_fn)(params, batch, jax.random.key(0))
    # With scores that are all equal the first two experts get every choice: each has room for 2
    # of a sequence's 8 tokens.
    assert aux["dropped"] == pytest.approx(1 - 2 / 8)
    assert aux["filled"] == pytest.approx(2 / 4)  # the places of the two others are empty
    assert aux["balance"] == pytest.approx(1.0)
    assert loss == pytest.approx(float(aux["ce"] + 0.01 * aux["balance"]), rel=1e-6)


def test_a_mesh_axis_cuts_the_experts():
    model = Mixture(32, layers=2, width=16, heads=2, hidden=24, experts=4)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    specs = model.specs(shapes, {"fsdp": 2, "tensor": 4})
    assert tuple(specs["block1"]["experts"]["up"]) == ("tensor", "fsdp", None)
    over = dataclasses.replace(model, over="fsdp").specs(shapes, {"fsdp": 2, "tensor": 1})
    assert tuple(over["block1"]["experts"]["up"]) == ("fsdp", None, None)
    odd = model.specs(shapes, {"fsdp": 2, "tensor": 3})
    assert tuple(odd["block1"]["experts"]["up"]) == (None, "fsdp", None)
