"""Configs are checked as a whole, before any work starts."""

import tracemalloc

import jax
import numpy as np
import pytest

from experiments.__main__ import main
from experiments.cli import RefusedError, load_config
from experiments.config import base, plain
from experiments.train import devices
from experiments.train.methods import make_method
from experiments.train.resolve import fit_warm_up, resolve
from experiments.workdir import write_config
from lowcomm_jax import methods
from lowcomm_jax.optimizers import InnerConfig

ONE_DEVICE = [("mesh.region", "1"), ("mesh.fsdp", "1")]


def refused(config, workdir):
    with pytest.raises(RefusedError) as error:
        resolve(config, workdir)
    return str(error.value)


def test_every_violation_in_one_message(tmp_path):
    config = base("streaming_diloco", period=6, fragments=9, overlap=7, alpha=1.5)
    config.steps = 0
    config.batch = 6
    config.accumulate = 4
    config.participation = 0.0
    config.weights = "0.5,0.5"
    config.replicas = "loop"
    config.frozen = ("no_such_leaf",)
    config.mesh.region, config.mesh.fsdp = 3, 1
    config.method.outer = "adam"
    config.inner.b1 = 1.0
    config.model.heads = 3
    config.data.corpus = "nowhere"
    config.data.seq_len = 512
    config.data.alpha = -1.0
    config.guards.outlier_factor = 0.5
    config.eval.sequences = 0
    config.checkpoint.every = -1
    (tmp_path / "metrics.jsonl").touch()
    text = refused(config, tmp_path)
    for part in (
        "steps=0",
        "accumulate=4",
        "participation=0.0",
        "weights='0.5,0.5'",
        "replicas='loop'",
        "does not divide over 3 region slots",
        "method.outer.name='adam'",
        "inner.b1=1.0",
        "heads=3",
        "data.corpus='nowhere'",
        "data.alpha=-1.0",
        "guards.outlier_factor=0.5",
        "eval.sequences=0",
        "checkpoint.every=-1",
        "config.json",
    ):
        assert part in text, part


def test_method_and_fragments_are_checked_on_the_parameters(tmp_path):
    config = base("streaming_diloco", period=30, fragments=9, overlap=40, alpha=0.3)
    config.mesh.region, config.mesh.fsdp = 1, 1
    config.frozen = ("blocks/0", "no_such_leaf")
    config.data.seq_len = 512
    text = refused(config, tmp_path)
    assert "fragments=9: the parameters have only 5 units" in text  # 3 blocks, table, norm
    assert "overlap=40 >= period=30" in text
    assert "'no_such_leaf' matches no parameter" in text
    assert "data.seq_len=512" in text


SLOW = "{'regions': 4, 'bandwidth_gbps': 0.000001}"


@pytest.mark.parametrize(
    ("name", "override", "part"),
    [
        ("des_loc", "inner.optimizer=adamw", "channel mu: averages first moments"),
        ("dilocox", f"network={SLOW}", "method.period=30: the payload travels for"),
        ("ddp", "offload=True", "offload: ddp needs its anchor at every step"),
        ("noloco", "guards.outlier_factor=2.0", "gossiping regions do not know the median"),
        ("sparta", "weights=tokens", "channels average by fixed weights"),
        ("halos", "weights=tokens", "weights='tokens': halos applies"),
        ("diloco", "concurrent_exchange=True", "concurrent_exchange: diloco has no delay"),
    ],
)
def test_what_an_engine_refuses_is_told_before_the_corpus_is_read(
    name, override, part, tmp_path, capsys
):
    given = [f"--config=configs/{name}.py", f"--config.{override}", f"--workdir={tmp_path}"]
    assert main(["train", *given, "--print_config"]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("name", list(methods.NAMES))
def test_every_method_has_a_config_file(name, tmp_path):
    experts = [("model", "examples.mixture_of_experts:Mixture")] if name == "spes" else []
    config, problems = load_config(f"configs/{name}.py", [*ONE_DEVICE, *experts])
    assert not problems
    with jax.numpy_rank_promotion("allow"):
        assert resolve(config, tmp_path).method.name == name


def test_unknown_knobs_are_named_with_a_suggestion(tmp_path):
    text = refused(base("diloco", period=7, fragmens=3), tmp_path)
    assert "method.fragmens=3: diloco has no such setting" in text
    outer = {"name": "nesterov", "momentun": 0.3}
    assert "did you mean momentum?" in refused(base("diloco", period=7, outer=outer), tmp_path)
    assert "period is missing" in refused(base("diloco"), tmp_path)


def test_codecs_by_name():
    method, problems = make_method({"name": "diloco", "period": 4, "codec": "int4"})
    assert not problems and method.codec.nbytes({"w": np.zeros((3, 128), np.float32)}) < 4 * 3 * 128
    _, problems = make_method({"name": "diloco", "period": 4, "codec": "int5"})
    assert "int4" in problems[0] and "int5" in problems[0]


def test_layer_stacks_reach_the_codec_a_method_brings():
    method, problems = make_method({"name": "sparseloco", "period": 4}, ("blocks",))
    assert not problems and method.codec.codec.stacked == ("blocks",)
    assert "stacked" not in base("sparseloco", period=4).method


def test_types_and_unknown_fields(tmp_path):
    config = base("diloco", period=7)
    with config.unlocked():
        config.surprise = 1
        del config.batch
    config.steps, config.data.corpus = None, "text:\udce9"
    text = refused(config, tmp_path)
    for part in (
        "surprise: unknown field",
        "batch is missing",
        "steps=None: must be of type int",
        "data.corpus='text:\\udce9' is no UTF-8 text, as records need: rename it",
    ):
        assert part in text


def test_overrides_are_checked_together(capsys, tmp_path):
    code = main(
        [
            "train",
            "--config=configs/diloco.py",
            "--config.stpes=3",
            "--config.batch=many",
            "--config.tokens=12",
            f"--workdir={tmp_path / 'run'}",
        ]
    )
    printed = capsys.readouterr().err
    assert code == 2
    assert "did you mean steps?" in printed
    assert "--config.batch=many" in printed
    assert "steps=600 and tokens=12: give one" in printed
    assert not (tmp_path / "run").exists()


def test_tokens_in_place_of_steps(tmp_path):
    changes = [("steps", "0"), ("tokens", "50000"), ("inner.warmup_steps", "5")]
    config, problems = load_config("diloco", [*changes, *ONE_DEVICE])
    assert not problems
    assert resolve(config, tmp_path).steps == 25  # 4 regions x 4 sequences x 128 tokens a step


def test_a_workdir_belongs_to_one_run(tmp_path):
    config = base("diloco", period=7)
    config.mesh.region, config.mesh.fsdp = 1, 1
    write_config(tmp_path, resolve(config, tmp_path).config)
    (tmp_path / "metrics.jsonl").touch()
    config.log.every = 3
    resolve(config, tmp_path)
    config.method.period, config.seed = 8, 5
    text = refused(config, tmp_path)
    assert "method.period: 7 -> 8" in text and "seed: 0 -> 5" in text
    assert "choose another --workdir" in text and "init_from" not in text and "remove" not in text
    (tmp_path / "checkpoints").mkdir()
    assert f"--config.model.init_from={tmp_path}" in refused(config, tmp_path)


def test_optional_fields_are_switched_off_with_none():
    config, problems = load_config(
        "diloco", [("inner.clip_norm", "None"), ("model.width", "64"), ("model.width", "None")]
    )
    assert not problems and config.inner.clip_norm is None and config.model.width is None


def test_text_is_read_as_the_type_that_the_field_has_in_its_dataclass():
    given = [("model.unroll", "False"), ("data.limit", "7"), ("data.cache_dir", "here")]
    config, problems = load_config("diloco", given)
    assert not problems and config.model.unroll is False
    assert (config.data.limit, config.data.cache_dir) == (7, "here")


def test_the_inner_section_is_the_optimizers_config():
    assert InnerConfig(**plain(base("ddp"))["inner"]).learning_rate == 2e-3


@pytest.mark.parametrize(
    "arguments,part",
    [
        (["trian"], "did you mean train?"),
        (["train", "--config=diloca"], "did you mean diloco or dilocox?"),
        (["plan", "--config=llama_8"], "did you mean configs/plan/llama_8b.py?"),
        (["train", "--config=diloco:huge"], "use nano or published"),
        (["train", "--config=diloco", "--workdri=x"], "did you mean --workdir?"),
        (["train"], "--config=configs/diloco.py"),
        (
            ["train", "--config=diloco", "--config.method=diloca"],
            "set one, as --config.method.name=",
        ),
        (["train", "--config=diloco", "steps=3"], "'steps=3'; write --config.steps=3"),
        (["launch", "--config=diloco", "config.seed=3"], "'config.seed=3'; write --config.seed=3"),
        (
            ["train", "--config=diloco", "--config.method.name=streaming_diloco"],
            "or use --config=configs/streaming_diloco.py",
        ),
        (["train", "--config=diloco", "--config.network=lann"], "did you mean lan?"),
        (["plan", "--target=h10:2x8", "--config=diloco"], "did you mean h100?"),
        (["report"], "which runs?"),
        (["sample", "--count=0"], "2 problems"),
        (["sample", "--workdir=nowhere"], "no run lies there"),
        (["export"], "--output is missing"),
    ],
)
def test_one_clear_error(arguments, part, capsys):
    assert main(arguments) == 2
    assert part in capsys.readouterr().err


def test_a_policy_is_a_section_of_any_method():
    """Its name, and the keywords of its class."""
    fields = {
        "name": "diloco",
        "period": 7,
        "inner_batching": {"name": "norm", "start": 2, "cap": 9},
    }
    method, problems = make_method(fields)
    assert not problems and (method.inner_batching.start, method.inner_batching.cap) == (2, 9)
    for wrong, part in (
        ({"name": "nrom"}, "did you mean norm"),
        ({"name": "norm", "begin": 2}, "begin=2"),
        ("norm", "start"),
    ):
        _, problems = make_method({**fields, "inner_batching": wrong})
        assert part in "\n".join(problems)


def test_no_problem_hides_another(tmp_path):
    config = base("diloco", period=0, codec="int9")
    config.mesh.fsdp, config.microbatches, config.block = 99_999, 3, 0
    text = refused(config, tmp_path)
    for part in (
        "needs 99999 devices",
        "microbatches=3",
        "block=0",
        "'int9' is unknown",
        "method.period=0",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    "overrides, line",
    [
        ({"regions": 30_000_000}, "regions=30000000: use at most 100,000"),
        ({"block": 10**9}, "block=1000000000: use at most 65,536"),
        ({"weights": "0.5,x"}, "weights='0.5,x': use equal, tokens, or one number per region"),
        ({"weights": "0.5,{x}"}, "weights='0.5,{x}': use equal"),
    ],
)
def test_absurd_values_are_one_line_and_nothing_is_made_of_them(overrides, line, tmp_path):
    config = base("diloco", period=7)
    config.mesh.region, config.mesh.fsdp = 1, 1
    config.update_from_flattened_dict(overrides)
    tracemalloc.start()
    try:
        text = refused(config, tmp_path / "run")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text.startswith(f"cannot start: {line}") and "\n" not in text, text
    assert not (tmp_path / "run").exists()
    assert most < 20e6, "nothing that has an entry a region was made"


@pytest.mark.parametrize(
    ("mesh", "flags", "cut"),
    [
        ({"region": 2, "stage": 2, "fsdp": 0}, "", [4]),
        ({"region": 2, "stage": 2, "fsdp": 0}, f"{devices.FLAG}=3", []),  # it is settled
        ({"region": 0, "stage": 1, "fsdp": 0}, "", []),
        ({"region": 2, "fsdp": 10**7}, "", []),  # absurdly many
    ],
)
def test_into_how_many_devices_a_processor_is_cut(mesh, flags, cut, monkeypatch):
    asked = []
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(jax.config, "update", lambda name, count: asked.append(count))
    devices.provide(mesh, 1)
    assert asked == cut


def test_lines_have_the_names_and_values_of_the_config(tmp_path):
    config = base("adloco", period=6, inner_batching={"name": "norm", "start": 4, "cap": 64})
    config.mesh.region, config.mesh.fsdp = 1, 1
    config.adaptive.largest_microbatch = 2
    config.adaptive.scaling, config.guards.outlier_factor = "{x}", 0.5
    assert refused(config, tmp_path).splitlines()[1:] == [
        "  - guards.outlier_factor=0.5: must exceed 1; or None for no bound",
        "  - adaptive.scaling='{x}': choose one of none, sqrt, linear",
        "  - adaptive.largest_microbatch=2 is below start=4: start with 2, or give more",
    ]
    config = base("diloco", period=6)
    config.mesh.region, config.mesh.fsdp, config.mesh.stage = 1, 1, 2
    config.microbatches, config.random_routing = 2, True
    text = refused(config, tmp_path)
    assert "random_routing: 4 regions on 1 slots" in text and "(mesh.region=4)" in text
    assert "hops" not in text


def test_a_short_run_gets_a_warm_up_that_fits_unless_it_names_one(capsys, tmp_path):
    short = [*ONE_DEVICE, ("steps", "40")]
    config, _ = load_config("diloco", short)
    assert "warm-up: 4 of 40 steps; the config's 50 do not fit" in fit_warm_up(config, short)
    assert resolve(config, tmp_path).inner.warmup_steps == 4
    # Nobody's numbers move: not those of a config as it is, nor of a run that is long enough.
    for overrides in (ONE_DEVICE, [*ONE_DEVICE, ("steps", "51")]):
        config, _ = load_config("diloco", overrides)
        assert fit_warm_up(config, overrides) == "" and config.inner.warmup_steps == 50
    named = ["--config.steps=40", "--config.inner.warmup_steps=50", f"--workdir={tmp_path / 'run'}"]
    assert main(["train", "--config=diloco", *named]) == 2
    printed = capsys.readouterr().err
    assert "inner.warmup_steps=50: must lie between 0 and the 40 steps of the run" in printed
    assert "use warmup_steps=4 (a tenth), or train longer" in printed
    for command in ("train", "launch"):  # beside a typo nothing is said of the warm-up
        argv = ["--config.steps=40", "--config.log.evry=2", f"--workdir={tmp_path / command}"]
        assert main([command, "--config=diloco", *argv]) == 2
        printed = capsys.readouterr().err
        assert "log.evry: there is no such field" in printed and "warmup_steps" not in printed


def test_print_config_shows_the_warm_up_of_a_short_run(capsys, tmp_path):
    words = ["--config.steps=40", f"--workdir={tmp_path / 'run'}", "--print_config"]
    devices = [f"--config.{name}={value}" for name, value in ONE_DEVICE]
    assert main(["train", "--config=diloco", *words, *devices]) == 0
    printed = capsys.readouterr().out
    assert "warmup_steps: 4," in printed and "warmup_steps: 50" not in printed
