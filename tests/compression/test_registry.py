"""Names, rules, refusals and the sizes the papers state."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

import lowcomm_jax as lc
from experiments.bench import codec as bench_codec
from experiments.refusals import CODECS
from experiments.train.fields import method_descriptions
from experiments.train.methods import make_method
from lowcomm_jax.compression import (
    Cast,
    Integer,
    PerTensor,
    Statistical,
    TopK,
    codecs,
    make,
    names,
    registry,
)
from lowcomm_jax.compression.rules import PRESETS
from lowcomm_jax.planner.methods import planned

FILE = Path(__file__).parents[1] / "more_codecs" / "ternary.py"
LIKE = {
    k: jax.ShapeDtypeStruct(s, jnp.float32)
    for k, s in {
        "embed/table": (100, 64),
        "blocks/0/attention/q": (64, 64),
        "blocks/0/attention/bias": (64,),
        "blocks/0/norm1/scale": (64,),
        "blocks/0/mlp/up": (64, 128),
    }.items()
}


def test_unknown_names_and_settings_are_refused_with_what_exists():
    with pytest.raises(ValueError) as refusal:
        make("int5")
    assert all(name in str(refusal.value) for name in ("int5", *names()))
    with pytest.raises(ValueError) as refusal:
        make("topk", kk=3, blocks=2, rules="llm")
    for word in ("'kk'", "'blocks'", "choose from k, block, values, mean", "'llm'", "exempt_small"):
        assert word in str(refusal.value)
    with pytest.raises(ValueError, match="int5"):
        make("topk", values="int5")
    with pytest.raises(ValueError, match="no name given"):
        make({"k": 3})


def test_settings_out_of_range_are_listed_together():
    with pytest.raises(ValueError) as refusal:
        TopK(k=0, block=65, mean="all")
    assert all(word in str(refusal.value) for word in ("k=0", "block=65", "mean='all'"))
    with pytest.raises(ValueError, match="bits=5"):
        Integer(bits=5)
    with pytest.raises(ValueError, match="bits=3"):
        Statistical(bits=3)
    with pytest.raises(ValueError, match="fp8"):
        Cast("fp8")
    with pytest.raises(ValueError, match="not a regular expression"):
        PerTensor(Cast(), rules=(("(", Cast()),))


@pytest.fixture
def ternary(monkeypatch):
    """As a file of `codecs`: what the search for files finds then is known to the process."""
    monkeypatch.setattr(codecs, "__path__", [*codecs.__path__, str(FILE.parent)])
    for name, found in registry.known.__wrapped__().items():
        monkeypatch.setitem(registry.known(), name, found)


@pytest.mark.usefixtures("ternary")
def test_a_codec_is_one_file_of_at_most_60_lines_found_by_its_name_everywhere():
    assert len(FILE.read_text().splitlines()) <= 60
    assert {"ternary", "ternary_ef"} <= {*names()}
    section = {"name": "diloco", "period": 5, "codec": {"name": "ternary_ef", "share": 0.25}}
    method, problems = make_method(section)
    assert not problems and method.codec.codec.default.share == 0.25
    assert "ternary, ternary_ef" in method_descriptions(section)["codec.name"]
    assert method_descriptions(section)["codec.share"].startswith("of the largest magnitude")
    row = planned("diloco", codec="ternary")
    like = {"w": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    assert row.codec == "ternary" and row.method.codec.nbytes(like) == 64 * (256 * 2 // 8 + 4)
    assert not any(row.wrong(ConfigDict({"codecs": "ternary,ternary_ef"})) for row in CODECS)
    assert bench_codec.measure("ternary", 256, 1)["bytes_per_value"] == 2 / 8 + 4 / 256


def test_a_mapping_and_a_codec_are_accepted():
    codec = make({"name": "topk_stat2_ef", "k": 32, "rules": "exempt_small"})
    assert codec.decay == 0.95 and codec.codec.default == TopK(32, values=Statistical(2))
    assert make(codec) is codec
    assert make("int4", error_feedback=0.5).decay == 0.5


def test_rules_choose_by_path_first_match_wins():
    by_rule = make("int4", rules="language_model").codec_of
    assert {path: by_rule(path).name for path in LIKE} == {
        "embed/table": "stat8_row",
        "blocks/0/attention/q": "int4",
        "blocks/0/attention/bias": "fp32",
        "blocks/0/norm1/scale": "fp32",
        "blocks/0/mlp/up": "int4",
    }
    own = make("int4", rules=(("mlp", "topk"), ("blocks", "bf16"))).codec_of
    assert own("embed/table").name == "int4" and own("blocks/0/attention/q").name == "bf16"
    assert own("blocks/0/mlp/up") == TopK()
    assert set(PRESETS) == {"none", "exempt_small", "language_model"}


@pytest.mark.parametrize(
    ("path", "codec"),
    [
        *((f"{name}/w", "stat8_row") for name in ("wte", "wpe", "lm_head", "unembed", "embed")),
        *((f"{name}/w", "stat8_row") for name in ("emb", "tok_embeddings", "head", "model.head")),
        *((path, "fp32") for path in ("ln_f/g", "blocks/0/norm/g", "layers.bias")),
        *((path, "int4") for path in ("layers/w", "attention/head_mix/w", "heads/w")),
    ],
)
def test_usual_names_of_embeddings_norms_and_biases_are_known(path, codec):
    assert make("int4", rules="language_model").codec_of(path).name == codec


def test_random_choices_differ_by_seed_and_by_leaf():
    like = {name: jax.ShapeDtypeStruct((4, 64), jnp.float32) for name in ("a", "b")}
    first, second = (make("random_k", seed=seed).init(like) for seed in (5, 6))
    keys = [tuple(np.asarray(leaf["key"])) for leaf in (*first, *second)]
    assert len(set(keys)) == 4


def test_bytes_of_the_published_settings():
    big = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    n = 4096 * 4096
    sparse = make("topk_stat2_ef")  # 64 of 4096: 12 + 2 bits each, and one codebook
    assert sparse.nbytes(big) == n // 4096 * 64 * 14 // 8 + 16
    assert 4 * n / sparse.nbytes(big) > 146
    assert make("e3m0").nbytes(big) == n // 2 + 4 * n // 256
    assert make("stat4").nbytes(big) == n // 2 + 64
    assert make("low_rank_int4", rank=512).nbytes(big) == 512 * 8192 // 2 * 129 // 128 + (
        512 * 8192 // 256 * 4 - 512 * 8192 // 2 // 128
    )


def test_norms_and_biases_travel_exactly_and_embeddings_row_by_row():
    rng = np.random.default_rng(0)
    x = {k: rng.standard_normal(s.shape).astype("f4") for k, s in LIKE.items()}
    x["embed/table"][3] *= 1e4  # with one scale for all it would drown the other rows
    codec = make("int4", rules="language_model")
    y = codec.decode(codec.encode(x, codec.init(x))[0], x)
    for key in ("blocks/0/attention/bias", "blocks/0/norm1/scale"):
        np.testing.assert_array_equal(y[key], x[key])
    assert np.abs(y["blocks/0/mlp/up"] - x["blocks/0/mlp/up"]).max() > 0.1
    rows = np.linalg.norm(y["embed/table"] - x["embed/table"], axis=1)
    assert (rows / np.linalg.norm(x["embed/table"], axis=1)).max() < 0.05


def test_matrices_that_top_k_sends_whole_are_named():
    f32 = jnp.float32
    shapes = {"table": (32003, 768), "prime": (509, 509), "fine": (128, 96), "small": (61, 59)}
    like = {k: jax.ShapeDtypeStruct(s, f32) for k, s in {**shapes, "bias": (4096,)}.items()}
    assert make("topk", reduce="all_gather").sent_whole(like) == []
    assert make("topk", k=4096).sent_whole(like) == ["fine", "prime", "table"]
    few = make("topk", k=3500, rules=(("prime", "int4"),))
    assert few.sent_whole(like) == ["fine"]
    assert make("int4").sent_whole(like) == []


def test_the_engine_warns_of_them_once(caplog):
    def loss_fn(params, batch, rng):
        del batch, rng
        return params["w"].sum()

    for name, warnings in (("topk_stat2_ef", 1), ("topk", 0)):
        k = {"k": 4096} if warnings else {}
        method = lc.methods.diloco(2, codec=make(name, **k))
        engine = lc.Engine(loss_fn, optax.sgd(0.1), method, 1, mesh=lc.make_mesh())
        caplog.clear()
        for _ in range(2):
            engine.init({"w": jnp.zeros((127, 67))})
        assert [r.levelname for r in caplog.records] == ["WARNING"] * warnings
        assert all("sends all of w" in r.message for r in caplog.records)


@pytest.mark.parametrize(
    ("spec", "settings", "line"),
    [
        ("topk", {"k": 1.5}, "k=1.5: give a whole number of at least 1"),
        ("topk", {"k": True}, "k=True: give a whole number"),
        ("int4", {"block": "x"}, "block='x': give a whole number"),
        ("random_k", {"one_in": 2.5}, "one_in=2.5: give a whole number"),
        ("low_rank", {"rank": "4"}, "rank='4': give a whole number"),
        ("topk", {"values": "topk"}, "values=topk64: it sends indices itself"),
        ("topk", {"values": "bf16_gate"}, "values=bf16_gate256: it compares values with the weig"),
        ("low_rank", {"dense": "low_rank"}, "give a compression.UnitCodec"),
        ("topk", {"values": "stat2_ef"}, "'stat2_ef' keeps a residual, and is only a part here"),
        ("int4", {"rules": (("w", "sign_ef"),)}, "'sign_ef' keeps a residual"),
        ("topk", {"values": 3}, "3 is no codec: give a name"),
        (12, {}, "12 is no codec: give a name"),
        ("int4", {"error_feedback": "ef21"}, "decay='ef21': give a number in [0, 1]"),
        ("own_parts:nothing", {}, "own_parts has no function 'nothing', or codec: name a codec of"),
        (":int4", {}, "it names no module: write module:codec"),
        ("own_parts:", {}, "it names no codec: write module:codec"),
        ("own_parts:number", {}, "has no function 'number', or codec, which is a int: name a code"),
        ("builtins:dict", {}, "it returned a dict, and must return a compression.UnitCodec, Leaf"),
        ("own_parts:Unfinished", {}, "has no decode, encode, name, unit: write what every codec"),
    ],
)
def test_settings_of_another_kind_are_one_line(spec, settings, line):
    with pytest.raises(ValueError) as caught:
        make(spec, **settings)
    assert line in str(caught.value)
