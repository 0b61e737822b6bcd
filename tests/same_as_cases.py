"""The runs that `same_as` compares: every method, and the variants that take other ways.

Only names that users have are used (`lc.Engine`, `lc.methods`, ...). A revision that renames one
changes it here; the names of cases stay, as `same_as` compares cases by name. What is trained is a
tiny network with leaves of odd shapes, one of them in bf16, and a frozen table; with noise from the
step's `rng` and an aux `tokens`. Nearly all the time goes into compiling: so variants leave out
`engine.step`, and train with momentum instead of AdamW.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax import compression
from lowcomm_jax.models import Pipeline, TransformerConfig, build

CUT = ("a|s", "b", "c")
FACTORS = {"name": "low_rank_int4", "least": 1.0}
RANKED = {"window": 1, "energy": 0.3, "shortest": 4}
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
      method: makes the method.
      regions: R.
      mesh: sizes of the axes region, stage, fsdp, tensor, on the first devices.
      settings: other keywords of the engine.
      steps: last step made by `engine.step`, by the first `engine.run`, by the second.
      saved: whether a checkpoint is made after the first `engine.run`.
      away: step -> who takes part.
      sizes: samples per region and step, in turn.
      microbatch: of `engine.run`.
      nan_at: step of which region 1 gets a batch that is not finite.
      inner: the inner optimizer.
      pipeline: keywords of the model in stages that is trained in place of the tiny network.
      rounds: of learners that are jobs: they train until so many have landed, a step at a time.
      jobs: by what regions exchange that are jobs of their own ("store", "peers"); None = they are
        one program.
    """

    method: Callable[[], Any]
    regions: int = 3
    mesh: Sequence[int] = (1,)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: tuple[int, int, int] = (0, 11, 16)
    saved: bool = False
    away: Callable[[int], Sequence[bool] | None] | None = None
    sizes: Sequence[int] = (4,)
    microbatch: int | None = None
    nan_at: int | None = None
    inner: Callable[[], Any] = lambda: optax.sgd(0.05, momentum=0.8)
    pipeline: dict[str, Any] | None = None
    rounds: int | None = None
    jobs: str | None = None

    def batches(self, first: int, last: int) -> list[PyTree]:
        """The batches of the 1-based steps `first` to `last`, leaves `[R, size, ...]`."""
        return [self._batch(step) for step in range(first, last + 1)]

    def _batch(self, step: int) -> PyTree:
        if self.pipeline is not None:
            rng = np.random.default_rng([7, step])
            return {"tokens": rng.integers(0, 41, (self.regions, 4, 7)).astype(np.int32)}
        rows = [sample(region, step, self.size(step)) for region in range(self.regions)]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        if step == self.nan_at:
            batch["x"][1, 0, 0] = np.nan
        return batch

    def size(self, step: int) -> int:
        return self.sizes[step % len(self.sizes)]


def sample(region: int, start: int, count: int, trainer: int = 0) -> PyTree:
    """`count` samples that depend on (region, start, trainer) alone."""
    rng = np.random.default_rng([5, region, start, trainer])
    x = rng.standard_normal((count, 8)).astype(np.float32)
    truth = np.random.default_rng([6, region]).standard_normal(8).astype(np.float32)
    return {"x": x, "y": np.tanh(x @ truth) + np.float32(0.2 * region)}


def params(hidden: int = 9) -> PyTree:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.5 * rng.standard_normal(shape), jnp.float32)  # noqa: E731
    floats = {"a": draw(8, hidden), "b": draw(hidden), "c": draw(hidden // 3, 3, 2)}
    floats |= {"s": jnp.float32(1.0)}
    return {**floats, "c": floats["c"].astype(jnp.bfloat16), "table": jnp.arange(5)}


def loss_fn(params, batch, rng):
    # Noise straight from the key's bits: drawing from it would take longer to compile.
    noise = (jax.random.key_data(rng) % 64).sum() / 640
    hidden = jnp.tanh(batch["x"] @ params["a"] + params["b"] + noise)
    last = params["c"].astype(jnp.float32).reshape(-1, 2).sum(axis=1)
    wrong = params["s"] * (hidden @ last) - batch["y"]
    return jnp.mean(wrong**2), {"tokens": 1 + batch["x"][0, 0] ** 2}


def kept_params() -> PyTree:
    """With leaves that a step replaces: one averaged over the regions, one of each region's own."""
    return {**params(), "mean": jnp.zeros(8), "seen": jnp.zeros(())}


def kept_loss(params, batch, rng):
    loss, aux = loss_fn(params, batch, rng)
    moved = 0.9 * params["mean"] + 0.1 * batch["x"].mean(axis=0)
    return loss, {**aux, "updates": {"mean": moved, "seen": params["seen"] + 1}}


def kept_roles(name, leaf):
    return {"mean": "average", "seen": "local", "table": "frozen"}.get(name, "train")


def coded(name: str, feedback: float | None = None, **settings):
    return compression.make(name, error_feedback=feedback, **settings)


def mixed(*pairs: tuple[str, str], **settings):
    """Another codec for each leaf."""
    return compression.make("fp32", rules=pairs, **settings)


def increments():
    outer = optax.chain(compression.integrate(), lc.outer.nesterov(0.7, 0.9))
    return lc.methods.diloco(4, outer, codec=compression.ef21(coded("topk", k=3)))


def streaming(overlap=3, codec=None, **settings):
    return lc.methods.streaming_diloco(5, 3, overlap, 0.3, pattern=CUT, codec=codec, **settings)


def cocodc(**settings):
    settings = {"syncs_per_period": 7, "taylor": 0.5, "pattern": CUT, **settings}
    return lc.methods.cocodc(7, 3, 2, **settings)


def dilocox(**settings):
    return lc.methods.dilocox(4, **{"codec": FACTORS, "rank": 2, "adaptive": RANKED, **settings})


def adloco(policy=lc.batching.NormTest, codec=None, **settings):
    policy = policy(**{"start": 1, "cap": 24, **settings})
    return lc.methods.adloco(4, 3, 2, 1.0, codec=codec, inner_batching=policy)


def diloco(codec=None, **settings):
    return lc.methods.diloco(4, codec=codec, **settings)


def decoupled(quorum=2, **settings):
    return lc.methods.decoupled_diloco(4, 3, 2, quorum, pattern=CUT, **settings)


def some_away(step: int) -> Sequence[bool] | None:
    return None if step % 3 else [step % 2 == 0, True, step % 4 > 0][:3]


def adamw():
    return optax.adamw(optax.linear_schedule(0.02, 0.01, 30))


def saved(method: Callable, **fields) -> Case:
    return Case(method, saved=True, **{"inner": adamw, "steps": (3, 11, 16), **fields})


def adapting(method: Callable, **settings) -> Case:
    plan = optax.linear_schedule(1.0, 0.1, 900)
    settings = {"largest_microbatch": 1, "schedule": plan, "scaling": "sqrt", **settings}
    return Case(method, saved=True, inner=adamw, settings=settings)


def methods() -> dict[str, Case]:
    """Every method; step 11 lies where payloads of those that overlap are in flight."""
    return {
        "ddp": saved(lambda: lc.methods.ddp()),
        "ddp, top-k with feedback": saved(lambda: lc.methods.ddp(codec=coded("topk", 0.9, k=3))),
        "local_sgd": saved(lambda: lc.methods.local_sgd(4)),
        "diloco": saved(diloco),
        "streaming_diloco": saved(streaming),
        "streaming_diloco, landing apart": saved(
            lambda: streaming((0, 2, 4), coded("int4", 0.9)), settings={"weights": "tokens"}
        ),
        "eager_diloco": saved(lambda: lc.methods.eager_diloco(4)),
        "delayed_diloco": saved(lambda: lc.methods.delayed_diloco(4)),
        "delayed_diloco, first blocking": Case(
            lambda: lc.methods.delayed_diloco(4, first_round="blocking")
        ),
        "noloco": saved(lambda: lc.methods.noloco(4, seed=1, codec=coded("int4", 0.9))),
        "gasloc": saved(
            lambda: lc.methods.gasloc((4, 2, 3), 0.6, 0.3, 0.8, seed=1, codec=coded("int4", 0.9))
        ),
        "noloco, nesterov": Case(lambda: lc.methods.noloco(3, variant="nesterov"), regions=4),
        "adloco": adapting(lambda: adloco(eta=2.0, codec=coded("topk", 0.9, k=3))),
        "adloco, in turns": adapting(
            lambda: adloco(lc.batching.AugmentedTest),
            largest_microbatch=2,
        ),
        "cocodc": saved(lambda: cocodc(syncs_per_period=None)),
        "cocodc, adaptive": saved(cocodc),
        "cocodc, by drift": Case(
            lambda: cocodc(score="drift", taylor=lc.landing.taylor_delay_correction(0.2, "norm"))
        ),
        "cocodc, replay, gamma": Case(
            lambda: cocodc(
                syncs_per_period=None,
                taylor=lc.landing.replay(),
                gamma=0.8,
                step_seconds=1.0,
                sync_seconds=1.2,
            )
        ),
        "dilocox": saved(dilocox),
        "dilocox, blocking": Case(lambda: dilocox(delay=0)),
        "dilocox, first blocking": Case(lambda: dilocox(first_round="blocking")),
        "dilocox, dense": Case(lambda: dilocox(codec=None, rank=None, adaptive=None)),
        "sparseloco": saved(lambda: lc.methods.sparseloco(4, k=2, block=4)),
        "pulseloco": saved(lambda: lc.methods.pulseloco(4, k=2, block=4)),
        "muloco": saved(lambda: lc.methods.muloco(4, bits=2)),
        "muloco, muon": Case(
            lambda: lc.methods.muloco(4), inner=lambda: optax.contrib.muon(0.01), steps=(0, 9, 13)
        ),
        "demo": saved(lambda: lc.methods.demo(k=3), inner=lambda: optax.sgd(0.01)),
        "decoupled_momentum": saved(lambda: lc.methods.decoupled_momentum(4, k=3)),
        "decoupled_momentum, as coded": saved(
            lambda: lc.methods.decoupled_momentum(4, "as_coded", k=3)
        ),
        "isoloco": saved(lambda: lc.methods.isoloco(4)),
        "edit": saved(
            lambda: lc.methods.edit(2, warm_up=1, outlier=0.8, decay=0.3, codec=coded("int4", 0.9))
        ),
        "a_edit": saved(lambda: lc.methods.a_edit(2.0, 0.5, (1.0, 0.6, 0.2), warm_up=1)),
        "partial_updates": saved(lambda: lc.methods.partial_updates(4, lc.roles.Shares("^[ab]$"))),
        "spes": saved(lambda: lc.methods.spes(2, "^a$", "a", merge_every=4, until=40)),
        "restarted_diloco": saved(lambda: lc.methods.restarted_diloco(2)),
        "snoo": Case(lambda: lc.methods.snoo(4), regions=1),
        "heloco": saved(lambda: lc.methods.heloco(4, (1.0, 0.6, 0.8), weight=0.6)),
        "async_local_sgd": saved(lambda: lc.methods.async_local_sgd(4, (1.0, 0.6, 0.8))),
        "async_local_sgd, not dynamic": Case(
            lambda: lc.methods.async_local_sgd(4, (1.0, 0.5, 0.7), buffer=2, c=0.1, dynamic=False)
        ),
        "halos": saved(
            lambda: lc.methods.halos(3, (1.0, 0.6, 0.8), ((0, 2), (1,)), every=2, travel=(1, 2))
        ),
        "decoupled_diloco": saved(
            lambda: decoupled(speeds=(1.0, 0.6, 0.8), outages=[(1, 5, 9)], codec=coded("int4", 0.9))
        ),
        "sparta": saved(lambda: lc.methods.sparta(0.3, "shuffled", delay=2)),
        "sparta, replay": saved(lambda: lc.methods.sparta(0.3, delay=2, landing="replay")),
        "sparta, diloco": Case(lambda: lc.methods.sparta(0.3, period=4)),
        "des_loc": saved(
            lambda: lc.methods.des_loc(2, 3, 4), inner=lambda: optax.contrib.adopt(0.02)
        ),
    }


# What speeds or groups of three regions become where there are four.
OF_FOUR: dict[str, Callable[[], Any]] = {
    "streaming_diloco, landing apart": lambda: streaming((0, 2, 4, 3), coded("int4", 0.9)),
    "adloco": lambda: adloco(start=2),
    "heloco": lambda: lc.methods.heloco(4, (1.0, 0.6, 0.8, 0.7), weight=0.6),
    "async_local_sgd": lambda: lc.methods.async_local_sgd(4, (1.0, 0.6, 0.8, 0.7)),
    "async_local_sgd, not dynamic": lambda: lc.methods.async_local_sgd(
        4, (1.0, 0.5, 0.7, 0.9), buffer=2, c=0.1, dynamic=False
    ),
    "halos": lambda: lc.methods.halos(
        3, (1.0, 0.6, 0.8, 0.7), ((0, 2), (1, 3)), every=2, travel=(1, 2)
    ),
    "decoupled_diloco": lambda: decoupled(speeds=(1.0, 0.6, 0.8, 0.7), outages=[(1, 5, 9)]),
    "gasloc": lambda: lc.methods.gasloc(
        (4, 2, 3, 3), 0.6, 0.3, 0.8, seed=1, codec=coded("int4", 0.9)
    ),
    "a_edit": lambda: lc.methods.a_edit(2.0, 0.5, (1.0, 0.6, 0.2, 0.7), warm_up=1),
}


def everywhere() -> dict[str, Case]:
    """Every method on eight devices: four regions of two, and two slots of FSDP x tensor."""
    meshes = {"eight devices": (4, 1, 2), "fsdp x tensor": (2, 1, 2, 2)}
    found = {}
    for where, mesh in meshes.items():
        for name, case in methods().items():
            if "," in name or name == "snoo":  # a variant; of one region
                continue
            fields = {"mesh": mesh, "regions": 4, "steps": (0, 7, 9), "saved": False}
            fields["method"] = OF_FOUR.get(name, case.method)
            if name == "adloco":
                fields["settings"] = {**case.settings, "largest_microbatch": 2}
            found[f"{where}, {name}"] = dataclasses.replace(case, **fields)
    return found


def codecs() -> dict[str, Case]:
    """Codecs, several in a run where each leaf may have its own; outer rules beside them."""
    return {
        "ef21": saved(increments),
        "e3m0": Case(lambda: streaming(codec=coded("e3m0"))),
        "int8 with feedback": Case(lambda: diloco(coded("int8", 1.0))),
        "int8, two-shot": Case(lambda: diloco(coded("int8", reduce="two_shot"))),
        "low_rank": Case(lambda: diloco(coded("low_rank", 1.0, rank=2, least=1.0))),
        "bf16, fp16, int4_affine, stat8": Case(
            lambda: diloco(
                mixed(("a", "bf16"), ("b", "fp16"), ("c", "int4_affine"), ("s", "stat8"))
            )
        ),
        "stat4, sign, stat2 with feedback": Case(
            lambda: diloco(mixed(("a", "stat4"), ("b", "sign"), ("c", "stat2"), error_feedback=0.9))
        ),
        "random_k, dct_topk, topk_int4": Case(
            lambda: diloco(mixed(("a", "random_k"), ("b", "dct_topk"), ("c", "topk_int4")))
        ),
        "topk_stat2 with feedback, heavy ball, clipped": Case(
            lambda: diloco(
                coded("topk_stat2_ef"),
                outer=optax.chain(lc.outer.heavy_ball(0.4, 0.8), optax.clip_by_global_norm(0.1)),
            )
        ),
    }


def meshes() -> dict[str, Case]:
    """Regions on four devices, and how a slot runs those that it holds."""
    four = {"regions": 4, "steps": (0, 7, 11)}
    return {
        "diloco, vmap": Case(diloco, settings={"replicas": "vmap"}),
        "streaming_diloco, vmap": Case(streaming, settings={"replicas": "vmap"}),
        "cocodc, 4 slots": saved(cocodc, mesh=(4,), **four),
        "two-shot, 4 slots": Case(
            lambda: diloco(coded("int8", reduce="two_shot")), mesh=(4,), **four
        ),
        "noloco, 4 slots": Case(lambda: lc.methods.noloco(4), mesh=(4,), **four),
        "diloco, 2 slots": Case(diloco, mesh=(2,), **four),
        "dilocox, 2 slots, vmap": Case(dilocox, mesh=(2,), settings={"replicas": "vmap"}, **four),
        "streaming_diloco, 2 slots x fsdp 2": saved(
            lambda: streaming(codec=coded("int4", 0.9)), mesh=(2, 1, 2), **four
        ),
        "ddp, 2 slots x fsdp 2": Case(lambda: lc.methods.ddp(), mesh=(2, 1, 2), **four),
        "adloco, 2 slots": dataclasses.replace(
            adapting(lambda: adloco(lc.batching.AugmentedTest, nu=math.inf), largest_microbatch=2),
            mesh=(2,),
            regions=2,
            saved=False,
        ),
    }


def variants() -> dict[str, Case]:
    """Everything else that an engine can be told."""
    guard = {"outlier_factor": 1.1, "max_update_norm": 0.2}
    clock = {"regions": 4, "settings": {"network": "us_4_regions"}}
    return {
        "diloco, regions away": Case(diloco, away=some_away, steps=(3, 11, 16)),
        "ddp, regions away": Case(lambda: lc.methods.ddp(), away=some_away, steps=(3, 11, 16)),
        "streaming_diloco, regions away": saved(streaming, away=some_away),
        "noloco, regions away": Case(lambda: lc.methods.noloco(3), away=some_away),
        "dilocox, regions away": Case(dilocox, away=some_away),
        "weights": Case(diloco, settings={"weights": (1.0, 2.0, 0.5)}),
        "ddp, weights by tokens": Case(lambda: lc.methods.ddp(), settings={"weights": "tokens"}),
        "accumulate": Case(diloco, settings={"accumulate": 2}),
        "microbatches": Case(diloco, sizes=(4, 2, 6), microbatch=2, steps=(0, 7, 13)),
        "short blocks": Case(streaming, settings={"block": 2, "seed": 3}),
        "offload": Case(cocodc, settings={"offload": True}),
        "a batch that is not finite": Case(diloco, nan_at=6),
        "not finite, not skipped": Case(diloco, nan_at=6, settings={"skip_nonfinite": False}),
        "guard": Case(diloco, settings=guard),
        "roles": saved(diloco, settings={"roles": kept_roles}),
        "clock, ddp": Case(lambda: lc.methods.ddp(), **clock),
        "clock, streaming_diloco": Case(streaming, **clock),
        "clock, noloco": Case(lambda: lc.methods.noloco(4), **clock),
        "clock, cocodc by gamma": Case(lambda: cocodc(syncs_per_period=None, gamma=0.4), **clock),
        "clock, async_local_sgd": Case(
            lambda: lc.methods.async_local_sgd(4, (1.0, 0.6, 0.8, 0.7)), **clock
        ),
    }


def stages() -> dict[str, Case]:
    """A transformer in two stages of two regions."""
    four = {"regions": 2, "mesh": (2, 2), "steps": (0, 3, 5)}
    settings = {"settings": {"stacked": ("blocks",)}, **four}
    inner = {"inner": lambda: optax.adamw(1e-2)}
    return {
        "stages, diloco": saved(lambda: lc.methods.diloco(2), pipeline={}, **settings, **inner),
        "stages, 1f1b": Case(
            lambda: lc.methods.delayed_diloco(2),
            pipeline={"schedule": "1f1b"},
            **settings,
            **inner,
        ),
        "stages, routed": Case(
            lambda: lc.methods.noloco(2), pipeline={"routed": True}, **settings, **inner
        ),
    }


def jobs() -> dict[str, Case]:
    """Regions that are jobs of their own; last, as threads compile in no fixed order."""
    made = {
        "diloco": diloco,
        "streaming_diloco": streaming,
        "streaming_diloco in int4": lambda: streaming(codec=coded("int4", 0.9)),
        "dilocox": dilocox,
        "noloco": lambda: lc.methods.noloco(3, seed=1),
        "edit": lambda: lc.methods.edit(3, warm_up=1, outlier=0.8, decay=0.3),
        "gasloc": lambda: lc.methods.gasloc(3, 0.6, 0.3, 0.8, seed=1),
        "spes": lambda: lc.methods.spes(3, "^a$", "a", merge_every=6, until=40),
    }
    learners = Case(decoupled, regions=2, jobs="store", rounds=4)
    return {
        f"jobs by {by}, {name}": Case(method, regions=2, jobs=by, steps=(0, 7, 7))
        for by in ("store", "peers")
        for name, method in made.items()
    } | {"jobs by store, decoupled_diloco": learners}


def cases() -> dict[str, Case]:
    """All of them by name, in the order in which they run."""
    parts = (methods(), codecs(), meshes(), variants(), stages(), everywhere(), jobs())
    return {name: case for part in parts for name, case in part.items()}


def problem(case: Case) -> tuple[Callable, PyTree, dict[str, Any]]:
    """(loss, start, what the engine must be told) of a case."""
    mesh = {"mesh": lc.make_mesh(*case.mesh)}
    if case.pipeline is not None:
        return in_stages(case, mesh["mesh"])
    if "roles" in case.settings:
        return kept_loss, kept_params(), mesh
    if len(case.mesh) == 4:
        sharded = {"a": P("fsdp", "tensor"), "b": P("tensor"), "c": P("tensor")}
        return loss_fn, params(12), {**mesh, "specs": lambda name, leaf: sharded.get(name, P())}
    return loss_fn, params(), mesh


def in_stages(case: Case, mesh) -> tuple[Callable, PyTree, dict[str, Any]]:
    config = TransformerConfig(
        vocab_size=41,
        layers=2,
        width=16,
        heads=4,
        kv_heads=2,
        head_dim=4,
        mlp_width=24,
        layer_loop="scan",
    )
    pipe = Pipeline(build(config), mesh, 2, **case.pipeline)
    start = jax.jit(pipe.init)(jax.random.key(0))
    found = jax.tree_util.tree_leaves_with_path(pipe.specs(start))
    specs = {jax.tree_util.keystr(path, simple=True, separator="/"): s for path, s in found}
    told = {"mesh": mesh, "specs": lambda name, leaf: specs[name]}
    return pipe.loss_fn, start, told | ({"hops": pipe.hops} if pipe.routed else {})
