"""Inner optimizers: the steps of a region between two exchanges.

In: an `InnerConfig`, the number of inner steps of the run, and which leaves stack layers. Out: an
Optax transform (`make_optimizer`): AdamW (arXiv 1711.05101), ADOPT (arXiv 2411.02853), Muon (arXiv
2502.16982) or plain descent, which suits methods whose gradient is a direction already, such as
DeMo's sign. The transform clips by the global norm, follows a learning-rate schedule in inner
steps, and decays matrices only. `make_optimizer` raises ValueError with every setting that cannot
work.

`at_step` sets the schedule of a region that joins a run later to the run's step. `state_field`
finds a field in the state of any transform, of outer and landing rules, too.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from lowcomm_jax.params.fragments import is_stacked, path_name
from lowcomm_jax.refused import is_whole, refuse
from lowcomm_jax.settings import FROM_1, Takes, described, misfits, number, one_of

PyTree = Any
Kind = Literal["matrix", "embedding", "head", "vector"]
Optimizer = Literal["adamw", "adopt", "muon", "sgd"]
LearningRate = Literal["cosine", "wsd", "constant"]

_EMBEDDING = re.compile(r"(?:^|[/_.])(?:embed\w*|emb|wte|wpe)(?:$|[/_.])", re.IGNORECASE)
# `multi_head_attention` is none: `head` ends the part.
_HEAD = re.compile(r"(?:^|[/.])(?:\w+_)?(?:head|unembed\w*)(?:$|[/.])", re.IGNORECASE)
_VECTOR = re.compile(r"(?:^|[/.])(?:bias|scale)(?:[/.]value)?$", re.IGNORECASE)


_NAMED = one_of(*get_args(Optimizer))
_OPTIMIZER = Takes(
    lambda x: isinstance(x, optax.GradientTransformation) or _NAMED.fits(x), _NAMED.fix
)
_POSITIVE = number(lambda x: 0 < x < math.inf, "give a positive, finite number")
_BELOW_1 = number(lambda x: 0 <= x < 1, "must lie in [0, 1)")
_SHARE = number(lambda x: 0 <= x <= 1, "must lie in [0, 1]")
_WHOLE = Takes(is_whole, "give a whole number")
_FROM_0 = number(lambda x: 0 <= x < math.inf, "give 0 (off) or a positive number")
_NORM = number(lambda x: x > 0, "give a positive norm, or None (off)", optional=True)


@described
@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """Settings of an inner optimizer; `violations` checks them."""

    optimizer: Annotated[
        Optimizer | optax.GradientTransformation,
        _OPTIMIZER,
        '"adamw"; "adopt", with AdamW\'s decay; "muon" for matrices (of rank 2) with AdamW for the '
        'rest; or "sgd" without momentum. ADOPT divides a gradient by the second moment of those '
        "before it, and averages the result.",
    ] = "adamw"
    learning_rate: Annotated[
        float,
        _POSITIVE,
        "peak, per inner step. One value serves both parts of Muon (`muon_rms`).",
    ] = 1e-3
    schedule: Annotated[
        LearningRate,
        '"cosine", from the end of the warm-up; "wsd" (warm-up, stable, decay: constant, then '
        'linear over the last `decay_fraction` of the steps); or "constant". The first two come to '
        "`final_fraction` after the last step. Counted in inner steps across all rounds.",
    ] = "cosine"
    warmup_steps: Annotated[int, _WHOLE, "steps of linear warm-up from 0."] = 100
    final_fraction: Annotated[
        float,
        _SHARE,
        "share of the peak that a schedule comes to when all steps are done. No step has it: the "
        "last one is a step of the schedule above it.",
    ] = 0.1
    decay_fraction: Annotated[
        float,
        _SHARE,
        'share of the steps over which "wsd" decays: D steps, at least 1. The last one has '
        "`final_fraction` + (1 - `final_fraction`) / D of the peak; the first, where D is whole, "
        "still the peak.",
    ] = 0.2
    b1: Annotated[
        float,
        _BELOW_1,
        "weight of the old value in the first moment of AdamW and ADOPT, in [0, 1).",
    ] = 0.9
    b2: Annotated[float, _BELOW_1, "the same of the second moment."] = 0.95
    eps: Annotated[
        float, _POSITIVE, "added to the root of AdamW's second moment; the least root of ADOPT's."
    ] = 1e-8
    weight_decay: Annotated[
        float,
        _FROM_0,
        "decoupled, times the learning rate; on matrices only.",
    ] = 0.1
    decay_embeddings: Annotated[bool, "also decay embedding tables."] = False
    clip_norm: Annotated[
        float | None,
        _NORM,
        "global norm a region's gradient is clipped to; None = off (as it must be behind DeMo's "
        "sign, whose norm is the square root of the number of parameters).",
    ] = 1.0
    muon_beta: Annotated[float, _BELOW_1, "momentum of Muon."] = 0.95
    muon_steps: Annotated[int, FROM_1, "Newton-Schulz iterations."] = 5
    muon_rms: Annotated[
        float,
        _POSITIVE,
        "RMS of Muon's update before the learning rate; 0.2 is that of AdamW (arXiv 2502.16982, "
        "section 2.2), so that AdamW's learning rate and decay carry over.",
    ] = 0.2

    def violations(self, steps: int) -> list[str]:
        """Settings that cannot work in a run of `steps` inner steps, one line with its fix each."""
        found = [problem.text for problem in misfits(self)]
        if is_whole(self.warmup_steps) and not 0 <= self.warmup_steps < max(steps, 1):
            found.append(
                f"warmup_steps={self.warmup_steps}: must lie between 0 and the {steps} steps of "
                f"the run; use warmup_steps={steps // 10} (a tenth), or train longer"
            )
        return found


def make_optimizer(
    config: InnerConfig, steps: int, stacked: Sequence[str] = ()
) -> optax.GradientTransformation:
    """Build the inner optimizer of a run.

    Works on any parameter tree; None in place of a leaf (a frozen one) is skipped.

    Args:
      config: what to build.
      steps: inner steps of the whole run, for the schedule.
      stacked: see `kind_of`.

    Raises:
      ValueError: everything `config.violations(steps)` lists.
    """
    found = config.violations(steps)
    refuse("the inner optimizer cannot work", found)

    def decayed(params: PyTree) -> PyTree:
        kinds = ("matrix", "head", *(("embedding",) if config.decay_embeddings else ()))
        return _by_name(params, lambda name, leaf: kind_of(name, leaf, stacked) in kinds)

    rate = learning_rate(config, steps)
    decay = optax.add_decayed_weights(config.weight_decay, mask=decayed)
    adamw = optax.adamw(
        rate,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    own, rules = (
        config.optimizer,
        {
            "adamw": lambda: adamw,
            "adopt": lambda: optax.chain(
                contrib.scale_by_adopt(config.b1, config.b2, config.eps),
                decay,
                optax.scale_by_learning_rate(rate),
            ),
            "muon": lambda: _muon(config, rate, adamw, stacked),
            "sgd": lambda: optax.chain(decay, optax.scale_by_learning_rate(rate)),
        },
    )
    if isinstance(own, optax.GradientTransformation):
        rule = optax.chain(own, decay, optax.scale_by_learning_rate(rate))
    else:
        rule = rules[own]()
    if config.clip_norm is None:
        return rule
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)


def learning_rate(config: InnerConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
    """The learning rate as a function of the inner steps done before (an array of any shape).

    The first step of a warm-up of W steps uses 1/W of the peak, not 0, which would be a lost step.
    """
    peak, last = config.learning_rate, config.final_fraction
    warmup = config.warmup_steps

    def schedule(count: jax.Array) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        if config.schedule == "cosine":
            done = jnp.clip((count - warmup) / max(steps - warmup, 1), 0.0, 1.0)
            share = last + (1 - last) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        elif config.schedule == "wsd":
            decay = max(config.decay_fraction * steps, 1.0)
            done = jnp.clip((count - (steps - decay)) / decay, 0.0, 1.0)
            share = 1 - (1 - last) * done
        else:
            share = jnp.ones_like(count)
        return peak * share * jnp.minimum(1.0, (count + 1) / max(warmup, 1))

    return schedule


def kind_of(name: str, leaf: Any, stacked: Sequence[str] = ()) -> Kind:
    """Tell matrices from embeddings, output heads and vectors (norm scales, biases), by name.

    Embeddings have a part `emb`, `embed...`, `wte` or `wpe` in their path, between `/`, `_` or `.`;
    heads `head`, `..._head` or `unembed...`, between `/` or `.`. A leaf `bias` or `scale` of any
    rank is a vector, as that of one bias a head.

    Args:
      name: path of the leaf, `blocks/0/mlp/up/kernel`.
      leaf: anything with a shape.
      stacked: path prefixes of leaves with a leading layer axis (scanned blocks).
    """
    if len(leaf.shape) - is_stacked(name, stacked) < 2 or _VECTOR.search(name):
        return "vector"
    if _EMBEDDING.search(name):
        return "embedding"
    return "head" if _HEAD.search(name) else "matrix"


def state_field(state: PyTree, name: str, default: Any = None) -> Any:
    """The field of this name in the state of a transform, such as `trace` of `optax.sgd`.

    Fields of named tuples come first. A state that is a dict counts where there is none. A
    parameter of this name is no field.

    Args:
      default: returned where there is no such field.

    Raises:
      ValueError: there are several.

    >>> state_field(optax.sgd(0.1, momentum=0.9).init({"trace": jnp.ones(2)}), "trace")
    {'trace': Array([0., 0.], dtype=float32)}
    """
    found = optax.tree_utils.tree_get_all_with_path(state, name)
    fields = [x for path, x in found if not isinstance(path[-1], jax.tree_util.DictKey)]
    fields = fields or [x for _, x in found if isinstance(x, dict)]
    if len(fields) > 1:
        raise ValueError(
            f"the state of a rule has {len(fields)} fields {name!r}: use a rule with one of them"
        )
    return fields[0] if fields else default


def at_step(opt: PyTree, step: int, comes_R: np.ndarray) -> PyTree:
    """Set the learning-rate schedules of regions that come into a run to the run's step.

    Moments stay as they are, with their own counts for the bias correction.

    Args:
      opt: state of an Optax optimizer, leaves `[R, ...]`; schedules are those of
        `optax.scale_by_schedule` and `optax.inject_hyperparams`.
      step: inner steps of the run.
      comes_R: bool `[R]`, the regions that come in.
    """

    def one(state: Any) -> Any:
        if not is_schedule(state):
            return state
        inside = {
            name: at_step(getattr(state, name), step, comes_R)
            for name in ("hyperparams_states", "inner_state")
            if name in state._fields
        }
        return state._replace(count=_counted(state.count, comes_R, np.int32(step)), **inside)

    return jax.tree.map(one, opt, is_leaf=is_schedule)


def is_schedule(state: Any) -> bool:
    """Whether a node of an optimizer's state says where a schedule stands; see `at_step`."""
    known = optax.ScaleByScheduleState | optax.InjectStatefulHyperparamsState
    # Optax does not export the state of a schedule that `inject_hyperparams` has wrapped.
    return isinstance(state, known) or type(state).__name__ == "WrappedScheduleState"


@jax.jit
def _counted(count_R, comes_R, step):
    return jnp.where(comes_R, step, count_R)


def _muon(config: InnerConfig, rate, adamw, stacked) -> optax.GradientTransformation:
    """Muon for matrices, AdamW for the rest: embeddings, head, vectors, kernels of higher rank.

    Which axes of such a kernel, as of a convolution or one axis per head, make a matrix depends on
    the layer, and does not show in the shape. `optax.contrib.muon` leaves them to AdamW, too.
    """

    def labels(params: PyTree) -> PyTree:
        def label(name, leaf):
            rank = leaf.ndim - is_stacked(name, stacked)
            return "muon" if rank == 2 and kind_of(name, leaf, stacked) == "matrix" else "adamw"

        return _by_name(params, label)

    def dimensions(params: PyTree) -> PyTree:
        # The last two axes are the matrix; a leading layer axis is a batch of matrices.
        return jax.tree.map(
            lambda x: contrib.MuonDimensionNumbers(
                reduction_axis=x.ndim - 2, output_axis=x.ndim - 1
            ),
            params,
        )

    muon = optax.chain(
        contrib.scale_by_muon(
            beta=config.muon_beta,
            ns_steps=config.muon_steps,
            weight_dimension_numbers=dimensions,
        ),
        _scale_to_rms(config.muon_rms),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    return optax.partition({"muon": muon, "adamw": adamw}, labels)


def _scale_to_rms(rms: float) -> optax.GradientTransformation:
    """Scale an orthogonal [m, n] update, of RMS 1/sqrt(max(m, n)), to RMS `rms`."""

    def scale(u: jax.Array) -> jax.Array:
        return u * (rms * max(u.shape[-2:]) ** 0.5)

    return optax.stateless(lambda updates, _: jax.tree.map(scale, updates))


def _by_name(params: PyTree, fn: Callable[[str, Any], Any]) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, x: fn(path_name(path), x), params)
