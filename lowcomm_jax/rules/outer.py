r"""Outer rules: how the anchor moves along the merged pseudo-gradient.

Each function gives an Optax transform. In: the merged pseudo-gradient as updates (by default the
mean over regions of anchor - local; any tree, any shapes), and the anchor as `params`. Out: what
the loop adds to the anchor. Arithmetic and state are fp32 (`precision.in_fp32`).

A learning rate may be a schedule: it counts the updates of its own state, which are outer rounds of
a fragment, or arrivals. A function raises a `ValueError` that lists all arguments out of range.

| symbol | meaning |
| --- | --- |
| $\Theta$ | anchor |
| $\bar\Delta$ | merged pseudo-gradient: a direction to descend along |
| $v$, $m$ | outer momentum, a sum or an average, fp32, starts at zero |
| $\eta$ | `learning_rate` |
| $\mu$ | `momentum` |
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.optimizers import state_field
from lowcomm_jax.refused import at_least, in_range, rates, refuse
from lowcomm_jax.rules.precision import in_fp32, widen
from lowcomm_jax.settings import one_of

PyTree = Any
Transform = optax.GradientTransformationExtraArgs
Variant = Literal["heavy_ball", "nesterov"]
VARIANTS = ("heavy_ball", "nesterov")

__all__ = [
    "NAMES",
    "DelayedNesterovState",
    "GossipState",
    "Mixing",
    "MomentumAverageState",
    "RestartingState",
    "average",
    "delayed_nesterov",
    "eager",
    "gossip",
    "heavy_ball",
    "look_ahead",
    "momentum_average",
    "nesterov",
    "restarting",
    "sgd",
]


class Mixing(optax.GradientTransformationExtraArgs):
    """An Optax transform whose updates mix a tensor's entries, by products or sums over them.

    Every region evaluates it for itself, of an anchor that all share. Of other rules, which are
    evaluated entry by entry, compilers place the arithmetic: a product of tensors they would cut
    over the regions, and exchange its parts, which no ledger announces.
    """


def sgd(learning_rate: optax.ScalarOrSchedule) -> Transform:
    r"""Step along the pseudo-gradient.

    $$\Theta \leftarrow \Theta - \eta\,\bar\Delta$$

    Source: one of the outer optimizers of DiLoCo, arXiv 2311.08105, Algorithm 1; the outer step of
    AdLoCo (arXiv 2508.18182, rate 0.5).

    Args:
      learning_rate: eta, not negative; a schedule is counted in outer rounds.

    >>> import jax.numpy as jnp
    >>> rule = sgd(0.25)
    >>> rule.update(jnp.ones(2), rule.init(jnp.zeros(2)))[0]
    Array([-0.25, -0.25], dtype=float32)
    """
    rate = in_range("learning_rate", learning_rate, 0.0, float("inf"), or_function=True)
    refuse("sgd", [rate])
    return in_fp32(optax.sgd(learning_rate))


def average() -> Transform:
    r"""Move the anchor onto the mean of the regions' parameters $\theta_r$.

    $$\Theta \leftarrow \Theta - \bar\Delta = \tfrac1R \sum_r \theta_r$$

    Source: FederatedAveraging, arXiv 1602.05629, Algorithm 1; local SGD, arXiv 1805.09767. Differs
    from them: a step of rate 1 along the pseudo-gradient, so that the mean of the parameters comes
    out up to fp32 rounding.

    >>> import jax.numpy as jnp
    >>> rule = average()
    >>> anchor, mean_of_regions = jnp.array([1.0, 2.0]), jnp.array([0.5, 4.0])
    >>> update, _ = rule.update(anchor - mean_of_regions, rule.init(anchor), anchor)
    >>> anchor + update
    Array([0.5, 4. ], dtype=float32)
    """
    return sgd(1.0)


def nesterov(learning_rate: optax.ScalarOrSchedule = 0.7, momentum: float = 0.9) -> Transform:
    r"""Step along the pseudo-gradient with Nesterov's look-ahead: the outer rule of DiLoCo.

    $$v \leftarrow \mu v + \bar\Delta, \qquad
      \Theta \leftarrow \Theta - \eta\,(\bar\Delta + \mu v)$$

    There is no dampening, bias correction, decay or clipping, so the first step moves
    $(1 + \mu)\,\eta\,\bar\Delta$ and not $\eta\,\bar\Delta$. The state is that of `optax.sgd`.

    Source: DiLoCo, arXiv 2311.08105, Algorithm 1 (OuterOpt); written out in 2401.09135, eq. 4.

    Args:
      learning_rate: eta, not negative; a schedule is counted in outer rounds, not inner steps.
      momentum: weight of the old momentum, in [0, 1).

    >>> import jax.numpy as jnp
    >>> rule = nesterov(0.5, 0.8)
    >>> update, state = rule.update(jnp.ones(2), rule.init(jnp.zeros(2)))
    >>> update                                                  # -(1 + 0.8) * 0.5
    Array([-0.9, -0.9], dtype=float32)
    """
    refuse("nesterov", rates(learning_rate, momentum))
    return in_fp32(optax.sgd(learning_rate, momentum=momentum, nesterov=True))


def heavy_ball(learning_rate: optax.ScalarOrSchedule, momentum: float) -> Transform:
    r"""Step along the momentum of the pseudo-gradient, without look-ahead.

    $$v \leftarrow \mu v + \bar\Delta, \qquad \Theta \leftarrow \Theta - \eta\,v$$

    Source: the momentum variant (SGDM) of the outer optimizers searched in DiLoCo, arXiv
    2311.08105, Algorithm 1. With one group of all regions it is also the outer step of NoLoCo,
    arXiv 2506.10911. Some published code calls this rule Nesterov although it has no look-ahead.

    Args:
      learning_rate: eta, not negative; a schedule is counted in outer rounds.
      momentum: weight of the old momentum, in [0, 1).

    >>> import jax.numpy as jnp
    >>> rule = heavy_ball(0.5, 0.8)
    >>> state = rule.init(jnp.zeros(2))
    >>> update, state = rule.update(jnp.ones(2), state)
    >>> update, state = rule.update(jnp.ones(2), state)
    >>> update                                                  # -0.5 * (1 + 0.8)
    Array([-0.9, -0.9], dtype=float32)
    """
    refuse("heavy_ball", rates(learning_rate, momentum))
    return in_fp32(optax.sgd(learning_rate, momentum=momentum, nesterov=False))


class MomentumAverageState(NamedTuple):
    """State of `momentum_average`: fp32, a tree like the parameters."""

    momentum: PyTree


def momentum_average(learning_rate: float = 0.7, momentum: float = 0.9) -> Transform:
    r"""Step along the pseudo-gradient and an exponential average of all of them so far.

    $$m \leftarrow \mu\, m + (1 - \mu)\,\bar\Delta, \qquad
      \Theta \leftarrow \Theta - \eta\,(\bar\Delta + \mu\, m)$$

    Source: HeLoCo's published code (arXiv 2606.00271; of the paper only notes were read).

    Args:
      learning_rate: eta, not negative; a constant, since `look_ahead` needs the same one.
      momentum: weight of the old momentum, in [0, 1).

    >>> import jax.numpy as jnp
    >>> rule = momentum_average(0.5, 0.8)
    >>> update, state = rule.update(jnp.ones(2), rule.init(jnp.zeros(2)))
    >>> update                                                  # -0.5 * (1 + 0.8 * 0.2)
    Array([-0.58, -0.58], dtype=float32)
    """
    refuse("momentum_average", rates(learning_rate, momentum, schedule=False))

    def init(params):
        return MomentumAverageState(jax.tree.map(jnp.zeros_like, params))

    def update(delta, state, params=None, **extra):
        del params, extra
        renewed = jax.tree.map(
            lambda m, d: momentum * m + (1 - momentum) * d, state.momentum, delta
        )
        updates = jax.tree.map(lambda d, m: -learning_rate * (d + momentum * m), delta, renewed)
        return updates, MomentumAverageState(renewed)

    return in_fp32(Transform(init, update))


def look_ahead(learning_rate: float, momentum: float) -> Callable[[PyTree, PyTree], PyTree]:
    r"""What a method hands out for the anchor: $\Theta - \eta\,\mu\, m$, a momentum step ahead.

    Args:
      learning_rate, momentum: as given to `momentum_average`.

    Returns:
      `(anchor, outer state) -> values`, for `Method.hands_out`; both trees are of one anchor.
    """

    def handed_out(anchor: PyTree, outer_state: PyTree) -> PyTree:
        ahead = state_field(outer_state, "momentum")
        return jax.tree.map(lambda x, m: x - learning_rate * momentum * m, anchor, ahead)

    return handed_out


class RestartingState(NamedTuple):
    """State of `restarting`.

    Attributes:
      momentum: fp32, a tree like the parameters.
      restarts: int32 scalar, how many restarts were due before the last round.
    """

    momentum: PyTree
    restarts: jax.Array


def restarting(learning_rate: float = 0.9, momentum: float = 0.7, every: int = 3) -> Transform:
    r"""Step along a momentum that is set to zero every `every` rounds.

    $$m' = \mu\, m + (1 - \mu)\,\bar\Delta, \qquad
      \Theta \leftarrow \Theta - \eta\,\bigl((1 + \mu)\, m' - \mu\, m\bigr), \qquad
      m \leftarrow m', \text{ after every $K$-th round } 0$$

    with $K$ = `every`. Rounds are those of the fragment, as the engine counts them. One that moves
    no anchor (no region counted) counts, too; a restart due there comes at the next that does.

    Source: notes of a replication of arXiv 2605.28585, where $K$ and the rates are from; of the
    paper only the abstract was read.

    Args:
      learning_rate: eta, not negative.
      momentum: weight of the old momentum, in [0, 1).
      every: rounds between two restarts; 1 = no momentum is ever carried over.

    Returns:
      A transform whose `update` must be told `round` (int, from 0), as an engine does.

    >>> import jax.numpy as jnp
    >>> rule = restarting(0.5, 0.8, every=2)
    >>> state = rule.init(jnp.zeros(1))
    >>> for n in range(3):                                      # -0.5 * (1.8 m' - 0.8 m)
    ...     update, state = rule.update(jnp.ones(1), state, round=n)
    ...     print(f"{update[0]:.3f}")                           # the third as the first
    -0.180
    -0.244
    -0.180
    """
    refuse(
        "restarting",
        [
            *rates(learning_rate, momentum, schedule=False),
            at_least("every", every, 1),
        ],
    )

    def init(params):
        return RestartingState(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(delta, state, params=None, *, round, **extra):
        del params, extra
        restarts = jnp.asarray(round, jnp.int32) // every
        goes_on = restarts == state.restarts
        old = jax.tree.map(lambda m: jnp.where(goes_on, m, jnp.zeros_like(m)), state.momentum)
        new = jax.tree.map(lambda m, d: momentum * m + (1 - momentum) * d, old, delta)
        updates = jax.tree.map(
            lambda m, n: -learning_rate * ((1 + momentum) * n - momentum * m), old, new
        )
        return updates, RestartingState(new, restarts)

    return in_fp32(Transform(init, update))


class DelayedNesterovState(NamedTuple):
    """State of `delayed_nesterov`; counters are int32 scalars, trees are fp32.

    arrivals: arrivals seen so far (saturates at the largest int32).
    pending: arrivals in the open window, in [0, buffer).
    momentum, pending_sum: trees like the parameters.
    """

    arrivals: jax.Array
    pending: jax.Array
    momentum: PyTree
    pending_sum: PyTree


def delayed_nesterov(
    learning_rate: optax.ScalarOrSchedule, momentum: float, buffer: int, c: float = 0.0
) -> Transform:
    r"""Descend along each arrival at once, and renew the momentum every `buffer` arrivals.

    On the arrival of one region's $\Delta_t$, with $q$ the arrivals already in the window, whose
    sum is $b$, and $N$ = `buffer`:

    $$b \leftarrow b + \Delta_t$$
    $$q + 1 = N:\quad v \leftarrow \mu v + \tfrac1N b,\quad
      \Theta \leftarrow \Theta - \eta\big((1 - cN + c)\,\mu v + \tfrac1N \Delta_t\big),\quad
      b \leftarrow 0,\; q \leftarrow 0$$
    $$\text{else}:\quad
      \Theta \leftarrow \Theta - \eta\big(c\,\mu v + \tfrac1N \Delta_t\big),\quad
      q \leftarrow q + 1$$

    $N$ arrivals measured against one anchor, with $c = 0$, equal one synchronous Nesterov step of
    rate $\eta$ on their mean. The factor $1/N$ is inside the rule: give $\eta$ without it. Which
    branch applies is decided on the device, from a counter in the state.

    Source: Asynchronous Local-SGD, arXiv 2401.09135, Algorithm 3. Differs from it: the counter of
    the window is kept modulo $N$, so that it never overflows.

    Args:
      learning_rate: eta, not negative; a schedule is counted in arrivals.
      momentum: weight of the old momentum, in [0, 1).
      buffer: arrivals in a window (usually the number of regions), at least 1.
      c: share of the momentum applied at the arrivals that do not close a window, in
        [0, 1 / buffer]; 0 applies it only when a window closes.

    >>> import jax.numpy as jnp
    >>> rule = delayed_nesterov(0.5, 0.8, buffer=2)
    >>> state = rule.init(jnp.zeros(()))
    >>> first, state = rule.update(jnp.float32(1.0), state)     # -0.5 * 1 / 2
    >>> second, state = rule.update(jnp.float32(3.0), state)    # -0.5 * (0.8 * 2 + 3 / 2)
    >>> print(f"{first:.2f} {second:.2f}, together {first + second:.2f}")
    -0.25 -1.55, together -1.80
    """
    no_window = at_least("buffer", buffer, 1)
    refuse(
        "delayed_nesterov",
        [
            *rates(learning_rate, momentum),
            no_window,
            in_range("c", c, 0.0, 1.0 / buffer) if no_window is None else None,
        ],
    )
    share_when_full = 1.0 - c * buffer + c

    def init(params):
        return DelayedNesterovState(
            arrivals=jnp.zeros((), jnp.int32),
            pending=jnp.zeros((), jnp.int32),
            momentum=jax.tree.map(jnp.zeros_like, params),
            pending_sum=jax.tree.map(jnp.zeros_like, params),
        )

    def update(delta, state, params=None, **extra):
        del params, extra
        rate = learning_rate(state.arrivals) if callable(learning_rate) else learning_rate
        full = state.pending + 1 == buffer
        total = jax.tree.map(jnp.add, state.pending_sum, delta)
        renewed = jax.tree.map(
            lambda v, b: jnp.where(full, momentum * v + b / buffer, v), state.momentum, total
        )
        share = jnp.where(full, share_when_full, c) * momentum
        updates = jax.tree.map(lambda v, d: -rate * (share * v + d / buffer), renewed, delta)
        return updates, DelayedNesterovState(
            arrivals=optax.safe_increment(state.arrivals),
            pending=jnp.where(full, 0, state.pending + 1),
            momentum=renewed,
            pending_sum=jax.tree.map(lambda b: jnp.where(full, jnp.zeros_like(b), b), total),
        )

    return in_fp32(Transform(init, update))


def eager(inner_rule: optax.GradientTransformation) -> Transform:
    r"""Swap the late own part of the mean for the fresh one, then apply `inner_rule`.

    $$g_r = \bar\Delta^{late} + w\,\Delta_r - w^{late}\,\Delta_r^{late}, \qquad
      \Theta_r \leftarrow \Theta_r + \mathrm{inner\_rule}(g_r)$$

    | symbol | meaning |
    | --- | --- |
    | $\bar\Delta^{late}$ | mean pseudo-gradient of the last period, just arrived; 0 in the first |
    | $\Delta_r$ | own pseudo-gradient of this period, as the others will decode it (`own`) |
    | $\Delta_r^{late}$ | own part inside that mean, as the others decoded it (`own_late`) |
    | $w, w^{late}$ | weight of the region in the mean of this and of the previous period |
    | $\Theta_r$ | anchor of region $r$, its own |

    The product $w\,\Delta_r$ that one period adds must be the one that the next period subtracts;
    then differences between the anchors do not add up. With plain descent of rate $\eta$ an anchor
    differs from their mean by $-\eta\,(w\Delta_r - \overline{w\Delta})$ after every period, however
    many there were.

    Source: Eager updates for overlapped communication, arXiv 2502.12996, Algorithm 3. Differs from
    it: the weights are arguments (the paper has $1/M$), so that absent regions and token weights
    work.

    Args:
      inner_rule: outer rule for the mixed pseudo-gradient, for example `nesterov(0.4, 0.9)`; extra
        arguments are handed on to it.

    Returns:
      A transform of the late mean with the keywords `own` and `own_late` (trees like it), `weight`
      (scalar) and `weight_late` (scalar, equal to `weight` if not given). Its state is that of
      `inner_rule`.

    >>> import jax.numpy as jnp
    >>> rule = eager(sgd(1.0))
    >>> late_mean, own, own_late = jnp.array([2.0]), jnp.array([4.0]), jnp.array([1.0])
    >>> rule.update(
    ...     late_mean, rule.init(own), own=own, own_late=own_late, weight=0.25)[0]
    Array([-2.75], dtype=float32)
    """
    inner = in_fp32(inner_rule)

    def update(late_mean, state, params=None, *, own, own_late, weight, weight_late=None, **extra):
        fresh = jnp.asarray(weight, jnp.float32)
        stale = fresh if weight_late is None else jnp.asarray(weight_late, jnp.float32)
        mixed = jax.tree.map(
            lambda late, new, old: late + fresh * new - stale * old,
            late_mean,
            widen(own),
            widen(own_late),
        )
        return inner.update(mixed, state, params, **extra)

    return in_fp32(Transform(inner.init, update))


class GossipState(NamedTuple):
    """Outer momentum of one region: an fp32 tree like the parameters, along the step."""

    momentum: PyTree


def gossip_problems(alpha: float, beta: float, gamma: float, variant: str) -> list[str]:
    """What is out of range, one line each with its fix, whatever the number of regions."""
    checks = [
        in_range("alpha", alpha, 0.0, 1.0, open_high=True),
        in_range("beta", beta, 0.0, float("inf")),
        in_range("gamma", gamma, 0.0, float("inf")),
        one_of(*VARIANTS).problem("variant", variant),
    ]
    return [problem for problem in checks if problem is not None]


def gossip(alpha: float, beta: float, gamma: float, variant: Variant = "heavy_ball") -> Transform:
    r"""Step along the pseudo-gradient of a group of regions, and towards the group's mean anchor.

    $$\delta_i \leftarrow \alpha\,\delta_i - \beta\,\bar\Delta_G
      - \gamma\,\big(\phi_i - \bar\phi_G\big)$$
    $$\text{heavy ball: } \phi_i \leftarrow \phi_i + \delta_i, \qquad
      \text{nesterov: } \phi_i \leftarrow \phi_i + \alpha\,\delta_i - \beta\,\bar\Delta_G
      - \gamma\,\big(\phi_i - \bar\phi_G\big)$$

    | symbol | meaning |
    | --- | --- |
    | $\phi_i$ | anchor of region $i$, its own |
    | $\bar\Delta_G$ | mean over the group of anchor - local |
    | $\bar\phi_G$ | mean over the group of the anchors |
    | $\delta_i$ | outer momentum of region $i$ (points along the step) |

    For a region without a partner the caller passes its own pseudo-gradient and its own anchor; the
    pull is then zero. Whether coefficients keep the regions together depends on the group size and
    on the number of regions: `consensus.Consensus` says it, this rule does not check it.

    Source: NoLoCo, arXiv 2506.10911, the outer step (section 3 of the paper; equation number not
    verified). Differs from it: the published code ties $\gamma$ to $\beta$ and calls the rule
    Nesterov although it has no look-ahead. That form is `heavy_ball` here; `nesterov` has the same
    terms with a look-ahead.

    Args:
      alpha: momentum, in [0, 1).
      beta: outer learning rate, not negative.
      gamma: pull towards the group, not negative.
      variant: "heavy_ball" (as published in code) or "nesterov" (look-ahead).

    Returns:
      A transform of the group's mean pseudo-gradient that needs `params`, the region's own anchor
      (else a `ValueError`), and the keyword `group_anchor`, a tree like it.

    >>> import jax.numpy as jnp
    >>> rule = gossip(alpha=0.5, beta=0.25, gamma=0.5)
    >>> anchor, group_anchor = jnp.array([2.0]), jnp.array([1.0])
    >>> step, state = rule.update(
    ...     jnp.array([1.0]), rule.init(anchor), anchor, group_anchor=group_anchor)
    >>> step                                                    # -0.25 * 1 - 0.5 * (2 - 1)
    Array([-0.75], dtype=float32)
    """
    refuse("gossip", gossip_problems(alpha, beta, gamma, variant))

    def init(params):
        return GossipState(momentum=jax.tree.map(jnp.zeros_like, params))

    def update(mean_delta, state, params=None, *, group_anchor, **extra):
        del extra
        if params is None:
            raise ValueError("gossip needs the region's own anchor: pass it as params")
        force = jax.tree.map(
            lambda d, own, mean: -beta * d - gamma * (own - mean),
            mean_delta,
            params,
            widen(group_anchor),
        )
        moved = jax.tree.map(lambda v, f: alpha * v + f, state.momentum, force)
        if variant == "heavy_ball":
            return moved, GossipState(moved)
        return jax.tree.map(lambda v, f: alpha * v + f, moved, force), GossipState(moved)

    return in_fp32(Transform(init, update))


NAMES = {
    "nesterov": nesterov,
    "heavy_ball": heavy_ball,
    "sgd": sgd,
    "average": average,
    "delayed_nesterov": delayed_nesterov,
    "momentum_average": momentum_average,
    "restarting": restarting,
}
