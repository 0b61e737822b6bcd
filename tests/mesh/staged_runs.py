"""A toy in pipeline stages, written with `lowcomm_jax.mesh.stages` as a user would."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.compression import error_feedback, make
from lowcomm_jax.mesh import pipeline_paths, stages

R, LAYERS, WIDTH, M = 2, 4, 6, 2
SPECS = {"blocks/w": P("stage"), "blocks/scale": P("stage"), "head": P(None, "stage")}
SHAPE = (2, 2, 1, 1)
# The same leaves in a fragment however many stages there are.
PATTERN = ("blocks/w", "blocks/scale|head")


def one_stage(count, routed, params, x_MxBxD, key_data):
    def apply(x):
        def block(x, leaves):
            return x + jnp.tanh(x @ leaves["w"]) * leaves["scale"][None], None

        return jax.lax.scan(block, x, params["blocks"])[0]

    hand_on = None
    if routed:
        paths = pipeline_paths.Paths(R, count, M)
        hand_on = functools.partial(paths.hand_on, row_T=paths.agreed(key_data))
    out = stages.gpipe(apply, x_MxBxD, count, hand_on)
    last = stages.index() == count - 1
    out = stages.total(jnp.where(last, out, 0.0))
    return stages.total(jnp.sum(jnp.square(out @ params["head"] - 1.0)))


def engine_of(method, shape, routed=False, **kwargs):
    """An engine of R regions; `routed` along random paths, which nothing books."""
    mesh = lc.make_mesh(*shape)
    cut = {"blocks": {"w": P("stage"), "scale": P("stage")}, "head": P(None, "stage")}
    one = functools.partial(one_stage, shape[1], routed)
    run = stages.over_stages(one, mesh, (cut, P(), P()), P())

    def loss_fn(params, batch, rng):
        x_MxBxD = batch["x"].reshape(M, -1, WIDTH)
        return run(params, x_MxBxD, jax.random.key_data(rng)) / batch["x"].size

    return lc.Engine(
        loss_fn,
        optax.adamw(1e-2),
        method,
        R,
        mesh=mesh,
        specs=lambda name, leaf: SPECS[name],
        **{"stacked": ("blocks",), **kwargs},
    )


def start():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    blocks = {"w": 0.5 * draw(LAYERS, WIDTH, WIDTH), "scale": draw(LAYERS, WIDTH)}
    return {"blocks": blocks, "head": draw(WIDTH, 8)}


def batches(steps):
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((R, 4, WIDTH)).astype(np.float32)} for _ in range(steps)]


METHODS = {
    "diloco": lambda: lc.methods.diloco(2),
    "streaming_diloco": lambda: lc.methods.streaming_diloco(2, 2, 1, 0.3, pattern=PATTERN),
    "cocodc": lambda: lc.methods.cocodc(2, 2, 1, pattern=PATTERN),
    "dilocox": lambda: lc.methods.dilocox(2, codec=None),
    "noloco": lambda: lc.methods.noloco(2),
}

CODED = {
    "dilocox": lambda: lc.methods.dilocox(
        2, codec=error_feedback(make("low_rank_int4", rank=1, stacked=("blocks",)))
    ),
    "strided": lambda: lc.methods.streaming_diloco(2, 2, 1, 0.3, codec=make("int4")),
    "noloco": lambda: lc.methods.noloco(2, codec=make("bf16")),
    "slices": lambda: lc.methods.diloco(
        2, codec=make("int8", stacked=("blocks",), reduce="two_shot")
    ),
}

# Between them every method, residuals, payloads in flight, decisions, an anchor per region.
MODES = {
    "diloco": METHODS["diloco"],
    "streaming_diloco": lambda: lc.methods.streaming_diloco(
        2, 2, 1, 0.3, codec=error_feedback(make("int4"), 0.9)
    ),
    "cocodc": lambda: lc.methods.cocodc(3, 2, 2, syncs_per_period=3, pattern=PATTERN),
    "dilocox": lambda: lc.methods.dilocox(
        2,
        {"name": "low_rank_int4", "least": 1.0, "stacked": ("blocks",)},
        2,
        adaptive={"window": 1, "energy": 0.3},
    ),
    "noloco": CODED["noloco"],
    "routed": CODED["noloco"],
}


def mode(name, **kwargs):
    return engine_of(MODES[name](), SHAPE, routed=name == "routed", **kwargs)
