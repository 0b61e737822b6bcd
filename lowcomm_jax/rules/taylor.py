r"""CoCoDC's delay compensation: replay the progress as if it had started from the new anchor.

$$g = -u/\tau, \qquad \hat g = g + \lambda\, g \odot g \odot D, \qquad
  \theta \leftarrow \Theta' + T(u), \quad
  T(u) = -\tau \hat g = u - \tfrac{\lambda}{\tau}\, u \odot u \odot D$$

| symbol | meaning |
| --- | --- |
| $u = \theta - s$ | local progress since the send; $s$ is the snapshot at the send |
| $\tau$ | real staleness in inner steps (1 is used where it is 0) |
| $g$ | mean step of the flight with the sign of a gradient, in parameter units |
| $D = \Theta' - s$ | displacement of the anchor, seen from the snapshot |
| $\lambda$ | `strength`; $\lambda\,\mathrm{diag}(g g^\top)$ stands in for the Hessian |
| $\eta$ | mean inner learning rate of the flight |
| $\rho$ | product over the flight of $1 - \eta_t\,wd$ |

Modes:

| mode | factor $f$ in $\hat g = g + g \odot f$ | strength is |
| --- | --- | --- |
| `off` | 0, which is `replay` | not read |
| `fixed` | $\lambda\, g \odot D$ | in parameter units |
| `gradient_units` | $(\lambda/\eta)\, g \odot D$ | in gradient units |
| `norm` | $\lambda\, g \odot D$ clipped to $\pm 1$ | $\lambda_0$, relative to the gradient |

Norm: $\lambda = \lambda_0 \lVert g\rVert / \lVert g \odot g \odot D\rVert$ per tensor or fragment.

Gradient units: with $\tilde g = g/\eta$ the corrected gradient is
$\tilde g + \lambda\, \tilde g \odot \tilde g \odot D$. Times $\eta$ it is a step again:
$\hat g = g + (\lambda/\eta)\, g \odot g \odot D$.

Weight decay that is decoupled from the gradient says nothing about the gradient. With it the flight
unrolls to $\theta = \rho\, s + w$, so that the part to correct is
$w = u + (1 - \rho)(\Theta' - D)$. The same steps taken from the anchor end at
$\rho\,\Theta' - \tau\hat g$, that is:

$$T(u) = u - (1 - \rho)\, D - \tfrac{\lambda}{\tau}\, w \odot w \odot D$$

Source: CoCoDC, arXiv 2504.17672, delay compensation (equation numbers not verified), after
DC-ASGD, arXiv 1609.08326 (the constant-lambda update); norm scaling after DC-S3GD,
arXiv 1911.02516.

Differs from the paper: `fixed` is the paper's rule. The other modes and the weight-decay option are
additions, because the fixed rule changes almost no value at the size of AdamW's steps. `norm` clips
the factor by element and does not cap $\lambda$: at the sizes below $\lambda$ is half a million,
and a cap would make the term 0. `gradient_units` divides by the learning rate only, so that with
AdamW $\tilde g$ is its preconditioned direction, not the gradient.

How little the fixed mode changes, measured on 2^20 Gaussian elements (fp32 on CPU;
`tests/rules/test_taylor_size.py` repeats it). The sizes are those of an AdamW run: parameters
0.02, lr 4e-4, $g$ = 0.3 lr = 1.2e-4, $D$ = 5e-3, $\tau$ = 5, strength 0.5.

| mode | correction relative to $g$ | landed values that differ from `replay` |
| --- | --- | --- |
| `fixed` | 5.2e-7 | 17 %, by 4.8e-10 rms, a quarter of one rounding step at 0.02 |
| `gradient_units` | 1.3e-3 | 96 % |
| `norm` | 0.45 (0.5 before the clip) | 99.8 % |
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.refused import in_range, refuse
from lowcomm_jax.rules.precision import in_fp32, widen
from lowcomm_jax.settings import one_of

PyTree = Any
Leaves = list[jax.Array]
Mode = Literal["off", "fixed", "gradient_units", "norm"]
Scope = Literal["tensor", "fragment"]


class TaylorState(NamedTuple):
    """Last ||correction|| / ||g|| over the whole tree, fp32 scalar; 0 before the first landing."""

    correction_ratio: jax.Array


def taylor_delay_correction(
    strength: PyTree | Callable[[PyTree, PyTree], PyTree] = 0.5,
    mode: Mode = "fixed",
    learning_rate: optax.ScalarOrSchedule | None = None,
    scope: Scope = "tensor",
    weight_decay: PyTree | None = None,
    batch_axes: int | Callable[[str], int] = 0,
) -> optax.GradientTransformationExtraArgs:
    """Replay the in-flight progress, corrected to first order for the anchor's displacement.

    Args:
      strength: lambda (lambda_0 in mode "norm"), one of three. A number. A tree prefix of the
        progress, whose leaves are scalars or arrays that match the leading axes of the progress.
        Or a function of (g, displacement), fp32 trees, that returns such a prefix.
      mode: "off", "fixed", "gradient_units" or "norm", see the module docstring.
      learning_rate: inner learning rate, for "gradient_units" and for ``weight_decay``. A schedule
        is counted in inner steps, and update then needs ``step``, the inner steps done so far.
      scope: over what mode "norm" takes its norms: each "tensor", or the whole "fragment", which is
        the tree that update receives.
      weight_decay: decoupled weight decay of the inner optimizer: a number or a tree prefix of
        numbers (0 for exempt leaves); None leaves decay inside the progress.
      batch_axes: how many leading axes of a leaf stack separate tensors, for mode "norm" with
        scope "tensor": a number for all leaves, or a function of the leaf's path ("blocks/w").

    Returns:
      A transform of the in-flight progress with the keywords ``displacement`` (tree of the
      progress), ``staleness`` (int32 scalar, inner steps) and, for a schedule, ``step``. Its output
      is added to the new anchor; ``weight_decay`` needs that anchor as ``params``. fp32 arithmetic;
      the state is a `TaylorState`.

    Raises:
      ValueError: an argument is out of range, or a mode or option lacks the learning rate; all are
        listed. At update: ``params`` or ``step`` is missing, or batch_axes exceeds a leaf's axes.

    >>> import jax.numpy as jnp, optax
    >>> rule = taylor_delay_correction(0.5)
    >>> u, d = jnp.array([2.0, -1.0]), jnp.array([1.0, 4.0])
    >>> moved, state = rule.update(u, rule.init(u), displacement=d, staleness=4)
    >>> moved                                                   # u - 0.5 / 4 * u * u * d
    Array([ 1.5, -1.5], dtype=float32)
    >>> print(f"{optax.tree.get(state, 'correction_ratio'):.3f}")
    0.316
    """
    _check(strength, mode, learning_rate, scope, weight_decay, batch_axes)
    needs_rate = mode == "gradient_units" or weight_decay is not None

    def init(params):
        del params
        return TaylorState(correction_ratio=jnp.zeros((), jnp.float32))

    def update(progress, state, params=None, *, displacement, staleness, step=None, **extra):
        del state, extra
        displacement = widen(displacement)
        tau = jnp.asarray(staleness, jnp.int32)
        flight = over_flight(learning_rate, weight_decay, tau, step) if needs_rate else None
        landed, gradient_part = progress, progress
        if weight_decay is not None:
            decayed = jax.tree.broadcast(flight.decayed, progress)
            landed, gradient_part = _without_decay(progress, displacement, params, decayed)
        g = jax.tree.map(lambda w: -w / jnp.maximum(tau, 1).astype(jnp.float32), gradient_part)
        if mode == "off":
            factor = jax.tree.map(jnp.zeros_like, g)
        elif mode == "norm":
            factor = _norm_factor(g, displacement, strength, scope, batch_axes)
        else:
            # A rate of 0 moved nothing, so there is no gradient to correct.
            rate = flight.mean_rate if mode == "gradient_units" else jnp.float32(1.0)
            scale = jnp.where(rate > 0, 1.0 / jnp.where(rate > 0, rate, 1.0), 0.0)
            factor = jax.tree.map(
                lambda lam, x, d: lam * scale * x * d,
                _strength_leaves(strength, g, displacement),
                g,
                displacement,
            )
        correction = jax.tree.map(jnp.multiply, gradient_part, factor)
        moved = jax.tree.map(jnp.add, landed, correction)
        return moved, TaylorState(_relative_norm(correction, gradient_part))

    return in_fp32(optax.GradientTransformationExtraArgs(init, update))


def _check(strength, mode, learning_rate, scope, weight_decay, batch_axes) -> None:
    lacks_rate = learning_rate is None
    refuse(
        "taylor_delay_correction",
        [
            _in_tree("strength", strength, open_high=True, or_function=True),
            one_of("off", "fixed", "gradient_units", "norm").problem("mode", mode),
            one_of("tensor", "fragment").problem("scope", scope),
            None
            if lacks_rate
            else in_range(
                "learning_rate", learning_rate, 0.0, float("inf"), open_low=True, or_function=True
            ),
            None if weight_decay is None else _in_tree("weight_decay", weight_decay),
            in_range("batch_axes", batch_axes, 0, float("inf"), or_function=True),
            "mode='gradient_units' needs the inner optimizer's learning_rate: pass it"
            if lacks_rate and mode == "gradient_units"
            else None,
            "weight_decay needs the inner optimizer's learning_rate: pass it"
            if lacks_rate and weight_decay is not None
            else None,
        ],
    )


def _in_tree(name: str, tree: PyTree, **limits: bool) -> str | None:
    """A line about the first leaf that is no number from 0 on, or None; arrays with axes pass."""
    leaves = [tree] if tree is None else jax.tree.leaves(tree)
    numbers = (leaf for leaf in leaves if not getattr(leaf, "ndim", 0))
    found = (in_range(name, number, 0.0, float("inf"), **limits) for number in numbers)
    return next(filter(None, found), None)


def _without_decay(progress, displacement, anchor, decayed) -> tuple[PyTree, PyTree]:
    """Split off weight decay: (what lands without a correction, the progress due to gradients)."""
    if anchor is None:
        raise ValueError("weight_decay needs the new anchor: pass it as params")
    landed = jax.tree.map(lambda u, d, lost: u - lost * d, progress, displacement, decayed)
    gradient_part = jax.tree.map(
        lambda u, d, a, lost: u + lost * (a - d), progress, displacement, anchor, decayed
    )
    return landed, gradient_part


def _strength_leaves(strength, g: PyTree, displacement: PyTree) -> PyTree:
    """Give every leaf of g its strength, with trailing axes added so that it broadcasts."""
    prefix = strength(g, displacement) if callable(strength) else strength

    def align(value, leaf):
        value = jnp.asarray(value, jnp.float32)
        return value.reshape(value.shape + (1,) * (leaf.ndim - value.ndim))

    return jax.tree.map(align, jax.tree.broadcast(prefix, g), g)


def _norm_factor(g, displacement, strength, scope, batch_axes) -> PyTree:
    paths_and_leaves, structure = jax.tree.flatten_with_path(g)
    stacked = None
    if scope == "tensor":
        stacked = [_stacked_axes(batch_axes, path, leaf) for path, leaf in paths_and_leaves]
    factors = norm_scaled_factors(
        [leaf for _, leaf in paths_and_leaves],
        jax.tree.leaves(displacement),
        jax.tree.leaves(_strength_leaves(strength, g, displacement)),
        stacked,
    )
    return jax.tree.unflatten(structure, factors)


def _stacked_axes(batch_axes: int | Callable[[str], int], path: Any, leaf: jax.Array) -> int:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    stacked = batch_axes(name) if callable(batch_axes) else batch_axes
    if not 0 <= stacked <= leaf.ndim:
        raise ValueError(
            f"batch_axes={stacked} for leaf {name!r} of shape {leaf.shape}: "
            f"choose between 0 and {leaf.ndim}"
        )
    return stacked


def _relative_norm(part: PyTree, whole: PyTree) -> jax.Array:
    peak = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(whole):
        peak = jnp.maximum(peak, jnp.max(jnp.abs(leaf), initial=0.0))
    scale = jnp.where(peak > 0, peak, 1.0)
    above = optax.tree.norm(jax.tree.map(lambda x: x / scale, part))
    below = optax.tree.norm(jax.tree.map(lambda x: x / scale, whole))
    return jnp.where(below > 0, above / jnp.where(below > 0, below, 1.0), 0.0)


# The inner learning rate while a payload travelled: its mean, and the weight decay it caused.


class RateInFlight(NamedTuple):
    """Learning rate and weight decay over the inner steps of one flight, fp32 scalars.

    Attributes:
      mean_rate: mean inner learning rate; that of the last step before the landing if none was
        made.
      decayed: 1 - product over the flight of (1 - rate * weight_decay), a tree like the weight
        decay; 0 if no step was made.
    """

    mean_rate: jax.Array
    decayed: PyTree


def over_flight(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: PyTree,
    staleness: jax.Array,
    step: jax.Array | None,
) -> RateInFlight:
    """Accumulate the inner schedule over the last ``staleness`` inner steps.

    Args:
      learning_rate: inner learning rate; a schedule takes the count that Optax gives it, which is
        0 at the first inner step.
      weight_decay: tree of scalars.
      staleness: int32 scalar, inner steps of the flight; may be traced.
      step: int32 scalar, inner steps done at the landing; only a schedule needs it.

    Raises:
      ValueError: the learning rate is a schedule and ``step`` is missing.
    """
    if callable(learning_rate) and step is None:
        raise ValueError(
            "the inner learning rate is a schedule: pass step=, the inner steps done at the landing"
        )
    if callable(learning_rate):
        end = jnp.asarray(step, jnp.int32)
        mean_rate, log_kept = _along_schedule(learning_rate, weight_decay, staleness, end)
    else:
        mean_rate, steps = jnp.asarray(learning_rate, jnp.float32), staleness.astype(jnp.float32)
        log_kept = jax.tree.map(lambda wd: steps * jnp.log1p(-mean_rate * wd), weight_decay)
    return RateInFlight(mean_rate, jax.tree.map(lambda x: -jnp.expm1(x), log_kept))


def _along_schedule(schedule, weight_decay: PyTree, staleness: jax.Array, end: jax.Array):
    """Mean rate and sum of log(1 - rate * weight_decay) over the counts [end - staleness, end)."""
    steps = jnp.maximum(staleness, 1)

    def advance(count, carry):
        total, log_kept = carry
        rate = jnp.asarray(schedule(count), jnp.float32)
        # A product of factors this close to 1 would lose the decay to rounding; logarithms keep it.
        longer = jax.tree.map(lambda x, wd: x + jnp.log1p(-rate * wd), log_kept, weight_decay)
        return total + rate, longer

    start = (jnp.zeros((), jnp.float32), jax.tree.map(lambda _: jnp.float32(0.0), weight_decay))
    total, log_kept = jax.lax.fori_loop(end - steps, end, advance, start)
    log_kept = jax.tree.map(lambda x: jnp.where(staleness > 0, x, 0.0), log_kept)
    return total / steps.astype(jnp.float32), log_kept


# Mode "norm": the factor f = clip(lambda g * D, -1, 1), whose size does not depend on units. Before
# the clip the correction g * f has norm lambda_0 ||g||. The clip keeps every element of g + g * f
# from changing its sign.


def norm_scaled_factors(
    g: Leaves, displacement: Leaves, strength: Leaves, batch_axes: list[int] | None
) -> Leaves:
    """Compute f for every leaf.

    Args:
      g: mean gradient over the flight, fp32 leaves; its unit does not matter.
      displacement: leaves like g.
      strength: lambda_0 for every leaf, broadcastable to it.
      batch_axes: number of leading axes of every leaf over which separate tensors are stacked;
        None takes all norms over all leaves together.

    Returns:
      Leaves like g, elements in [-1, 1]; 0 where g or the displacement vanishes.
    """
    reduce_ = _over_fragment if batch_axes is None else _over_tensors(batch_axes)
    # Divided by their largest element first: squares of squares of an AdamW step underflow in fp32.
    g = _divide(g, reduce_(_peak, jnp.maximum, g))
    displacement = _divide(displacement, reduce_(_peak, jnp.maximum, displacement))
    quadratic = [x * x * d for x, d in zip(g, displacement, strict=True)]
    squares = reduce_(_sum_of_squares, jnp.add, g)
    quadratic_squares = reduce_(_sum_of_squares, jnp.add, quadratic)
    ratios = [
        jnp.where(below > 0, jnp.sqrt(above / jnp.where(below > 0, below, 1.0)), 0.0)
        for above, below in zip(squares, quadratic_squares, strict=True)
    ]
    return [
        jnp.clip(s * ratio * x * d, -1.0, 1.0)
        for s, ratio, x, d in zip(strength, ratios, g, displacement, strict=True)
    ]


def _peak(leaf: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.max(jnp.abs(leaf), axis=axes, keepdims=True, initial=0.0)


def _sum_of_squares(leaf: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sum(leaf * leaf, axis=axes, keepdims=True)


def _divide(leaves: Leaves, peaks: Leaves) -> Leaves:
    return [x / jnp.where(peak > 0, peak, 1.0) for x, peak in zip(leaves, peaks, strict=True)]


def _over_tensors(batch_axes: list[int]) -> Callable[..., Leaves]:
    def reduce_(statistic, _merge, leaves):
        return [
            statistic(leaf, tuple(range(stacked, leaf.ndim)))
            for leaf, stacked in zip(leaves, batch_axes, strict=True)
        ]

    return reduce_


def _over_fragment(statistic, merge, leaves: Leaves) -> Leaves:
    total = jnp.zeros((), jnp.float32)
    for leaf in leaves:
        total = merge(total, statistic(leaf, tuple(range(leaf.ndim))).reshape(()))
    return [total] * len(leaves)
