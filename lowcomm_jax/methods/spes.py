r"""SPES (arXiv 2602.11543): regions train experts of their own, and all train what is shared.

Region r trains experts rk to (r + 1)k of a mixture of experts; the router, attention and all else
are trained everywhere. After every H steps with :math:`T_i` the regions present that train entry i:

.. math::
   \Theta_i \leftarrow \frac{1}{|T_i|} \sum_{r \in T_i} \theta_{r,i}, \qquad
   \theta_r \leftarrow \Theta

so that an expert takes the value of its owner. While t < T, every so many steps experts that are
alike share what they know. With :math:`D_e` the donors of expert e, the other experts of its layer
whose leaf :math:`w_1` has the highest cosine similarity with its own:

.. math::
   \Theta_e \leftarrow \Theta_e + \alpha_0 \Big(1 - \frac tT\Big)
   \frac{1}{|D_e|} \sum_{d \in D_e} (\Theta_d - \Theta_e)

over all weights of the expert.

======= ============================================== ========================
symbol  meaning                                        argument
======= ============================================== ========================
H       inner steps per round (100)                    `period`
\-      leaves with an axis of experts                 `experts`, `axis`
w_1     leaf whose similarity decides                  `compare`
alpha_0 share of a merge at the start (.05 to .1)      `share`
\-      steps between merges (200)                     `merge_every`
T       step from which nothing merges (2000 to 4000)  `until`
\-      donors of an expert (4)                        `donors`
======= ============================================== ========================

Known from the published code, where the values in parentheses are from; the paper was not read. Our
readings: a merge follows the exchange of a step t that `merge_every` divides. All experts read the
values from before it, and a donor is never the expert itself. With fewer than `donors` other
experts all of them are donors. Experts whose owner is absent stay, and do not merge. Adam's moments
stay.

Differs from the code: experts that do not divide by the regions are cut as evenly as can be. No
time, memory or bytes are saved: regions are one program, which computes whole gradients and masks
them, and holds all moments; so does a region that is a job of its own. Payloads are dense, with
zeros where a region does not train. There is no codec.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.methods.base import Method, published
from lowcomm_jax.methods.local_sgd import local_sgd
from lowcomm_jax.params.roles import Shares
from lowcomm_jax.refused import in_range, is_whole, refuse
from lowcomm_jax.rules.outer import Mixing


@published(axis=1, merge_every=None)
def spes(
    period: int,
    experts: str,
    compare: str,
    axis: int = 0,
    share: float = 0.05,
    merge_every: int | None = 200,
    until: int = 2000,
    donors: int = 4,
) -> Method:
    """Average what is shared every `period` inner steps, and take experts from their owners.

    Args:
      period: H, inner steps per round.
      experts: regular expression of the leaves that have an axis of experts.
      compare: regular expression of the one of them in each layer, w_1, whose similarity decides.
        Leaves of a layer have the same path up to its last part.
      axis: of the experts; 1 where an axis of layers comes first.
      share: alpha_0, in [0, 1].
      merge_every: steps between merges; exchanges at steps that it divides merge. None = never.
      until: T, step from which nothing merges.
      donors: of an expert, at least 1.
    """
    roles, merges = Shares(experts, axis), Merges(experts, compare, axis, share, until, donors)
    problems = merges.violations()
    if not (merge_every is None or (is_whole(merge_every) and merge_every >= 1)):
        problems.append(f"merge_every={merge_every!r}: give a whole number of steps, or None")
    plain = local_sgd(period)
    outer = plain.outer if problems or merge_every is None else merges.after(merge_every)
    return plain.named("spes", problems, outer=outer, roles=roles)


@dataclasses.dataclass(frozen=True)
class Merges:
    """How similar experts share what they know. Attributes: as in `spes`."""

    experts: str
    compare: str
    axis: int
    share: float
    until: int
    donors: int

    def violations(self) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        found = [in_range("share", self.share, 0.0, 1.0)]
        found.append(in_range("until", self.until, 0, math.inf, open_low=True))
        if not (is_whole(self.donors) and self.donors >= 1):
            found.append(f"donors={self.donors!r}: give a whole number, at least 1")
        try:
            re.compile(self.compare)
        except (re.error, TypeError) as error:
            found.append(f"compare={self.compare!r} is no regular expression ({error}): correct it")
        return [line for line in found if line is not None]

    def after(self, every: int) -> Mixing:
        """The outer rule: the mean of the regions' parameters, then a merge where one is due."""

        def update(delta, state, params, *, step, **extra):
            del extra
            values = {k: params[k] - x for k, x in delta.items()}
            due = (step % every == 0) & (step < self.until)
            alpha = self.share * (1 - step / self.until)
            updates = {k: -x for k, x in delta.items()}
            for leaves, compared in self.layers(params):
                pull = self._pull({k: values[k] for k in leaves}, compared)
                updates |= {k: updates[k] + jnp.where(due, alpha * x, 0) for k, x in pull.items()}
            return updates, state

        def init(params):
            del params
            return optax.EmptyState()

        return Mixing(init, update)

    def layers(self, params: dict[str, Any]) -> list[tuple[list[str], str]]:
        """(names of a layer's leaves, the one that is compared), of each layer with experts.

        Raises:
          Refused: a layer without one leaf to compare, or whose leaves have different numbers of
            experts; all lines at once.
        """
        by_layer: dict[str, list[str]] = {}
        for name in params:
            if re.search(self.experts, name):
                by_layer.setdefault(name.rpartition("/")[0], []).append(name)
        found, problems = [], []
        for names in by_layer.values():
            compared = [name for name in names if re.search(self.compare, name)]
            if len(compared) != 1:
                problems.append(
                    f"compare={self.compare!r} matches {compared or 'none'} of {names}: let it "
                    "match one leaf of each layer"
                )
            elif len({params[name].shape[: self.axis + 1] for name in names}) > 1:
                shapes = {name: list(params[name].shape) for name in names}
                problems.append(
                    f"experts: leaves of one layer differ along axis {self.axis}: {shapes}"
                )
            else:
                found.append((names, compared[0]))
        refuse("experts cannot be merged", problems)
        return found

    def _pull(self, leaves: dict[str, jax.Array], compared: str) -> dict[str, jax.Array]:
        """Mean over donors of donor - expert, of all leaves of one layer, or of a stack of them."""
        one = functools.partial(_mean_of_donors, compared=compared, donors=self.donors)
        for _ in range(self.axis):
            one = jax.vmap(one)
        return one(leaves)


def _mean_of_donors(leaves: dict[str, jax.Array], *, compared: str, donors: int):
    """Leaves `[X, ...]` of X experts -> mean over the donors of (donor - expert), `[X, ...]`."""
    w = leaves[compared]
    rest = tuple(range(1, w.ndim))
    dot_XxX = jnp.tensordot(w, w, (rest, rest), precision="highest")
    norm_X = jnp.sqrt(jnp.diagonal(dot_XxX))
    cosine_XxX = dot_XxX / jnp.maximum(norm_X[:, None] * norm_X[None], 1e-30)
    count = len(norm_X)
    used = min(donors, count - 1)
    if not used:
        return jax.tree.map(jnp.zeros_like, leaves)
    others_XxX = jnp.where(jnp.eye(count, dtype=bool), -jnp.inf, cosine_XxX)
    _, chosen_XxN = jax.lax.top_k(others_XxX, used)
    pick_XxX = jnp.sum(jax.nn.one_hot(chosen_XxN, count), axis=1) / used
    return {k: jnp.tensordot(pick_XxX, x, 1, precision="highest") - x for k, x in leaves.items()}
