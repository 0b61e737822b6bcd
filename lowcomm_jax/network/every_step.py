"""Data parallel training in virtual time: a blocking exchange among all regions at every step.

It is the baseline of every "faster than AllReduce": what `methods.ddp` runs, fp32 and two-shot.
"""

import numpy as np

from lowcomm_jax.network.clock import VirtualClock

BASELINE = "AllReduce: fp32 gradients exchanged at every step, two-shot"
CHUNK = 4096  # steps worked out at once: memory stays bounded


def every_step(
    clock: VirtualClock,
    first: int,
    count: int,
    nbytes: float,
    route: str = "two_shot",
    fragment: int = 0,
) -> None:
    """Advance by steps first, ..., first + count - 1, each with one exchange all regions wait for.

    Gives the times (up to rounding) of that many `inner_step`, `send` and `land`, with the engine's
    keys. All but the first step are worked out together, unless transfers are jittered, bars are
    recorded or something else is under way.

    Args:
        clock: is updated in place.
        nbytes: payload bytes of each region.
        route: one of `routes.ROUTES`.
        fragment: what the ledger books it under.
    """
    one_by_one = min(1, count)  # the first step may pay for links that are new
    busy = clock.transit.payloads or clock.transit.owed
    if clock.recorder is not None or clock.network.transfer_jitter.active or busy:
        one_by_one = count
    for step in range(first, first + one_by_one):
        key = f"{fragment}@{step}"
        clock.inner_step(step)
        clock.send(step, key, nbytes, route, label=fragment)
        clock.land(step, key)
    for start in range(first + one_by_one, first + count, CHUNK):
        _together(clock, start, min(CHUNK, first + count - start), nbytes, route, fragment)


def _together(clock, first: int, count: int, nbytes: float, route: str, fragment: int) -> None:
    """Nothing else is on the links, so every exchange lasts as long and all go on from its end."""
    everyone = tuple(range(clock.network.size))
    sizes = (float(nbytes),) * len(everyone)
    wait_R = clock.transit.repeat(route, sizes, everyone, count)
    compute_SxR = clock.compute_seconds(first, count)
    begin_R = clock.now_R + compute_SxR[0]
    between_S = (wait_R + compute_SxR[1:]).max(axis=1)  # from one exchange's start to the next's
    start_S = begin_R.max() + np.concatenate([[0.0], np.cumsum(between_S)])
    arrive_SxR = np.concatenate([begin_R[None], start_S[:-1, None] + wait_R + compute_SxR[1:]])
    clock.now_R = start_S[-1] + wait_R
    clock.peers_R += (start_S[:, None] - arrive_SxR).sum(axis=0)
    clock.exposed_R += wait_R * count
    control = clock.network.control_bytes
    clock.ledger.book(fragment, route, sizes, everyone, control_bytes=control, times=count)
