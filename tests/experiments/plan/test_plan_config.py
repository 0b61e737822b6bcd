"""A plan's config: derived seconds, models of every kind, and what a wrong one is told."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.plan.config import read
from experiments.plan.model import read_model
from experiments.train.methods import make_method
from lowcomm_jax import compression
from lowcomm_jax.models import PRESETS, build
from lowcomm_jax.params.fragments import partition, path_name
from lowcomm_jax.planner.dry_run import Scenario
from lowcomm_jax.planner.plan import rehearsed

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


MIXTURE = {"name": "examples.mixture_of_experts:Mixture", "vocab_size": 258}
OF_ITS_OWN = ("sparseloco", "muloco", "pulseloco")  # have a codec without being given one


def planned_mixture(rows):
    two = {"regions": 2, "bandwidth_gbps": 1.0}  # of which payloads go whole
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return read({**FINE, "model": MIXTURE, "network": two, "methods": rows})


def sent(row, work):
    """Bytes of each payload that leaves in the measured periods of a dry run."""
    played = rehearsed(row, work).play()
    return [s.nbytes for s in played.sends if played.warm < s.step <= played.steps]


def test_a_mixture_of_experts_is_planned_with_the_bytes_that_a_run_announces():
    """Experts are matrices of their own: a plan knows of the stacks that a model names."""
    rows = {name: {"preset": "diloco", "codec": name} for name in compression.names()}
    rows |= {name: {"preset": name, "period": 100} for name in OF_ITS_OWN}
    rows["rank"] = {"preset": "diloco", "codec": {"name": "low_rank_int4", "rank": 8}}
    request = planned_mixture(rows)
    shapes = request.work.model
    assert shapes.stacked == ("block1/experts", "block3/experts")
    like = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(shapes.tree)}
    announced = {}
    for row in request.methods:
        fields = {k: v for k, v in rows[row.name].items() if k != "preset"}
        section = {"name": rows[row.name]["preset"], "period": 100, **fields}
        method, problems = make_method(section, shapes.stacked)
        assert problems == []
        announced[row.name] = method.codec.nbytes(like)
        assert set(sent(row, request.work)) == {announced[row.name]}, row.name
    assert announced["rank"] < announced["int4"] < announced["bf16"] < announced["fp32"]
    apart = compression.make("low_rank_int4", rank=8, stacked=shapes.stacked)
    assert (
        announced["rank"]
        == apart.nbytes(like)
        != dataclasses.replace(apart, stacked=()).nbytes(like)
    )


def test_fragments_of_a_mixture_are_those_of_a_run():
    row = {"preset": "streaming_diloco", "period": 20, "fragments": 4, "codec": "fp32"}
    request = planned_mixture({"streaming": row})
    shapes, (row,) = request.work.model, request.methods
    like = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(shapes.tree)}
    cut = partition(like, 4, row.method.pattern, row.method.rest, shapes.stacked)
    assert set(sent(row, request.work)) == {4 * cut.numel(p) for p in range(4)}


def test_what_a_run_would_measure_is_a_field():
    turns = {"period": 12, "fragments": 3, "overlap": 2, "syncs_per_period": 6}
    rows = {
        "cocodc": {"preset": "cocodc", **turns},
        "dilocox": {"preset": "dilocox", "period": 16, "rank": 2},
    }
    fields = {**FINE, "model": {**SIZES, "layers": 4}, "methods": rows}
    scenario = {"rank": 1.0, "rates": [9.0, 1.0, 1.0]}
    usual, told = read(fields), read({**fields, "scenario": scenario})
    assert told.work.scenario == Scenario(1.0, (9.0, 1.0, 1.0))
    assert "measured ranks 1; fragments change 9, 1, 1;" in told.work.scenario.text()

    def fragments(request):
        return [s.fragment for s in rehearsed(request.methods[0], request.work).play().sends]

    assert fragments(told).count(0) > fragments(usual).count(0)


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"scenario": 3}, ["scenario is 3: use {field: value} with fields rank, rates"]),
        ({"scenario": {"rnak": 3}}, ["scenario.rnak is unknown (did you mean rank?)"]),
        ({"scenario": {"rank": 0, "rates": 2}}, ["scenario.rank is 0", "scenario.rates is 2"]),
        ({"scenario": {"rates": [1, -1]}}, ["scenario.rates is -1"]),
        (
            {"scenario": {"rates": [1, 2]}},
            ["scenario.rates has 2 entries: give one for each fragment"],
        ),
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
        (
            {"methods": {"a": {"preset": "dilocox", "rank": -1}}},
            ["a: rank=-1: give a whole"],
        ),
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
