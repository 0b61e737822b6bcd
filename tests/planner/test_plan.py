"""The planner: refusals, derived overlap, search."""

import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

import lowcomm_jax
from lowcomm_jax.compression import make
from lowcomm_jax.methods.base import published
from lowcomm_jax.models import PRESETS
from lowcomm_jax.network import Jitter, parse, sync_seconds, uniform
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.planner.methods import FACTORIES, PlanMethod, plan_method, planned
from lowcomm_jax.planner.plan import Workload, plan
from lowcomm_jax.planner.search import search
from lowcomm_jax.planner.shapes import decoder_shapes

M = lowcomm_jax.methods


def test_more_bandwidth_never_hurts_and_shorter_periods_cost():
    network = parse("intercontinental").with_compute(1.5)
    work = Workload(decoder_shapes(PRESETS["scaling_1_3b"]), 27e9, 2e6, network)
    rows = plan(work, {"long": M.diloco(100), "short": M.diloco(50)})
    assert rows[0].utilisation > rows[1].utilisation
    faster = plan(replace(work, network=network.scaled(bandwidth=2)), [planned("diloco")])
    assert faster[0].hours < rows[0].hours
    needed = [v for v in rows[0].needed_gbps.values() if v is not None]
    assert needed == sorted(needed)
    assert rows[0].sent_bytes_total == pytest.approx(rows[0].sent_bytes_per_period * 13500 / 100)


@pytest.mark.slow
def test_all_methods_are_planned_for_100b():
    network = parse("us_4_regions").with_compute(4.9)
    work = Workload(
        decoder_shapes(PRESETS["scaling_100b"]), 2e12, 4e6, network, {"stage": 4, "fsdp": 64}
    )
    rows = plan(work, [replace(planned(name, 4), stalls=True) for name in FACTORIES])
    assert all(row.hours > 0 and row.payload_bytes > 0 for row in rows)


def test_search_respects_the_bound():
    work = Workload(
        decoder_shapes(PRESETS["scaling_550m"]), 11e9, 5e5, uniform(3, 0.2, 0.05, compute_s=0.8)
    )
    told = []
    best, tried, left_out = search(work, 0.03, progress=lambda *now: told.append(now))
    assert all(c.penalty_nats <= 0.03 for c in tried) and left_out > 0
    assert [done for _, done, _ in told] == list(range(told[0][2])) and "tau=" in told[0][0]
    assert best.utilisation >= tried[0].utilisation - 0.005
    strict, _, _ = search(work, 0.0)
    assert strict.penalty_nats == 0.0 and strict.utilisation <= best.utilisation
    with pytest.raises(ValueError, match=r"loss_bound is -0.1: use a number of 0 or more"):
        search(work, -0.1)
    again = plan(work, [best.method])[0]
    assert again.utilisation == pytest.approx(best.utilisation, abs=1e-6)
    assert again.payload_bytes == pytest.approx(best.bytes_per_step * best.method.period)


def test_all_violations_of_a_plan_come_at_once():
    network = uniform(1, 1.0)
    mesh = {"fsdp": 0, "expert": 2}
    work = Workload(decoder_shapes(PRESETS["scaling_35m"]), -1.0, "many", network, mesh)
    methods = [
        PlanMethod("a", M.diloco(0)),
        PlanMethod("b", M.streaming_diloco(10, 11, 0, 0.5)),
        PlanMethod("c", M.streaming_diloco(10, 2, 11, 0.5)),
        PlanMethod("d", M.diloco(10, codec="zip")),
        PlanMethod("e", M.diloco(10), stalls="yes"),
        PlanMethod("f", M.delayed_diloco(10), margin=-1),
    ]
    with pytest.raises(ValueError) as caught:
        plan(work, methods)
    for part in (
        "tokens is -1.0",
        "tokens_per_step is 'many'",
        "network 'uniform' has one region",
        "mesh.fsdp is 0",
        "mesh axis 'expert' is unknown",
        "a: period=0",
        "b: fragments=11 > period=10",
        "c: overlap=11",
        "d: codec: 'zip' is unknown",
        "e: stalls is 'yes'",
        "f: margin is -1",
        "f: 'auto' needs a method that lands some steps after its send",
    ):
        assert part in str(caught.value), part
    with pytest.raises(ValueError, match=r"mesh.stage is 7: a model of 6 layers fills 6"):
        plan(
            Workload(
                decoder_shapes(PRESETS["scaling_35m"]), 1e9, 1e5, uniform(2, 1.0), {"stage": 7}
            ),
            [],
        )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "preset None is unknown"),
        ({"preset": [1]}, r"preset \[1\] is unknown"),
        ({"preset": "diloko"}, r"preset 'diloko' is unknown \(did you mean diloco\?\)"),
        ({"preset": "diloco", "perod": 3}, r"field 'perod' is unknown \(did you mean period\?\)"),
        ({"preset": "diloco", "margin": 2}, "margin needs overlap='auto'"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        plan_method("mine", spec)


# (H, K, tau, codec) of methods as their papers run them.
ROWS = {
    "allreduce": (1, 1, 0, "fp32"),
    "local_sgd": (100, 1, 0, "fp32"),
    "diloco": (100, 1, 0, "fp32"),
    "streaming_diloco": (100, 8, 1, "e3m0"),
    "eager_diloco": (100, 1, 100, "fp32"),
    "cocodc": (100, 4, 5, "fp32"),
    "dilocox": (125, 1, 125, "low_rank_int4"),
    "noloco": (50, 1, 0, "bf16"),
    "gasloc": (100, 1, 0, "fp32"),
    "sparseloco": (30, 1, 0, "topk64_stat2"),
    "pulseloco": (100, 1, 0, "bf16_gate256"),
    "muloco": (30, 1, 0, "stat4"),
    "isoloco": (30, 1, 0, "fp32"),
    "edit": (100, 1, 0, "fp32"),
    "a_edit": (100, 1, 0, "fp32"),
    "partial_updates": (100, 1, 0, "fp32"),
    "spes": (100, 1, 0, "fp32"),
    "restarted_diloco": (64, 1, 0, "fp32"),
    "decoupled_momentum": (30, 1, 0, "dct_topk32"),
    "heloco": (100, 1, 0, "fp32"),
    "adloco": (100, 1, 0, "fp32"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_read_off_the_method(name):
    row = planned(name)
    assert (row.period, row.fragments, row.tau, row.codec) == ROWS[name]
    assert row.rank == (2048 if name == "dilocox" else None)
    assert row.eager == (name == "eager_diloco")


@pytest.mark.parametrize("codec", ["int4", "own_parts:RowSign", "own_parts:SIGNS"])
def test_a_codec_by_name_codes_layers_one_by_one(codec):
    assert planned("diloco", codec=codec).method.codec.stacked == ("blocks",)
    experts = ("block1/experts",)
    mapping = {"name": codec, "error_feedback": 0.5}
    for name, given in (("diloco", codec), ("sparseloco", mapping), ("halos", mapping)):
        method = planned(name, stacked=experts, codec=given).method
        assert getattr(method.codec, "codec", method.codec).stacked == experts


def test_a_codec_that_a_function_makes_is_planned_as_it_is_trained():
    given = {"name": "own_parts:whole_codec", "scale": 2.0}
    for name in ("diloco", "dilocox", "sparseloco"):
        row, work = planned(name, codec=given), slow_link()
        assert row.method.codec == make(given, stacked=("blocks",))
        (found,) = plan(work, [replace(row, stalls=True)])
        like = {path_name(k): x for k, x in jax.tree_util.tree_leaves_with_path(work.model.tree)}
        assert found.payload_bytes == row.method.codec.nbytes(like)
    with pytest.raises(ValueError, match="it is a whole codec, error_feedback: only a codec of"):
        planned("diloco", codec=given | {"error_feedback": 0.5})


STEP = {"parameters": 4.0, "inner optimizer": 8.0, "gradients": 4.0}
OUTER = {"anchor": 4.0, "outer optimizer": 4.0}
KEPT = {
    "local_sgd": {**STEP, "anchor": 4.0},
    "diloco": {**STEP, **OUTER},
    "sparta": STEP,
    "sparseloco": {**STEP, "anchor": 4.0, "codec": 4.0},
    "muloco": {**STEP, **OUTER, "codec": 4.0},
    "heloco": {**STEP, **OUTER, "received anchor": 4.0},
    "ddp": {**STEP, "anchor": 4.0},  # the fp32 parameters that all regions share
    # DeMo's residual is its momentum: no moments.
    "demo": {"parameters": 4.0, "gradients": 4.0, "anchor": 4.0, "codec": 4.0},
    # Four models with what they keep.
    "adloco": {name: 4 * each for name, each in {**STEP, "anchor": 4.0}.items()},
}


@pytest.mark.parametrize("name", KEPT)
def test_bytes_of_the_state_are_those_of_the_engine(name):
    work = replace(slow_link(), mesh={"fsdp": 2})
    (row,) = plan(work, [replace(planned(name), stalls=True)])
    held = work.model.held(work.mesh)
    assert row.memory.state == {k: pytest.approx(each * held) for k, each in KEPT[name].items()}


def test_every_method_has_a_row():
    rooms = {name for name in M.__all__ if name.islower()}
    assert rooms | {"allreduce"} == set(FACTORIES)
    for name in rooms:
        assert planned(name).violations(12, 2) == [], name


def test_a_method_says_itself_what_its_paper_had():
    @published(law="diloco", period=40, swing=2)
    def mine(period, swing, stacked):
        return replace(M.diloco(period * swing), name="mine")

    row = planned("mine", factory=mine)
    assert (row.law, row.period, row.settings) == ("diloco", 80, {"period": 40, "swing": 2})
    assert planned("mine", factory=mine, swing=3).period == 120

    def silent(period, swing, **others):
        return mine(period, swing, ())

    with pytest.raises(ValueError, match="field 'swing' is missing: give it"):
        planned("silent", factory=silent)


def slow_link():
    """35M on a link that moves the dense model in 4 T_c plus half a step of latency."""
    model = decoder_shapes(PRESETS["scaling_35m"])
    network = uniform(2, 8 * 4 * model.size / 4e9, delay_s=0.25, compute_s=1.0)
    return Workload(model, 1e9, 1e5, network)


def streaming(period, tau, codec=None, fragments=1):
    return PlanMethod("mine", M.streaming_diloco(period, fragments, tau, 0.5, codec=codec))


def test_a_method_that_never_catches_up_is_refused_unless_it_may_stall():
    work, method = slow_link(), streaming(3, 2)
    with pytest.raises(ValueError, match=r"mine: .*stalls=True") as caught:
        plan(work, [method])
    gbps = work.network.slowest_gbps
    for part in (
        "need 4 s of link time but a period computes only 3 s, so fragments never catch up",
        f"bandwidth x1.33 (slowest link {gbps:.3g} -> {gbps * 4 / 3:.3g} Gbit/s), or the period "
        "to 4, or compress x1.33 more",
    ):
        assert part in str(caught.value)
    uneven = replace(work.network, compute_jitter=Jitter("lognormal", 1.0))  # a step takes 1.65 s
    assert plan(replace(work, network=uneven), [method])[0].warnings == ()
    stalling = plan(work, [replace(method, stalls=True)])[0]
    assert stalling.warnings and stalling.utilisation < 3 / 4 + 1e-6
    for fine in (streaming(4, 2), streaming(3, 0), streaming(3, 2, "bf16")):
        assert plan(work, [fine])[0].warnings == ()


def test_automatic_overlap_hides_the_transfer():
    work = slow_link()
    for made, margin, steps in (
        (streaming(20, 0), 0, 5),  # 4 s and two delays of 0.25 s
        (streaming(20, 0), 2, 7),
        (streaming(20, 0, "bf16"), 0, 3),  # 2 s and one delay
    ):
        row = plan(work, [replace(made, margin=margin)])[0]
        assert row.method.tau == steps
        if not margin:
            assert row.utilisation > 0.99
            less = plan(work, [row.method.with_overlap(steps - 2)])[0]
            assert less.utilisation < row.utilisation
    for period in (8, 12, 1):  # also where tau is the period
        said = f"takes tau = 12, not less than the period of {period}: raise the period to 13"
        with pytest.raises(ValueError, match=said):
            plan(work, [replace(streaming(period, 0), margin=7)])
    assert plan(work, [replace(streaming(13, 0), margin=7)])[0].method.tau == 12


def test_automatic_overlap_hides_the_largest_fragment():
    """The embedding is half of 35M: its fragment takes over 2 s, with two delays 3 steps."""
    work = slow_link()
    row = plan(work, [replace(streaming(20, 0, fragments=4), margin=0)])[0]
    largest = max(sent.nbytes for sent in row.played.sends)
    assert largest / (4 * work.model.size) == pytest.approx(0.56, abs=0.02)
    assert row.method.tau == 3


def test_programs_of_an_automatic_overlap_are_built_once(monkeypatch):
    module = sys.modules["lowcomm_jax.planner.plan"]
    work, built, build = slow_link(), [], module.rehearsed
    monkeypatch.setattr(module, "rehearsed", lambda *of: built.append(of) or build(*of))
    (row,) = plan(work, [replace(streaming(20, 0, fragments=4), margin=0)])
    assert len(built) == 2  # with the baseline's
    alone = build(row.method, work).play()
    assert (row.played.sends, row.played.warm) == (alone.sends, alone.warm)


def test_the_baseline_is_the_exchange_that_really_runs():
    network = parse("us_4_regions").with_compute(0.5)
    work = Workload(decoder_shapes(PRESETS["scaling_35m"]), 1e9, 1e5, network)
    (row,) = plan(work, [planned("allreduce")])
    assert row.speedup == 1.0 and row.route == "two_shot"
    assert row.transfer_s == pytest.approx(sync_seconds(network, 4 * work.model.size, "two_shot"))


def test_cosine_coefficients_every_step_and_every_round():
    """DeMo at every step, decoupled momentum every 30: bytes of the methods' own codec, to all."""
    network = uniform(3, 1.0, compute_s=0.1)
    work = Workload(decoder_shapes(PRESETS["scaling_35m"]), 1e9, 1e5, network)
    demo, decoupled = plan(work, [planned("demo", 3), planned("decoupled_momentum", 3)])
    leaves = jax.tree_util.tree_leaves_with_path(work.model.tree)
    nbytes = planned("demo").method.codec.nbytes({path_name(path): x for path, x in leaves})
    assert demo.payload_bytes == pytest.approx(nbytes)
    assert decoupled.payload_bytes == pytest.approx(nbytes)
    np.testing.assert_allclose(demo.sent_bytes_per_period, 2 * demo.payload_bytes)
    assert demo.hours > decoupled.hours
    assert demo.penalty_nats is decoupled.penalty_nats is None
    assert "inner optimizer" not in demo.memory.state and "codec" in demo.memory.state
