"""Settings that cannot work are refused together, each with its fix, before anything runs.

Each line by itself: `test_refusal_rows.py`.
"""

import dataclasses
import inspect

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn
from refused_lines import lines_of

import lowcomm_jax as lc
from lowcomm_jax.channels import Channel
from lowcomm_jax.compression import make
from lowcomm_jax.methods import Method
from lowcomm_jax.network import uniform
from lowcomm_jax.schedule import Staggered

MESH = lc.make_mesh(devices=jax.devices()[:1])


def refusal(method, regions=3, **kwargs):
    with pytest.raises(ValueError) as error:
        lc.Engine(loss_fn, optax.sgd(0.1), method, regions, mesh=kwargs.pop("mesh", MESH), **kwargs)
    return str(error.value)


def test_everything_at_once():
    text = refusal(
        lc.methods.streaming_diloco(4, 6, (5, 1), 1.5),
        mesh=lc.make_mesh(region=2),
        replicas="loop",
        weights=[0.5, 0.5],
        accumulate=0,
        outlier_factor=0.5,
        max_update_norm=-1.0,
        block=0,
    )
    for part in (
        "fragments=6 > period=4",
        "overlap=(5, 1) >= period=4",
        "overlap: 2 values for 3 regions",
        "alpha=1.5",
        "regions=3 does not divide over 2 region slots",
        "replicas='loop'",
        "weights=[0.5, 0.5]",
        "accumulate=0",
        "outlier_factor=0.5",
        "max_update_norm=-1.0",
        "block=0",
    ):
        assert part in text, part
    assert text.count("\n- ") == 11


EQUAL = (1.0, 1.0, 1.0)
NEEDED = {
    **{"period": 4, "fragments": 2, "overlap": 1, "alpha": 0.5, "gamma": 0.5, "rate": 1.0},
    **{"speeds": EQUAL, "groups": ((0, 1), (2,)), "seconds": 2.0, "step_seconds": 0.5},
}


@pytest.mark.parametrize("name", lc.methods.NAMES)
def test_every_factory_tells_of_a_codec_that_is_unknown(name):
    factory = lc.methods.NAMES[name]
    takes = inspect.signature(factory).parameters
    if "codec" not in takes:
        assert name in ("des_loc", "partial_updates", "spes")
        return
    needed = {k: NEEDED[k] for k, x in takes.items() if x.default is inspect.Parameter.empty}
    assert "codec: 'int9' is unknown" in " ".join(lines_of(factory(**needed, codec="int9")))


def test_switches_and_numbers_of_numpy_are_taken():
    given = {"offload": np.bool_(False), "concurrent_exchange": np.bool_(False), "seed": np.int8(3)}
    setup = lc.Engine(
        loss_fn, optax.sgd(0.1), lc.methods.diloco(2), np.int64(3), mesh=MESH, **given
    ).setup
    assert setup.offload is False and setup.concurrent_exchange is False and setup.regions == 3


def test_one_period_methods_may_be_a_whole_period_late():
    for method in (lc.methods.eager_diloco(1), lc.methods.delayed_diloco(3)):
        assert not lines_of(method)
        engine = lc.Engine(loss_fn, optax.sgd(0.1), method, 3, mesh=MESH)
        assert engine.method.schedule.delay == engine.method.schedule.period


def test_what_does_not_fit_the_parameters_is_told_together():
    mine = Method(
        "mine",
        Staggered(9, 5),
        outer=lc.outer.average(),
        channels=(Channel("first", source="mu"), Channel("second", source="nu")),
    )
    roles = {"w": "train", "b": "average"}
    engine = lc.Engine(
        loss_fn, optax.sgd(0.1, 0.9), mine, 2, mesh=lc.make_mesh(stage=2), roles=roles
    )
    with pytest.raises(ValueError, match="do not fit the parameters") as error:
        engine.init({"w": np.ones(3, np.float32), "b": np.ones(3, np.float32)})
    told = str(error.value)
    for part in (
        "fragments=5: the parameters have only 1 units",
        "channel source='mu'",
        "channel source='nu'",
        "the mesh has 2 stages, but specs cut no leaf over them",
    ):
        assert part in told, told
    assert told.count("\n- ") == 4


def test_parts_that_break_their_contract_are_told_before_they_are_called():
    """With a codec whose payload has no units, no slices can be counted; with a two-shot of a
    codec that cannot, none are; either line stands beside the others."""

    @dataclasses.dataclass(frozen=True)
    class Flat(type(make("int8").default)):
        def encode(self, x, matrix, params=None):
            return {"q": x.reshape(-1)}

    broken = Method("mine", Staggered(9), outer=lc.outer.average(), codec=make(Flat()))
    once = Method(
        "mine", Staggered(9), outer=lc.outer.average(), codec=make("topk", reduce="two_shot")
    )
    for method, part in ((broken, "payload 'q' is"), (once, "cannot encode a mean a second time")):
        engine = lc.Engine(
            loss_fn, optax.sgd(0.1), method, 3, mesh=MESH, roles={"w": "train", "b": "average"}
        )
        with pytest.raises(ValueError, match="do not fit the parameters") as error:
            engine.init({"w": np.ones((8, 4), np.float32), "b": np.ones(3, np.float32)})
        assert part in str(error.value), error.value


def test_a_state_of_another_tree_is_refused():
    engine = lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(2), 3, mesh=MESH)
    other = lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(2), 3, mesh=MESH)
    state = other.init({"w": np.ones(2, np.float32)})
    engine.init(oracle.make_params())
    batches = oracle.make_batches(steps=1, regions=3)
    with pytest.raises(ValueError, match=r"call engine.init\(params\) first"):
        engine.step(state, oracle.step_batch(batches, 1))


def test_a_batch_that_does_not_divide_over_fsdp_says_so():
    """The default mesh puts three regions on 8 devices as FSDP 8."""
    engine = lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(2), 3)
    state = engine.init(oracle.make_params())
    batches = oracle.make_batches(steps=1, regions=3, batch_size=4)
    with pytest.raises(ValueError, match=r"batch.*fsdp"):
        engine.step(state, oracle.step_batch(batches, 1))


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_link_on_which_a_round_cannot_hide_its_payload(adaptive):
    rank = np.int64(8)  # as good as a Python number
    for gbps in (1e-6, 1.0):
        network = uniform(3, gbps).with_compute([0.1] * 3)
        method = lc.methods.dilocox(4, rank=rank, adaptive=adaptive)
        engine = lc.Engine(loss_fn, optax.sgd(0.1), method, 3, mesh=MESH, network=network)
        if gbps == 1.0:
            engine.init(oracle.make_params())
            continue
        with pytest.raises(ValueError, match=r"period=4: the payload travels for \d+ inner steps"):
            engine.init(oracle.make_params())


ARRIVALS = {
    "async_local_sgd": lambda: lc.methods.async_local_sgd(2, (1, 1, 1)),
    "heloco": lambda: lc.methods.heloco(2, (1, 1, 1)),
}


@pytest.mark.parametrize("name", ARRIVALS)
def test_an_arrival_of_weight_0_does_not_count(name):
    given = {"weights": [0.0, 0.5, 0.5], "max_update_norm": 1.0}
    engine = lc.Engine(loss_fn, optax.sgd(0.1), ARRIVALS[name](), 3, mesh=MESH, **given)
    state, start = engine.init(oracle.make_params()), oracle.make_params()
    batches = oracle.make_batches(steps=2, regions=3)
    for t in (1, 2):
        state, _ = engine.step(state, oracle.step_batch(batches, t), [True, False, False])
    for key, value in start.items():
        np.testing.assert_array_equal(state.anchor[key][0], np.asarray(value, np.float32))
