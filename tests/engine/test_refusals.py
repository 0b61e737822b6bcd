"""Settings that cannot work are refused together, each with its fix, before anything runs."""

import dataclasses
import inspect

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn
from refused_lines import Others, lines_of

import lowcomm_jax as lc
from lowcomm_jax.channels import Channel
from lowcomm_jax.compression import ef21, integrate, make
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


@pytest.mark.parametrize(
    "method,part",
    [
        (lambda: lc.methods.diloco(0), "period=0"),
        (lambda: lc.methods.local_sgd(-2), "period=-2"),
        (lambda: lc.methods.diloco(2.5), "period=2.5"),
        (lambda: lc.methods.streaming_diloco(4, 0, 0, 0.3), "fragments=0"),
        (lambda: lc.methods.streaming_diloco(4, 2, -1, 0.3), "overlap=-1"),
        (lambda: lc.methods.streaming_diloco(4, 2, 4, 0.3), "overlap=4 >= period=4"),
        (lambda: lc.methods.streaming_diloco(4, 2, 1.5, 0.3), "overlap=1.5"),
        (lambda: lc.methods.streaming_diloco(4, 2, 1, -0.1), "alpha=-0.1"),
        (lambda: lc.methods.streaming_diloco(4, 2, 1, float("nan")), "alpha=nan"),
        (lambda: lc.methods.streaming_diloco(4, 2, 1, 0.3, pattern="strideed"), "'strideed'"),
        (lambda: lc.methods.streaming_diloco(4, 2, 1, 0.3, rest="onw"), "'onw'"),
        (lambda: lc.methods.delayed_diloco(4, first_round="blockin"), "'blockin'"),
        (lambda: lc.methods.ddp(inner_batching="norm"), "inner_batching='norm'"),
        (lambda: lc.methods.cocodc(6, 3, 6), "overlap=6 >= period=6"),
        (lambda: lc.methods.cocodc(6, 3, 1, syncs_per_period=2), "syncs_per_period=2"),
        (lambda: lc.methods.cocodc(6, 3, 1, syncs_per_period=7), "syncs_per_period=7"),
        (lambda: lc.methods.cocodc(6, 3, 1, syncs_per_period=4, gamma=0.4), "gamma"),
        (lambda: lc.methods.cocodc(6, 3, 1, gamma=0.4), "or a network"),
        (lambda: lc.methods.cocodc(6, 3, 1, gamma=0.4, step_seconds=1.0), "go together"),
        (lambda: lc.methods.cocodc(6, 3, 1, measured=True), "give it"),
        (lambda: lc.methods.cocodc(6, 3, 1, score="draft"), "score='draft'"),
        (lambda: lc.methods.cocodc(6, 3, 1, syncs_per_period=4.5), "syncs_per_period=4.5"),
        (
            lambda: lc.methods.cocodc(6, 3, 1, gamma=0.4, step_seconds=1.0, sync_seconds=np.inf),
            "finite",
        ),
        (lambda: lc.methods.cocodc(6, 3, 1, taylor=None), "taylor=None"),
        (lambda: lc.methods.diloco(4, codec=4), "codec=4"),
        (
            lambda: lc.methods.eager_diloco(
                4, codec=lc.compression.make("int4", reduce="two_shot")
            ),
            "reduce='two_shot'",
        ),
        (lambda: lc.methods.dilocox(4, rank=0), "rank"),
        (lambda: lc.methods.dilocox(4, rank=True), "rank=True"),
        (lambda: lc.methods.dilocox(4, adaptive={"buckets": True}), "adaptive.buckets=True"),
        (lambda: lc.methods.dilocox(4, codec=5), "codec=5"),
        (lambda: lc.methods.dilocox(4, "low_rnk", rank=3), "codec: 'low_rnk' is unknown"),
        (lambda: lc.methods.dilocox(4, {"name": "low_rank", "basis": 9}), "codec.basis is unused"),
        (
            lambda: lc.methods.dilocox(4, {"name": "low_rank", "reduce": "two_shot"}),
            "codec.reduce='two_shot'",
        ),
        (lambda: lc.methods.dilocox(4, delay=0, first_round="blocking"), "first_round='blocking'"),
        (
            lambda: lc.methods.dilocox(4, delay=0, step_seconds=1.0, sync_seconds=9.0),
            "only rounds of delay 1",
        ),
        (lambda: lc.methods.dilocox(4, step_seconds=1.0, sync_seconds=np.nan), "finite"),
        (lambda: lc.methods.dilocox(4, adaptive="yes"), "adaptive='yes'"),
        (lambda: lc.methods.dilocox(4, adaptive={"window": 2.5}), "window=2.5"),
        (lambda: lc.methods.dilocox(4, adaptive={"shortest": 2.5}), "shortest=2.5"),
        (lambda: lc.methods.dilocox(4, adaptive={"probe": 2.5}), "probe=2.5"),
        (lambda: lc.methods.dilocox(4, adaptive={"buckets": 2.5}), "adaptive.buckets=2.5"),
        (lambda: lc.methods.dilocox(4, adaptive={"floor": 2.5}), "adaptive.floor=2.5"),
        (lambda: lc.methods.noloco(4, gamma=9.0, seed=-1), "gamma=9 lets 3 regions"),
        (lambda: lc.methods.dilocox(4, "int4", rank=3), "rank=3 is unused"),
        (lambda: lc.methods.dilocox(4, "int4", adaptive=True), "adaptive needs a low-rank codec"),
        (lambda: lc.methods.dilocox(4, {"name": "low_rank", "rank": 2}), "codec.rank is unused"),
        (lambda: lc.methods.dilocox(4, delay=2), "delay=2"),
        (lambda: lc.methods.dilocox(4, adaptive={"windw": 2}), "adaptive.windw"),
        (lambda: lc.methods.dilocox(4, adaptive={"window": 0}), "window=0"),
        (lambda: lc.methods.dilocox(4, adaptive={"energy": 0.0}), "adaptive.energy=0.0"),
        (lambda: lc.methods.dilocox(4, rank=8, adaptive={"floor": 9}), "adaptive.floor=9"),
        (lambda: lc.methods.dilocox(4, adaptive={"shortest": 5}), "shortest=5"),
        (lambda: lc.methods.dilocox(4, adaptive={"probe": 1}), "probe=1"),
        (lambda: lc.methods.dilocox(4, step_seconds=1.0), "go together"),
        (
            lambda: lc.methods.dilocox(4, step_seconds=1.0, sync_seconds=4.5),
            "period=4: the payload travels for 5 inner steps",
        ),
        (
            lambda: lc.methods.dilocox(4, adaptive=False, step_seconds=1.0, sync_seconds=4.5),
            "period=4: the payload travels for 5 inner steps",
        ),
        (
            lambda: lc.methods.cocodc(6, 3, 1, gamma=1.4, step_seconds=1.0, sync_seconds=0.0),
            "gamma=1.4",
        ),
    ],
)
def test_a_method_that_cannot_work(method, part):
    text = refusal(method())
    assert part in text, text


EQUAL = (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "method, parts",
    [
        (
            lambda: lc.methods.snoo(0, learning_rate=-1.0, momentum=1.0),
            ("period=0", "learning_rate=-1.0", "momentum=1.0"),
        ),
        (
            lambda: lc.methods.restarted_diloco(0, every=0, momentum=1.0),
            ("period=0", "momentum=1.0", "every=0"),
        ),
        (
            lambda: lc.methods.restarted_diloco(4, every=np.nan, momentum="0.7"),
            ("every=nan: give a whole number", "momentum='0.7': give a number"),
        ),
        (
            lambda: lc.methods.async_local_sgd(4, EQUAL, buffer="3", c="0"),
            ("buffer='3': give a whole number of at least 1",),
        ),
        (lambda: lc.methods.restarted_diloco(4, every="x"), ("every='x': give a whole number",)),
        (
            lambda: lc.methods.heloco(4, EQUAL, weight="1", enough="1", removal="0"),
            ("weight='1'", "enough='1'", "removal='0'"),
        ),
        (
            lambda: lc.methods.halos(4, EQUAL, ((0, 1), (2,)), blend="0.5"),
            ("blend='0.5'",),
        ),
        (
            lambda: lc.methods.async_local_sgd(0, EQUAL, -1.0, buffer=0),
            ("period=0", "learning_rate=-1.0", "buffer=0"),
        ),
        (
            lambda: lc.methods.halos(
                0, EQUAL, ((0, 1), (2,)), blend=2.0, momentum=1.0, global_learning_rate=-1.0
            ),
            ("period=0", "- momentum=1.0", "global_learning_rate=-1.0", "blend=2.0"),
        ),
        (
            lambda: lc.methods.heloco(0, EQUAL, momentum=1.0, weight=0.0, enough=2.0),
            ("period=0", "momentum=1.0", "weight=0.0", "enough=2.0"),
        ),
        (
            lambda: lc.methods.cocodc(0, 3, 1, 5, taylor=-1.0),
            ("period=0", "syncs_per_period=5", "taylor: strength=-1.0"),
        ),
        (
            lambda: lc.methods.decoupled_momentum(0, "as_coded", decay=2.0),
            ("period=0", "decay=2.0"),
        ),
        (
            lambda: lc.methods.sparta(2.0, codec="int9", delay=-1),
            ("codec: 'int9' is unknown", "p=2.0", "delay=-1"),
        ),
        (lambda: lc.methods.eager_diloco(0, "adam"), ("period=0", "outer='adam'")),
        (
            lambda: lc.methods.gasloc(4, -1.0, 0.5, 1.0, codec="int9"),
            ("alpha=-1.0", "codec: 'int9' is unknown"),
        ),
    ],
)
def test_one_bad_value_of_a_factory_hides_no_other(method, parts):
    text = refusal(method())
    assert all(part in text for part in parts), text
    assert text.count("\n- ") == len(parts), text


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


@pytest.mark.parametrize(
    "kwargs,part",
    [
        ({"regions": 0}, "regions=0"),
        ({"regions": 2.5}, "regions=2.5"),
        ({"weights": "token"}, "weights='token'"),
        ({"weights": [0.0, 0.0, 0.0]}, "weights="),
        ({"weights": [1.0, -1.0, 1.0]}, "weights="),
        ({"weights": [1.0, np.nan, 1.0]}, "weights="),
        ({"weights": [1.0, np.inf, 1.0]}, "weights="),
        ({"weights": 1.0}, "weights="),
        ({"mesh": jax.make_mesh((1,), ("data",))}, "mesh axes"),
        ({"accumulate": 1.5}, "accumulate=1.5"),
        ({"regions": 30_000_000}, "regions=30000000: use at most 100,000"),
        ({"block": 10**9}, "block=1000000000: use at most 65,536"),
        ({"offload": np.int64(1)}, "offload=1: use True or False"),
        ({"exchange": Others(3)}, "no open exchange; give exchange.store(...)"),
        ({"outlier_factor": float("nan")}, "outlier_factor=nan"),
        ({"outlier_factor": 10**400}, "must exceed 1"),
        ({"max_update_norm": 0.0}, "max_update_norm=0.0"),
    ],
)
def test_an_engine_that_cannot_work(kwargs, part):
    assert part in refusal(lc.methods.diloco(2), **kwargs)


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


def test_more_fragments_than_units_are_refused_at_init():
    method = lc.methods.streaming_diloco(9, 5, 0, 0.0)
    engine = lc.Engine(loss_fn, optax.sgd(0.1), method, 3, mesh=MESH)
    with pytest.raises(ValueError, match="fragments=5"):
        engine.init(oracle.make_params())


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


@pytest.mark.parametrize(
    "method",
    [lc.methods.diloco(-5), lc.methods.streaming_diloco(-5, 1, 0, 0.5), lc.methods.dilocox(-4)],
)
def test_a_negative_period_is_one_line(method):
    (line,) = lines_of(method)
    assert line.startswith("period=-")


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


def test_codecs_that_need_more_of_the_other_jobs_than_payloads(tmp_path):
    outer = optax.chain(integrate(), optax.sgd(0.7))
    summed = lc.methods.diloco(4, outer, codec=ef21(make("int8")))
    apart = lc.exchange.store(f"file://{tmp_path}", 0, 3, "run")
    for method, fix in ((summed, "use error feedback in its place"),):
        assert fix in refusal(method, exchange=apart)
    apart.close()


def test_a_network_is_named_once():
    text = refusal(lc.methods.diloco(2), network="nowhere")
    assert text.count("network") == 1 and "network: 'nowhere' is unknown" in text


def test_a_schedule_of_ones_own_names_its_field():
    method = Method("mine", Staggered(2, delay=3), outer=lc.outer.average())
    assert "use at most 1 (overlap is the schedule's `delay`)" in refusal(method)


@pytest.mark.parametrize("weights", ["tokens", [1.0, 2.0, 3.0], np.arange(1.0, 4.0)])
def test_a_running_mean_is_of_equal_regions(weights):
    summed = lc.methods.diloco(
        4, optax.chain(integrate(), optax.sgd(0.7)), codec=ef21(make("int8"))
    )
    assert "keeps a running mean of equal regions" in refusal(summed, weights=weights)
    lc.Engine(loss_fn, optax.sgd(0.1), summed, 3, mesh=MESH, weights="equal")


HALOS = lambda: lc.methods.halos(2, (1, 1, 1), ((0, 1), (2,)))  # noqa: E731
ARRIVALS = {
    "async_local_sgd": lambda: lc.methods.async_local_sgd(2, (1, 1, 1)),
    "heloco": lambda: lc.methods.heloco(2, (1, 1, 1)),
    "halos": HALOS,
}


@pytest.mark.parametrize("name", ARRIVALS)
@pytest.mark.parametrize("weights", ["tokens", [1.0, 3.0, 1.0], np.arange(1.0, 4.0)])
def test_arrivals_have_no_weights_and_no_median(name, weights):
    text = refusal(ARRIVALS[name](), weights=weights, outlier_factor=2.0)
    assert text.count("\n- ") == 2
    assert f"weights={weights!r}: {name} applies" in text
    assert f"outlier_factor=2.0: {name} applies" in text


def test_servers_have_no_limit_and_count_everyone():
    text = refusal(HALOS(), weights=[0.0, 1.0, 1.0], max_update_norm=1.0)
    assert text.count("\n- ") == 2
    assert "weights=[0.0, 1.0, 1.0]: halos" in text and "max_update_norm=1.0: halos" in text
    lc.Engine(loss_fn, optax.sgd(0.1), HALOS(), 3, mesh=MESH, weights=[2.0, 2.0, 2.0])


@pytest.mark.parametrize("name", ["async_local_sgd", "heloco"])
def test_an_arrival_of_weight_0_does_not_count(name):
    given = {"weights": [0.0, 0.5, 0.5], "max_update_norm": 1.0}
    engine = lc.Engine(loss_fn, optax.sgd(0.1), ARRIVALS[name](), 3, mesh=MESH, **given)
    state, start = engine.init(oracle.make_params()), oracle.make_params()
    batches = oracle.make_batches(steps=2, regions=3)
    for t in (1, 2):
        state, _ = engine.step(state, oracle.step_batch(batches, t), [True, False, False])
    for key, value in start.items():
        np.testing.assert_array_equal(state.anchor[key][0], np.asarray(value, np.float32))


@pytest.mark.parametrize(
    "method",
    [
        lambda: Method(
            "mine", Staggered(1), outer=lc.outer.restarting(0.5, 0.8, 2), signal="gradient"
        ),
        lambda: dataclasses.replace(HALOS(), outer=lc.outer.restarting(0.5, 0.8, 2)),
    ],
    ids=["gradient", "servers"],
)
def test_rules_that_need_a_round_are_refused_where_none_is_told(method):
    text = refusal(method())
    assert text.count("\n- ") == 1 and "outer: update(" in text and "is not told" in text
