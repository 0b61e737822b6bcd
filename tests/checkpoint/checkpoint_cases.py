"""Runs that are saved half way; shared by the tests and by the process that continues them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax import compression
from lowcomm_jax.adloco.state import AdaptiveState
from lowcomm_jax.mesh.arrays import fetch
from lowcomm_jax.state.leaves import state_leaves

HALF = 11
REGIONS = 3
CUT = ("a|s", "b", "c")


def feedback(name, **settings):
    return compression.error_feedback(compression.make(name, **settings), 0.9)


def increments():
    outer = optax.chain(compression.integrate(), lc.outer.nesterov(0.7, 0.9))
    return lc.methods.diloco(4, outer, codec=compression.ef21(compression.make("topk", k=3)))


def streaming(overlap, codec=None):
    return lc.methods.streaming_diloco(5, 3, overlap, 0.3, pattern=CUT, codec=codec)


def factored(**settings):
    codec, rule = {"name": "low_rank_int4", "least": 1.0}, {"window": 1, "energy": 0.3}
    return lc.methods.dilocox(4, codec, 2, adaptive={**rule, "shortest": 4}, **settings)


METHODS = {
    "ddp": lambda: lc.methods.ddp(codec=feedback("topk", k=3)),
    "local_sgd": lambda: lc.methods.local_sgd(4),
    "diloco": lambda: lc.methods.diloco(4),
    # At step 11: fragment 2 was sent at step 10 and 0 at 11 (tau = 3); two are in flight.
    "streaming": lambda: streaming(3),
    # Region 0 has landed fragment 2 (sent at 10), regions 1 and 2 have not.
    "streaming_partly": lambda: streaming((0, 2, 4), codec=feedback("int4")),
    "cocodc": lambda: lc.methods.cocodc(7, 3, 2, syncs_per_period=7, taylor=0.5, pattern=CUT),
    "eager": lambda: lc.methods.eager_diloco(4),
    "delayed": lambda: lc.methods.delayed_diloco(4),
    # Half way the codec is at its second level, with a payload of the first in flight.
    "dilocox": factored,
    # Regions 0 to 2 in pairs: at step 11 two rounds have passed, and the third's groups are known.
    "noloco": lambda: lc.methods.noloco(4, seed=1, codec=feedback("int4")),
    "gasloc": lambda: lc.methods.gasloc((4, 2, 3), 0.6, 0.3, 0.8, seed=1, codec=feedback("int4")),
    "async": lambda: lc.methods.async_local_sgd(4, (1.0, 0.6, 0.8)),
    # At step 11 region 2 is down, and rounds that it missed are in flight.
    "decoupled": lambda: lc.methods.decoupled_diloco(
        5, 3, 3, 1, 0.5, (1.0, 0.6, 0.8), [(2, 9, 13)], pattern=CUT, codec=feedback("int4")
    ),
    # At step 11 an update and a reply are on their way between the servers.
    "halos": lambda: lc.methods.halos(
        4,
        (1.0, 0.6, 0.8),
        [(0, 2), (1,)],
        2,
        0.3,
        buffer=3,
        travel=(2, 4),
        codec=feedback("int4"),
        global_codec=feedback("topk", k=3),
    ),
    "sparseloco": lambda: lc.methods.sparseloco(4, k=2, block=4),
    "pulseloco": lambda: lc.methods.pulseloco(4, k=2, block=4),
    "muloco": lambda: lc.methods.muloco(4, bits=2),
    "ef21": increments,
    "heloco": lambda: lc.methods.heloco(4, (1.0, 0.6, 0.8), weight=0.6),
    "isoloco": lambda: lc.methods.isoloco(4),
    "edit": lambda: lc.methods.edit(4, warm_up=1, outlier=0.8, decay=0.3, codec=feedback("int4")),
    "a_edit": lambda: lc.methods.a_edit(2.0, 0.5, (1.0, 0.6, 0.2), warm_up=1),
    # Region 2 trains nothing of `b`; half way two of three merges are done.
    "partial_updates": lambda: lc.methods.partial_updates(
        4, lc.roles.Rows(({"b": (0, 5)}, {"b": (4, 7)}, {"b": (3, 3)}))
    ),
    "spes": lambda: lc.methods.spes(2, "^a$", "a", share=0.3, merge_every=4, until=40, donors=1),
    # Half way through the second of three rounds between two restarts.
    "restarted": lambda: lc.methods.restarted_diloco(2),
    "snoo": lambda: lc.methods.snoo(4),
    "demo": lambda: lc.methods.demo(k=3),
    # Of the payloads of steps 9 to 11 all are in flight; DiLoCo's round ends at step 12.
    "sparta": lambda: lc.methods.sparta(0.3, "partitioned", delay=3),
    "sparta_diloco": lambda: lc.methods.sparta(0.3, "shuffled", delay=2, period=6, codec="bf16"),
    "sparta_replay": lambda: lc.methods.sparta(0.3, delay=3, landing="replay"),
    "des_loc": lambda: lc.methods.des_loc(2, 3, 4),
    "as_coded": lambda: lc.methods.decoupled_momentum(4, "as_coded", k=3),
    # In round 2, two of three trainers left, all batches different; another merge before round 4.
    "adloco": lambda: lc.methods.adloco(
        4,
        3,
        threshold=1.0,
        codec=feedback("topk", k=3),
        inner_batching=lc.batching.NormTest(start=1, cap=24, eta=2.0),
    ),
}
TOKEN_WEIGHTS = ("diloco", "streaming_partly")
# Large enough to travel as factors of two ranks.
SHAPES = {**oracle.SHAPES, "a": (8, 9)}


def one_device():
    return lc.make_mesh(devices=jax.devices()[:1])


def bf16_params(name=None):
    """The oracle's parameters; leaf `c` in bf16 and a frozen table of integers."""
    shapes = SHAPES if name == "dilocox" else oracle.SHAPES
    params = {k: jnp.asarray(x) for k, x in oracle.make_params(shapes=shapes).items()}
    return {**params, "c": params["c"].astype(jnp.bfloat16), "table": jnp.arange(5)}


def loss_on_floats(params, batch, rng):
    floats = {k: x.astype(jnp.float32) for k, x in params.items() if k != "table"}
    return loss_fn(floats, batch, rng), {"tokens": jnp.float32(1) + batch["x"][0, 0] ** 2}


def make_engine(name, regions=REGIONS, mesh=None):
    method = METHODS[name]()
    settings = {
        "mesh": one_device() if mesh is None else mesh,
        "weights": "tokens" if name in TOKEN_WEIGHTS else "equal",
    }
    rule = optax.contrib.adopt if name == "des_loc" else optax.adamw
    optimizer = rule(optax.linear_schedule(0.02, 0.01, 30))
    if not method.adapts:
        return lc.Engine(loss_on_floats, optimizer, method, regions, **settings)
    settings |= {"largest_microbatch": 1}
    schedule = optax.linear_schedule(1.0, 0.1, 900)
    return lc.AdaptiveEngine(
        loss_on_floats, optimizer, method, regions, schedule=schedule, scaling="sqrt", **settings
    )


def train(engine, state, steps):
    """Train on batches `steps` (1-based) of the oracle's problem."""
    if isinstance(engine, lc.AdaptiveEngine):
        regions = engine.regions.count

        def stream(trainer, start, count):
            return oracle.make_stream(3, trainer, start, count, regions)

        return engine.run(state, stream, steps=len(steps))[0]
    shapes = SHAPES if engine.method.name == "dilocox" else oracle.SHAPES
    batches = oracle.make_batches(steps=steps[-1], regions=engine.regions.count, shapes=shapes)
    for t in steps:
        state, _ = engine.step(state, oracle.step_batch(batches, t))
    return state


def values(state):
    """Every number of a state on the host, by name."""
    if isinstance(state, AdaptiveState):
        named = {
            f"{i}/{name}": value
            for i, trainer in state.trainers.items()
            for name, value in (values(trainer.state) | host_values(trainer)).items()
        }
        return named | {"samples": np.array(state.samples)}
    named = fetch(state_leaves(state))
    for key, flight in state.in_flight.items():
        for field in ("fragment", "sent", "due", "takes_part", "anchor_updated", "level"):
            named[f"in_flight/{key}/{field}"] = np.array(getattr(flight, field))
    return named


def host_values(trainer):
    """What the host knows of a trainer."""
    fields = {name: getattr(trainer, name) for name in ("request", "used")}
    return {name: np.array(value) for name, value in {**fields, **trainer.policy}.items()}


def assert_same(actual, expected):
    """Bit for bit, with equal types and names, payloads in the same order."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert actual[name].shape == value.shape, name
        assert actual[name].tobytes() == value.tobytes(), name
