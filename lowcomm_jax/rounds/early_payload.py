"""`EarlyPayload`: arrays that travel to a group before the round that they belong to begins.

NoLoCo's regions send their moved anchors so (`jobs.anchors_ahead`), beside the inner steps. It is
a `Round` without a commit record: nothing is agreed on here. The exchange announces this region's
early bytes by their digest (`Payload.early`), with its payload. A region that has one of the two
and not the other holds nothing. So the one commit record of the exchange names both, and who has
sent nothing early, or something else since, is no special case: what is not here by then is fetched
then.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from concurrent.futures import Future

from lowcomm_jax.rounds.request import ExchangeRequest
from lowcomm_jax.rounds.round import Round, keep_looking
from lowcomm_jax.store import wire
from lowcomm_jax.store.context import ExchangeContext, check_open
from lowcomm_jax.store.kv import pauses


class EarlyPayload(Round):
    """Publishes this region's early arrays, and fetches those of its group, in the background.

    It waits for no region, counts none as late, and teaches `Pace` no lateness.
    """

    def __init__(self, context: ExchangeContext, request: ExchangeRequest):
        """`request`: its terms are for `FaultHooks` alone; without a part in it, the arrays only
        tell the shapes.
        """
        like = dict.fromkeys(request.members, wire.without_region(request.arrays))
        super().__init__(context, dataclasses.replace(request, like=like))
        self.sent = Future()
        self._given = request.arrays if request.takes_part else {}
        self._taken = self._dropped = False
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
        self._dropped = True
        self.take()
        super().cancel()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        context, request = self._context, self.request
        try:
            if request.takes_part:
                context.fault_hooks.begins(request.key, request.terms)
                self.to_host(self._given)
                self._given = {}  # the device's copies
                keep_looking(request.key, self._send, self._sent, self._wake, context.store.pauses)
        except BaseException as error:  # for the exchange to raise
            self.sent.set_exception(error)
            self.news.set()
        else:
            self._look()

    def _send(self) -> bool:
        self.publish({})
        self.sent.set_result(self._own)
        self.news.set()  # the exchange may wait for it
        return True

    def _sent(self) -> bool:
        if not self.sent.done():
            check_open(self._context, f"sending {self.request.key!r}")
            if self._dropped:
                raise RuntimeError(f"{self.request.key!r} was not sent before it was dropped")
        return self.sent.done()

    def _look(self) -> None:
        """Fetch what the others have announced, until all is known or the exchange begins.

        With longer and longer pauses: there is a period of inner steps to do it in.
        """
        context, first_s = self._context, self._context.store.poll_s[1]
        waits = functools.partial(pauses, first_s, max(first_s, context.timing.beat_s))
        ends = context.closing, context.halted
        # What this job has announced before it sends anew is known: the exchange names what counts.
        others = set(self.request.members) - {context.region}

        def over() -> bool:
            known = self.announcements.keys() >= others
            return known or self._taken or any(one.is_set() for one in ends)

        keep_looking(self.request.key, self.look, over, self._wake, waits)
