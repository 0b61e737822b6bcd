"""Checks configurations, presets and counts."""

import dataclasses

import jax
import pytest
from models.sizes import SIZES

from lowcomm_jax.models import TransformerConfig, build, preset
from lowcomm_jax.models.protocol import param_count

TINY = {**SIZES, "layers": 3}


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("nano", 1),
        ("diloco_60m", 60),
        ("diloco_150m", 150),
        ("diloco_400m", 400),
        ("scaling_35m", 35),
        ("scaling_90m", 90),
        ("scaling_180m", 180),
        ("scaling_330m", 335),
        ("scaling_550m", 550),
        ("scaling_1_3b", 1300),
        ("scaling_2_4b", 2400),
        ("scaling_4b", 4000),
        ("scaling_10b", 10_000),
    ],
)
def test_preset_has_the_size_in_its_name(name, millions):
    model = build(preset(name, layer_loop="scan"))
    assert param_count(model) / 1e6 == pytest.approx(millions, rel=0.05)


def test_llama_150m_counts_150m_in_its_blocks():
    config = preset("llama_150m")
    tables = 2 * config.vocab_size * config.width
    assert (param_count(build(config)) - tables) / 1e6 == pytest.approx(150, rel=0.01)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loop", ["unrolled", "scan"])
def test_counts_with_grouped_heads_and_qk_norm(mlp, tied, loop):
    config = TransformerConfig(**TINY, mlp=mlp, tie_embeddings=tied, qk_norm=True, layer_loop=loop)
    model = build(config)
    # Per layer 2 * 20*48 (query, output), 2 * 20*16 (key, value), 20*28 each in the MLP.
    matrices = 3 * (2 * 960 + 2 * 320 + (3 if mlp == "swiglu" else 2) * 560)
    scales = 3 * (2 * 20 + 2 * 8) + 20
    assert param_count(model) == matrices + scales + (1 if tied else 2) * 740
    # Output layer 37*20; scores and mixing, half of them, 3 passes, layers.
    attention = 3 * (2 * 2 * 48 * (11 / 2)) * 3
    assert model.flops_per_token(11) == 6 * (matrices + 740) + attention


def test_all_violations_in_one_message():
    with pytest.raises(ValueError) as error:
        TransformerConfig(
            **{**TINY, "heads": 5, "head_dim": 7},
            layer_loop="while",
            remat="some",
            attention="cudnn",
            z_loss=-1.0,
            norm_eps=0.0,
        )
    words = ("kv_heads", "head_dim", "layer_loop", "remat", "bfloat16", "z_loss", "norm_eps")
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value).splitlines()) == 1 + len(words)


@pytest.mark.parametrize("value", [0, -3, 2.0, True, None])
def test_sizes_are_whole_positive_numbers(value):
    with pytest.raises(ValueError, match="mlp_width"):
        TransformerConfig(**{**TINY, "mlp_width": value})


def test_unknown_preset_and_fields_are_named_together():
    with pytest.raises(ValueError, match=r"'pico'.*nano(?s:.*)depth"):
        preset("pico", depth=3)


def test_config_is_frozen_and_hashable():
    config = preset("nano")
    assert hash(config) == hash(preset("nano"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layers = 2


def test_auto_layer_loop_is_resolved_when_built():
    expected = "unrolled" if jax.default_backend() == "cpu" else "scan"
    assert build(preset("nano")).config.layer_loop == expected
    assert build(preset("nano")) == build(preset("nano", layer_loop=expected))
