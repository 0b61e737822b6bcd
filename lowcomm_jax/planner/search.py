"""Finds the best H, K, tau and codec for a link under a bound on the loss penalty."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lowcomm_jax import methods
from lowcomm_jax.methods.base import Rule
from lowcomm_jax.planner.dry_run import Played, Rehearsal
from lowcomm_jax.planner.methods import PlanMethod
from lowcomm_jax.planner.plan import Workload, never_catches_up, rehearsed, utilisation_curve
from lowcomm_jax.refused import not_negative, refuse

PERIODS = (10, 30, 50, 100, 200, 500)
FRAGMENTS = (1, 4, 16)
TAUS = (0, 1, 5, 10)
SEARCHED_CODECS = ("fp32", "bf16", "int8", "int4")
"""One for each number of bits that is published as lossless; each one more costs seconds of a
search. A choice, and no list of what there is: rows of a plan name any codec."""
# Utilisations this close count as equal: the smaller penalty, then fewer bytes, decides.
NEAR = 0.005


@dataclass(frozen=True)
class Choice:
    """One setting found by the search.

    Attributes:
        method: the setting.
        utilisation: on the given network.
        penalty_nats: published loss penalty beside H = 30.
        bytes_per_step: bytes of a region's payloads per inner step.
    """

    method: PlanMethod
    utilisation: float
    penalty_nats: float
    bytes_per_step: float


def search(
    work: Workload,
    bound_nats: float,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Choice | None, list[Choice], int]:
    """Try all settings whose published penalty is known and within the bound.

    Args:
        work: model and network.
        bound_nats: largest acceptable loss penalty beside H = 30, dense, without overlap.
        progress: told which (H, K, tau) comes next, how many of them are done, and of how many.

    Returns:
        The best setting (None: none is within the bound), all settings tried (best first), and the
        number of those left out. A setting is left out where no penalty is published, where it is
        above the bound, or where payloads would pile up on the link.

    Raises:
        Refused: the bound is negative.
    """
    refuse("search", not_negative("loss_bound", bound_nats))
    tried: list[Choice] = []
    left_out = 0
    cuts = [
        cut
        for cut in itertools.product(PERIODS, FRAGMENTS, TAUS)
        if cut[2] * cut[1] < cut[0] and cut[1] <= min(cut[0], work.model.layers)
    ]
    ready: dict[tuple[int, str], tuple[Rehearsal, Played]] = {}
    average = methods.local_sgd(1).outer  # one for all, so that JAX traces it once
    for done, (period, fragments, tau) in enumerate(cuts):
        name = f"H={period} K={fragments} tau={tau}"
        if progress is not None:
            progress(name, done, len(cuts))
        played = None
        for codec in SEARCHED_CODECS:
            row = _setting(name, period, fragments, tau, average, codec, work.model.stacked)
            nats = row.penalty().nats
            if nats is None or nats > bound_nats:
                left_out += 1
                continue
            if (fragments, codec) not in ready:
                rehearsal = rehearsed(row, work)
                ready[fragments, codec] = rehearsal, rehearsal.play()
            rehearsal, size = ready[fragments, codec]
            if played is None:
                played = rehearsal.play(row.method.schedule)
            here = _resized(played, size)
            if never_catches_up(row, here, work):
                left_out += 1
                continue
            (share,) = utilisation_curve(here, work, np.ones(1)).tolist()
            nbytes = sum(s.nbytes for s in here.sends if here.warm < s.step <= here.steps)
            tried.append(Choice(row, share, nats, nbytes / (here.steps - here.warm)))
    tried.sort(key=lambda c: -c.utilisation)
    if not tried:
        return None, [], left_out
    near = [c for c in tried if c.utilisation >= tried[0].utilisation - NEAR]
    best = min(near, key=lambda c: (c.penalty_nats, c.bytes_per_step))
    return best, tried, left_out


def _setting(
    name: str,
    period: int,
    fragments: int,
    tau: int,
    outer: Rule,
    codec: str,
    stacked: Sequence[str],
) -> PlanMethod:
    """Streaming DiLoCo with this setting and another outer rule; no byte is that rule's."""
    wire = None if codec == "fp32" else {"name": codec, "stacked": stacked}
    method = methods.streaming_diloco(period, fragments, tau, 0.0, outer=outer, codec=wire)
    return PlanMethod(f"{name} {codec}", method, "diloco")


def _resized(played: Played, size: Played) -> Played:
    """The same sends, with the payloads of another dry run of as many fragments."""
    of = {sent.fragment: sent for sent in size.sends}
    sends = tuple(
        dataclasses.replace(s, nbytes=of[s.fragment].nbytes, route=of[s.fragment].route)
        for s in played.sends
    )
    return dataclasses.replace(played, sends=sends)
