"""Payloads exchanged beside inner steps come to what a landing's own exchange comes to.

Bit for bit (but see `ROUNDING`): losses, anchors, bytes, what is restored from a checkpoint inside
a delay. That the collectives are hidden is for compilers of GPUs and TPUs to show
(`tests/aot/test_overlap.py`).
"""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import same_as_cases as cases
from compilations import compilations
from same_as_probe import FIELDS, VALUES, Run, save

import lowcomm_jax as lc
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.setup import Setup
from lowcomm_jax.state.train_state import Inner
from lowcomm_jax.sync import concurrent_exchange
from lowcomm_jax.sync.compiler_options import OVERLAP_LIMIT
from lowcomm_jax.sync.concurrent_exchange import (
    ConcurrentExchange,
    _together,
)

TWO_SHOT = {"reduce": "two_shot"}
FOUR = {"regions": 4, "mesh": (2, 1, 2), "steps": (0, 11, 16)}


EDIT = lc.methods.edit(2, 0.5, 0.4, outlier=0.5, decay=0.3, warm_up=1).merge


def radial(codec=None, rule="radial_directional"):
    """Streaming DiLoCo with a merge rule that reads payloads one by one, or their norms."""
    return dataclasses.replace(cases.streaming(2, codec), merge=rule)


CASES = {
    "dense": cases.Case(cases.streaming, mesh=(3,)),
    "dense, 2 slots x fsdp 2": cases.saved(cases.streaming, **FOUR),
    "coded": cases.saved(lambda: cases.streaming(codec=cases.coded("int4", 0.9)), **FOUR),
    "coded, two-shot": cases.saved(
        lambda: cases.streaming(codec=cases.coded("int8", **TWO_SHOT)), **FOUR
    ),
    "landing apart": cases.Case(
        lambda: cases.streaming((0, 2, 4), cases.coded("topk", 0.9, k=3)),
        mesh=(3,),
        settings={"weights": "tokens", "replicas": "vmap"},
        away=cases.some_away,
    ),
    "payloads one by one": cases.saved(radial, **FOUR),
    "coded payloads one by one": cases.Case(lambda: radial(cases.coded("int4", 0.9)), **FOUR),
    "by norms": cases.saved(lambda: radial(rule=EDIT), **FOUR),
    "cocodc": cases.saved(cases.cocodc, **FOUR),
    "dilocox": cases.saved(cases.dilocox, **FOUR),
    "eager_diloco": cases.Case(lambda: lc.methods.eager_diloco(4), mesh=(3,)),
    "delayed_diloco": cases.Case(
        lambda: lc.methods.delayed_diloco(4), mesh=(3,), settings={"block": 2}
    ),
    "stages": cases.Case(
        lambda: lc.methods.delayed_diloco(2),
        pipeline={},
        regions=2,
        mesh=(2, 2),
        steps=(0, 3, 5),
        settings={"stacked": ("blocks",)},
    ),
}


# The eager rule adds products of two sums: here the compiler contracts others than it does where
# collectives stand between them.
ROUNDING = {"eager_diloco": 2e-6}


@pytest.fixture(autouse=True)
def standard_ranks():
    """The loss of the cases is a user's."""
    with jax.numpy_rank_promotion("allow"):
        yield


def params_of(state):
    found = lc.global_params(state), lc.region_params(state)
    return jax.tree.map(lambda x: np.asarray(x, np.float32), found)


def trained(case, concurrent, folder):
    """(rows, parameters, those of a run restored inside a delay, programs compiled late)."""
    settings = {**case.settings, "concurrent_exchange": concurrent}
    one = Run(dataclasses.replace(case, settings=settings))
    _, middle, last = case.steps
    state, rows = one.run(one.engine.init(one.start), 1, middle)
    save(one, state, folder)
    state, more = one.run(state, middle + 1, last)
    rows, found = rows + more, params_of(state)
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(one.engine, one.start).state
    assert not any(flight.brought for flight in restored.in_flight.values())
    again = params_of(one.run(restored, middle + 1, last)[0])
    state, _ = one.run(state, last + 1, last + 16)
    late = compilations(lambda: one.run(state, last + 17, last + 24)[0])
    return rows, found, again, late


@pytest.mark.parametrize("name", CASES)
def test_it_equals_an_exchange_at_the_landing(name, tmp_path):
    case = CASES[name]
    apart, beside = (trained(case, on, tmp_path / str(on)) for on in (False, True))
    assert apart[3] == beside[3] == 0
    jax.tree.map(np.testing.assert_array_equal, beside[2], beside[1])
    bound = ROUNDING.get(name, 0)
    same = partial(np.testing.assert_allclose, rtol=bound, atol=bound)
    jax.tree.map(same, beside[1], apart[1])
    for row, other in zip(apart[0], beside[0], strict=True):
        same(other["loss"], row["loss"])
        for event, found in zip(row["events"], other["events"], strict=True):
            # Norms are sums inside programs that differ.
            measured = [k for k in VALUES if event.get(k) is not None]
            for key in measured:
                np.testing.assert_allclose(found[key], event[key], rtol=1e-5, atol=1e-7)
            assert [found.get(k) for k in FIELDS] == [event.get(k) for k in FIELDS]


def test_its_collectives_leave_the_anchor_update(monkeypatch):
    """Otherwise the test above compares two runs of the same programs."""
    case = dataclasses.replace(CASES["coded"], saved=False)
    one = Run(dataclasses.replace(case, settings={"concurrent_exchange": True}))
    state = one.engine.init(one.start)
    kept = []
    loop = one.engine.sync_loop(state)
    moved = loop.move

    def watched(state, act, *args, **kwargs):
        kept.append(state.in_flight[act.key].brought is not None)
        return moved(state, act, *args, **kwargs)

    monkeypatch.setattr(loop, "move", watched)
    one.run(state, 1, 16)
    assert len(kept) > 3 and all(kept)


def test_what_inner_steps_made_is_held_back_with_the_raw_buffers():
    """All that is read later comes out of the barrier: a compiler may move nothing across it."""
    inner = Inner({"w": jnp.ones(2)}, {}, (), jnp.int32(0), jnp.zeros(1))
    closed = jax.make_jaxpr(_together)([jnp.ones(3)], (inner, ()))
    (barrier,) = [e for e in closed.eqns if e.primitive.name == "optimization_barrier"]
    brought, params = closed.jaxpr.outvars[:2]
    assert {brought, params} <= set(barrier.outvars)


@pytest.mark.parametrize(
    ("method", "region", "why"),
    [
        (lambda: lc.methods.diloco(4), 2, "diloco has no delay"),
        (lambda: lc.methods.noloco(4), 2, "noloco picks one of several permutes"),
        (lambda: lc.methods.ddp(), 2, "ddp has no delay"),
        (cases.streaming, 1, "one slot of the mesh"),
    ],
)
def test_it_is_refused_where_nothing_would_be_hidden(method, region, why):
    mesh = lc.make_mesh(region=region, devices=jax.devices()[:region])
    with pytest.raises(ValueError, match=f"concurrent_exchange: .*{why}"):
        lc.Engine(
            lambda p, b, k: 0.0, optax.sgd(0.1), method(), 2, mesh=mesh, concurrent_exchange=True
        )


@pytest.mark.parametrize(("platform", "limit"), [("cpu", None), ("tpu", None), ("cuda", 2 + 4)])
def test_the_compiler_of_a_gpu_is_given_room_for_all_collectives(monkeypatch, platform, limit):
    """For one of each payload, and four of an inner step."""
    device = SimpleNamespace(platform=platform)
    mesh = SimpleNamespace(devices=np.array([device], object), shape={})
    lift = {"lift": lambda *_, **__: None, "lift_update": lambda *_: None}
    regions = SimpleNamespace(mesh=mesh, slots=2, **lift)

    class Placed(Setup):
        placed = regions

    of = partial(Placed, None, None, regions=2)
    assert of(method=cases.streaming()).concurrent is (platform != "cpu")
    assert not of(method=lc.methods.diloco(4)).concurrent
    monkeypatch.setattr(jax, "jit", lambda program, **how: how)
    one = ConcurrentExchange(SimpleNamespace(trained={}), regions, None, None)
    kind = one.kind({}, 0)
    options = one.program((kind, kind))["compiler_options"]
    assert (options and options[OVERLAP_LIMIT]) == limit


@pytest.mark.parametrize(
    ("collectives", "n", "order"),
    [
        (1, 5, ["begin", (None, 5)]),
        (2, 5, ["begin", (None, 3), "go on", (3, 5)]),
        (2, 4, ["begin", (None, 2), "go on", (2, 4)]),
        (2, 1, ["begin", (None, 1), "go on", (1, 1)]),
    ],
)
def test_steps_are_made_once_around_the_second_collective(monkeypatch, collectives, n, order):
    one, done = ConcurrentExchange.__new__(ConcurrentExchange), []

    def steps(carry, *given):
        done.append(given[-2:])
        return carry

    def begin(payload):
        done.append("begin")
        return f"slices of {payload}"

    def go_on(buffers, payload, weight):
        done.append("go on")
        return f"{weight} {buffers} and {payload}"

    one.exchange = SimpleNamespace(collectives=collectives)
    one._block = SimpleNamespace(empty=lambda *_: "log", steps=steps)
    one._reduction = lambda kind: (begin, go_on)
    monkeypatch.setattr(concurrent_exchange, "_together", lambda brought, carry: (brought, carry))
    carry, brought = one._traced(["kind"], ("inner", "rest"), n, ["it"], ["half"])
    assert (done, carry) == (order, ("inner", "log"))
    assert brought == (["slices of it"] if collectives == 1 else ["half slices of it and it"])
