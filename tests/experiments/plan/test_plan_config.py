"""A plan's config: derived seconds, models of every kind, and what a wrong one is told."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.plan.config import read
from experiments.plan.model import read_model
from lowcomm_jax.models import PRESETS, build

SIZES = {"layers": 2, "width": 8, "mlp_width": 32, "heads": 2, "kv_heads": 2, "head_dim": 4}
SIZES |= {"vocab_size": 50, "mlp": "gelu"}
FINE = {
    "model": SIZES,
    "network": "lan",
    "devices_per_region": 3,
    "flops_per_device": 1e6,
    "mfu": 0.5,
    "tokens_per_step": 400,
    "methods": {"diloco": {"preset": "diloco"}},
}


def test_compute_seconds_from_devices():
    request = read(FINE)
    size, seq_len = request.work.model.size, 2048
    # Without norms; a token attends to half the sequence.
    products = 2 * (4 * 8 * 8 + 2 * 8 * 32) + 2 * 50 * 8
    assert size == products + 5 * 8
    each = 6 * (products - 50 * 8) + 6 * 2 * 2 * 4 * seq_len
    assert request.work.step_s == pytest.approx(each * 100 / (3 * 1e6 * 0.5))
    assert request.work.tokens == 20 * size and request.methods[0].name == "diloco"
    with pytest.raises(ValueError, match="'mfu' is missing: give it, or give compute_s"):
        read({**FINE, "mfu": None})


def test_regions_keep_their_ratios():
    network = {"regions": 3, "bandwidth_gbps": 1.0, "compute_s": [2.0, 4.0, 12.0]}
    work = read({**FINE, "network": network, "compute_s": 0.5}).work
    np.testing.assert_allclose(work.network.compute_R, [0.25, 0.5, 1.5])
    assert work.step_s == 1.5


@pytest.mark.parametrize("name", ["nano", "llama_150m", "scaling_90m"])
def test_a_preset_is_planned_leaf_by_leaf(name):
    model = read_model(name)
    config = dataclasses.replace(PRESETS[name], layer_loop="unrolled")
    leaves = jax.tree.leaves(jax.eval_shape(build(config).init, jax.random.key(0)))
    assert model.shapes.size == sum(x.size for x in leaves)
    assert model.shapes.layers == config.layers and model.shapes.vocab == config.vocab_size
    assert model.shapes.held({}) == model.shapes.size
    assert config.layers * model.shapes.held({"stage": config.layers}) >= model.shapes.size
    assert model.decoder == PRESETS[name] and model.section == {"preset": name}


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"model": None}, ["'model' is missing"]),
        ({"model": "x"}, ["model: preset 'x' is unknown", "choose one of nano"]),
        ({"model": 7}, ["model: 7 is no model: name a preset"]),
        (
            {"model": {**SIZES, "layers": 0, "heads": 0}},
            ["layers=0: give a whole number", "heads=0"],
        ),
        ({"model": {**SIZES, "width": "x", "mlp": 3}}, ["width='x'", "mlp=3: choose one of"]),
        ({"model": {**SIZES, "kv_heads": 5}}, ["heads=2 is no multiple of kv_heads=5"]),
        ({"model": "lama_8b"}, ["'lama_8b' is unknown (did you mean llama_8b?)"]),
        ({"model": {**SIZES, "widht": 8}}, ["'widht' is unknown (did you mean width?)"]),
        ({"model": {"layers": 2}}, ["fields vocab_size, width, heads", "are missing"]),
        ({"network": "aws:"}, ["network: no region is named"]),
        ({"network": "aws:Tokyo"}, ["has one region: a plan needs at least two"]),
        ({"network": 5}, ["network: 5 is no network"]),
        ({"network": "lann"}, ["'lann' is unknown (did you mean lan?)"]),
        ({"network": None}, ["'network' is missing"]),
        ({"network": {"regions": 2, "bandwidth_gbps": 0}}, ["bandwidth_gbps r0 -> r1 is 0"]),
        ({"methods": "diloco"}, ["methods is 'diloco': use {name:"]),
        ({"methods": {"mine": "diloco"}}, ["methods.mine is 'diloco': use {preset:"]),
        ({"methods": [3]}, ["methods is [3]: use {name:"]),
        ({"methods": {}}, ["methods is empty"]),
        ({"methods": {"a": {"preset": "nope"}}}, ["methods.a: preset 'nope' is unknown"]),
        (
            {"methods": {"a": {"preset": "diloco", "period": "x"}}},
            ["a: period='x': give a whole number"],
        ),
        ({"methods": {"a": {"preset": "diloco", "tau": 3}}}, ["methods.a: field 'tau' is unknown"]),
        ({"methods": {"a": {"preset": "diloco", "codec": "zip"}}}, ["a: codec: 'zip' is unknown"]),
        ({"methods": {"a": {"preset": "dilocox", "rank": -1}}}, ["a: rank=-1: a whole number"]),
        ({"mesh": "8"}, ["mesh is '8': use {axis: size}"]),
        ({"mesh": {"fsdp": "8", "data": 2}}, ["mesh.fsdp is '8'", "axis 'data' is unknown"]),
        ({"mesh": {"stage": 3}}, ["mesh.stage is 3: a model of 2 layers fills 2"]),
        ({"loss_bound": -0.1}, ["loss_bound is -0.1"]),
        ({"mfu": 40}, ["mfu is 40: use a number above 0 and at most 1"]),
        ({"mfu": "high", "flops_per_device": -1}, ["mfu is 'high'", "flops_per_device is -1"]),
        ({"tokens_per_step": "x"}, ["tokens_per_step is 'x'"]),
        ({"tokens_per_step": 0}, ["tokens_per_step is 0"]),
        ({"tokens": float("nan")}, ["tokens is nan"]),
        ({"microbatch_tokens": 1.5, "remat": 1}, ["microbatch_tokens is 1.5", "remat is 1"]),
        ({"speed": 1}, ["field 'speed'"]),
    ],
)
def test_what_is_wrong_is_named(changes, messages):
    with pytest.raises(ValueError) as caught:
        read({**FINE, **changes})
    for message in messages:
        assert message in str(caught.value)


def test_everything_wrong_is_named_at_once():
    wrong = {
        "model": {**SIZES, "layers": 0},
        "network": {"regions": 2, "bandwidth_gbps": 0, "delay_ms": -1},
        "methods": {"a": {"preset": "nope"}, "b": {"preset": "diloco", "period": 0}, "c": 3},
        "mesh": {"fsdp": 0},
        "loss_bound": -1,
        "mfu": 0,
        "speed": 1,
    }
    with pytest.raises(ValueError) as caught:
        read(wrong)
    for part in (
        "field 'speed' is unknown",
        "'tokens_per_step' is missing",
        "layers=0: give",
        "bandwidth_gbps r0 -> r1 is 0",
        "delay_ms r0 -> r1 is -1",
        "preset 'nope'",
        "b: period=0",
        "methods.c is 3",
        "mesh.fsdp is 0",
        "loss_bound is -1",
        "mfu is 0",
    ):
        assert part in str(caught.value), part


def test_text_of_a_number_is_a_number_of_steps():
    request = read({**FINE, "methods": {"a": {"preset": "cocodc", "fragments": 2, "overlap": "7"}}})
    assert request.methods[0].tau == 7
