"""A dry run: its events are those of a run, and its bytes those of the real codecs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax.compression import PerTensor, UnitCodec
from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.models import PRESETS
from lowcomm_jax.network import uniform
from lowcomm_jax.planner.dry_run import Scenario, rehearse
from lowcomm_jax.planner.methods import FACTORIES, planned
from lowcomm_jax.planner.plan import Workload, plan
from lowcomm_jax.planner.shapes import decoder_shapes
from lowcomm_jax.schedule import Send, Staggered

M = lc.methods
W = np.random.default_rng(0).normal(size=(6, 64, 64)).astype(np.float32)
TREE = {"blocks": {"w": W}, "head": np.ones((64, 32), np.float32)}
SHAPES = jax.eval_shape(lambda: TREE)
CASES = {
    "async_local_sgd": lambda: M.async_local_sgd(10, (1.0, 0.5)),
    "decoupled_diloco": lambda: M.decoupled_diloco(12, 3, 2),
    "delayed_diloco": lambda: M.delayed_diloco(10),
    "des_loc": lambda: M.des_loc(2, 4, 6),
    "diloco": lambda: M.diloco(10),
    "dilocox": lambda: M.dilocox(10, rank=16),
    "eager_diloco": lambda: M.eager_diloco(10),
    "halos": lambda: M.halos(4, (1.0, 1.0), ((0,), (1,)), every=2, travel=1),
    "heloco": lambda: M.heloco(10, speeds=(1.0, 0.7)),
    "noloco": lambda: M.noloco(10),
    "sparseloco": lambda: M.sparseloco(10),
    "pulseloco": lambda: M.pulseloco(10),
    "sparta": lambda: M.sparta(0.1, period=10, delay=2),
    "streaming_diloco": lambda: M.streaming_diloco(12, 3, 2, 0.5, codec="e3m0"),
}
QUICK = ("dilocox", "noloco", "sparta", "streaming_diloco")


def squares(params, batch, rng):
    del batch, rng
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def real_events(method, steps):
    inner = optax.contrib.adopt(1e-3)
    with jax.numpy_dtype_promotion("standard"):
        mesh = lc.make_mesh(1, devices=jax.devices()[:1])
        engine = lc.Engine(squares, inner, method, 2, mesh=mesh, stacked=("blocks",))
        _, history = engine.run(engine.init(TREE), [{"x": np.zeros((2, 4))}] * steps)
    return [event for row in history.rows() for event in row["events"]]


def told(event):
    return dataclasses.replace(event, values={}).fetch()


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(CASES)],
)
def test_the_events_are_those_of_a_run(name):
    """Step, fragment, bytes, route, groups, who takes part, staleness: field for field."""
    played = rehearse(CASES[name](), SHAPES, 2, stacked=("blocks",)).play()
    found = [told(event) for event in played.events]
    real = real_events(CASES[name](), played.steps)
    assert found and len(real) == len(found)
    for seen, mine in zip(real, found, strict=True):
        assert {key: seen[key] for key in mine} == mine


def test_another_schedule_is_played_as_its_own_method_would():
    def streaming(period, tau):
        return M.streaming_diloco(
            period, 3, tau, 0.0, codec={"name": "int4", "stacked": ("blocks",)}
        )

    ready, other = rehearse(streaming(12, 0), SHAPES, 2, stacked=("blocks",)), streaming(30, 5)
    again, alone = (
        ready.play(other.schedule),
        rehearse(other, SHAPES, 2, stacked=("blocks",)).play(),
    )
    for one in (again, ready.play(other.schedule)):
        assert [told(event) for event in one.events] == [told(event) for event in alone.events]
        assert dataclasses.replace(one, events=()) == dataclasses.replace(alone, events=())


@pytest.mark.slow
def test_where_measured_rates_decide_the_choice_is_the_scenarios():
    method = M.cocodc(12, 3, 2, 6)
    played = rehearse(method, SHAPES, 2, stacked=("blocks",)).play()
    real = real_events(method, played.steps)
    assert [(e.kind, e.step) for e in played.events] == [(e["kind"], e["step"]) for e in real]
    hot = rehearse(
        method, SHAPES, 2, stacked=("blocks",), scenario=Scenario(rates=(9.0, 1.0, 1.0))
    ).play()

    def sent(run, fragment):
        return sum(e.kind == "send" and e.fragment == fragment for e in run.events)

    assert sent(hot, 0) > sent(played, 0)


def test_a_falling_rank_shortens_rounds_and_shrinks_payloads():
    method = M.dilocox(16, rank=16)
    as_sent = rehearse(method, SHAPES, 2, stacked=("blocks",)).play()
    low = rehearse(method, SHAPES, 2, stacked=("blocks",), scenario=Scenario(rank=4.0)).play()
    assert min(s.nbytes for s in low.sends) < min(s.nbytes for s in as_sent.sends)
    assert low.sent_a_step < as_sent.sent_a_step * 16 / 4 and as_sent.repeats
    gaps = np.diff([sent.step for sent in low.sends if sent.step > low.warm])
    assert set(gaps) == {4}  # H = 16 x 4 / 16


def test_gradients_leave_at_every_step():
    played = rehearse(M.ddp(), SHAPES, 2, stacked=("blocks",)).play()
    nbytes = 4 * (6 * 64 * 64 + 64 * 32)
    assert {s.nbytes for s in played.sends} == {nbytes} and played.sent_a_step == nbytes
    assert [s.step for s in played.sends] == list(range(1, played.steps + 1))


@pytest.mark.parametrize("name", sorted(FACTORIES))
def test_every_method_is_played(name):
    row = planned(name, 3)
    tree = {"blocks": {"mlp": {"up": jax.ShapeDtypeStruct((16, 64, 64), np.float32)}}}
    played = rehearse(row.method, tree, 3, stacked=("blocks",)).play()
    assert played.sends and played.sent_a_step > 0
    assert {layer for sent in played.sends for layer in sent.layers} == set(range(16))
    assert all(math.isclose(sum(s.layers.values()), 1.0, rel_tol=1e-6) for s in played.sends)


def a_period(row, model):
    played = rehearse(row.method, model.tree, 2, stacked=model.stacked).play()
    counted = sum(s.nbytes for s in played.sends if played.warm < s.step <= played.steps)
    return counted * row.period / (played.steps - played.warm), played


def test_bytes_are_those_of_the_real_codecs():
    """Anchors sent ahead are fp32; what factors do not shrink goes as fp32."""
    large, small = decoder_shapes(PRESETS["qwen_107b"]), decoder_shapes(PRESETS["scaling_1_3b"])
    noloco, played = a_period(planned("noloco"), large)
    assert noloco == 6 * large.size and {s.route for s in played.sends} == {"pair"}
    assert a_period(planned("dilocox"), large)[0] == pytest.approx(2.245e10, rel=1e-3)
    assert a_period(planned("dilocox"), small)[0] == 4 * small.size
    assert 4 * large.size / a_period(planned("sparseloco"), large)[0] == pytest.approx(
        146.3, abs=0.1
    )
    assert 4 * large.size / a_period(planned("muloco"), large)[0] == pytest.approx(8.0, abs=0.01)


def test_leaves_of_more_than_2_to_the_31_entries_are_chosen_from():
    """Of strata of 200 consecutive entries of each band one entry travels, as fp32."""
    model = decoder_shapes(PRESETS["qwen_107b"])
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(model.tree)]
    assert max(sizes) > 2**31
    played = rehearse(M.sparta(0.005), model.tree, 2, stacked=model.stacked).play()
    least = 4 * sum(sizes) / 200
    assert {least <= sent.nbytes <= least + 4 * 200 for sent in played.sends} == {True}


def test_shares_are_those_of_the_real_fragments():
    """Embedding, head and norms are dealt to fragments, too: not an eighth each."""
    for name, share in (("scaling_1_3b", 0.171), ("qwen_107b", 0.137)):
        nbytes, played = a_period(planned("streaming_diloco"), decoder_shapes(PRESETS[name]))
        largest = max(sent.nbytes for sent in played.sends)
        assert largest / nbytes == pytest.approx(share, abs=1e-3)


def test_routes_are_those_of_the_run():
    """Of two regions coded payloads go by all-gather, of three by slices."""
    for regions, coded in ((2, "all_gather"), (3, "two_shot")):
        for codec, route in (("int4", coded), (None, "two_shot")):
            played = rehearse(
                M.diloco(10, codec=codec), SHAPES, regions, stacked=("blocks",)
            ).play()
            assert {sent.route for sent in played.sends} == {route}


class Odd(Staggered):
    """A schedule of one's own: every seventh step."""

    def due(self, step, counters):
        return (Send((0,)),) if step % 7 == 0 else ()


@dataclasses.dataclass(frozen=True)
class Halves(UnitCodec):
    """A codec of one's own: half precision."""

    name = "halves"
    unit = Unit(1, 1)

    def encode(self, x, matrix, params=None):
        return {"x": x.astype(jnp.float16)}

    def decode(self, payload, unit):
        return payload["x"].astype(jnp.float32)


def test_a_method_and_a_codec_of_ones_own_are_planned_without_a_line_of_theirs():
    codec = PerTensor(default=Halves())
    mine = dataclasses.replace(M.diloco(7), name="mine", schedule=Odd(7, 1), codec=codec)
    work = Workload.of(
        SHAPES, uniform(2, 1.0, compute_s=0.1), tokens=1e6, tokens_per_step=1e3, stacked=["blocks"]
    )
    assert work.model.layers == 6
    (row,) = plan(work, {"mine": mine})
    assert row.payload_bytes == 2 * work.model.size and row.penalty_nats is None
    assert [s.step for s in row.played.sends] == [7, 14, 21, 28]
    assert "activations" not in row.memory.estimates  # unknown, and not 0
