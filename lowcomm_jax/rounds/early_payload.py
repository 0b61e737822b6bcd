"""`EarlyPayload`: arrays that travel to a group before the round that they belong to begins.

NoLoCo's regions send their moved anchors so (`jobs.anchors_ahead`), beside the inner steps. It is
a `Round` without a commit record: nothing is agreed on here. The exchange announces this region's
early bytes by their digest (`Payload.early`), with its payload. A region that has one of the two
and not the other holds nothing. So the one commit record of the exchange names both, and who has
sent nothing early, or something else since, is no special case: what is not here by then is fetched
then.
"""

from __future__ import annotations

import functools
import threading

from lowcomm_jax.rounds.request import ExchangeRequest
from lowcomm_jax.rounds.round import Round
from lowcomm_jax.store.context import ExchangeContext, keep_looking
from lowcomm_jax.store.kv import pauses


class EarlyPayload(Round):
    """Publishes this region's early arrays, and fetches those of its group, in the background.

    It waits for no region, counts none as late, and teaches `Pace` no lateness.
    """

    def __init__(self, context: ExchangeContext, request: ExchangeRequest):
        """`request`: its terms are for `FaultHooks` alone."""
        super().__init__(context, request)
        self._given = request.arrays if request.takes_part else {}
        self._taken = False
        self._wake = threading.Event()

    def begin(self) -> None:
        """Start to publish and to look."""
        self._context.background.begin(self.request.name, self._run, self.cancel)

    def take(self) -> None:
        """The exchange has begun: from now on that looks for what the others have sent."""
        self._taken = True
        self._wake.set()

    def cancel(self) -> None:
        """Stop publishing, looking and fetching."""
        super().cancel()
        self._wake.set()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Publish, then fetch what the others have announced.

        With longer and longer pauses: there is a period of inner steps to do it in.
        """
        context, request, first_s = self._context, self.request, self._context.store.poll_s[1]
        if request.takes_part:
            context.fault_hooks.begins(request.key, request.terms)
            self.to_host(self._given)
            self._given = {}  # the device's copies
        waits = functools.partial(pauses, first_s, max(first_s, context.timing.beat_s))
        keep_looking(request.key, self._pass, self._over, self._wake, waits)

    def _pass(self) -> bool:
        if self._sends:
            self.publish({})
            # What this job has announced before under this key stands there: the exchange names
            # what counts.
            self.sent = self._own
            self.news.set()  # the exchange may wait for it
            return True
        return self.look()

    @property
    def _sends(self) -> bool:
        """Whether this region has still to send its own."""
        return self.request.takes_part and self.sent is None

    def _over(self) -> bool:
        """Whether all is known, or is now for the exchange to find out, or nobody wants it."""
        ends = self._context.closing, self._context.halted
        if self._ended or any(one.is_set() for one in ends):
            return True
        others = set(self.request.members) - {self._context.region}
        return not self._sends and (self._taken or self.announcements.keys() >= others)
