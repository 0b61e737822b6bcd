"""The exchange of a region whose job is several processes.

The first process alone takes part in the exchange; the others learn from it what it decides, and
what has come (`processes.Team.told`). So all of them hold the same arrays and go the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lowcomm_jax.exchange.between.remote import RemoteExchange
from lowcomm_jax.exchange.between.terms import Heal
from lowcomm_jax.processes import Team, whole


class LockstepExchange:
    """`RemoteExchange` in every process of a region: all of them call the same, in one order.

    Args:
      make: makes the exchange, in the first process.

    Raises:
      ValueError: the processes were given different regions; and whatever `make` raises.
    """

    def __init__(self, team: Team, region: int, count: int, heal: Heal, make: Callable):
        self.region, self.count = region, count
        self._team = team
        self._exchange: RemoteExchange | None = None
        given = team.everyones("region", (region, count, heal))
        if len(set(given)) > 1:
            raise ValueError(
                f"the processes of this job were given (region, count, heal) {given}: give all of "
                "them the same"
            )
        team.told("open the exchange", lambda: self._open(make))

    def _open(self, make: Callable) -> None:
        self._exchange = make()
        self._team.on_failure(self._exchange.fail)

    @property
    def awaited(self) -> bool:
        """See `RemoteExchange`."""
        return self._team.told("awaited", lambda: self._exchange.awaited)

    @property
    def epoch(self) -> int:
        """See `RemoteExchange`."""
        return self._team.told("epoch", lambda: self._exchange.epoch)

    def start(self, key: str, arrays: dict[str, jax.Array | np.ndarray], **options: Any) -> None:
        """See `RemoteExchange.start`; arrays that lie in several processes are put together."""
        here = {name: whole(x) for name, x in arrays.items()}
        self._team.told("start", lambda: self._exchange.start(key, here, **options))


def _told(name: str) -> Callable:
    method = getattr(RemoteExchange, name)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return self._team.told(name, lambda: method(self._exchange, *args, **kwargs))

    return call


_ALIKE = (
    *("join", "come_in", "hear", "living", "steps", "beat", "trains"),
    *("agree", "counts", "pause", "close"),
    *("ready", "reachable", "be_patient", "arrives", "finish", "skip", "passed_over"),
    *("want_state", "asking", "donors", "owes_state", "give_state", "newest_state"),
    *("vouch", "agrees"),
)
for _name in _ALIKE:
    setattr(LockstepExchange, _name, _told(_name))
