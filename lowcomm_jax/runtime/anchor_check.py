"""What regions say of their anchors, so that a newcomer can compare the state it was given."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from lowcomm_jax.runtime import terms
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.errors import Rejected, StoreUnavailable
from lowcomm_jax.runtime.state_transfer import StateTransfer
from lowcomm_jax.runtime.terms import Terms

Moments = Mapping[tuple[int, str], Mapping[str, Any]]
"""Terms (`terms`) by (step, name of the moment), ascending."""
log = logging.getLogger(__name__)


class AnchorCheck:
    """One record of every region that trains, as long as another one asks for a state."""

    def __init__(self, office: ExchangeContext, states: StateTransfer):
        self._office, self._states = office, states
        self._thread: threading.Thread | None = None
        self._told: tuple | None = None
        self._since: dict[str, Terms] = {}  # somebody asks; however long a state then travels

    def tell_soon(self, moments: Moments) -> None:
        """Tell those that ask for a state, on a thread of its own; once each."""
        asking = self._states.asking()
        told = tuple(moments), tuple(asking.items())
        busy = self._thread is not None and self._thread.is_alive()
        if not asking and not busy:
            self._since = {}
        if not asking or not moments or busy or told == self._told:
            return

        def act() -> None:
            try:
                self.tell(moments)
                self._told = told
            except StoreUnavailable as error:
                log.info("what anchors we have is told later: %s", error)

        self._thread = threading.Thread(
            target=self._office.beats.guard, args=(act,), name="lowcomm-vouch", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for what is being told, if anything."""
        if self._thread is not None:
            self._thread.join()

    def tell(self, moments: Moments) -> None:
        """Overwrite our record.

        Raises:
          StoreUnavailable: try again later.
        """
        key, office = self._key(self._office.region), self._office
        self._since |= {name: terms.as_record(one) for (_, name), one in moments.items()}
        body = {
            "incarnation": office.beats.own.incarnation,
            "step": max(step for step, _ in moments),
            "moments": self._since,
        }
        office.store.write(key, office.seal.close(key, body))

    def agrees(self, step: int, moment: str, own: Mapping[str, Any], at_last: bool) -> bool:
        """Compare what we have with what all regions that train have had at a moment.

        Args:
          at_last: do not wait for those that have not spoken yet; they have no vote.

        Returns:
          whether all have spoken, or need not.

        Raises:
          Parted: ours does not hold.
          StoreUnavailable: try again later.
        """
        known, missing = {}, False
        for region in sorted(self._states.donors()):
            body = self._heard(region)
            if body is not None and moment in body["moments"]:
                known[region] = body["moments"][moment]
            elif body is None or body["step"] <= step:  # else it was not there at that moment
                missing = True
        if (missing or not known) and not at_last:
            return False
        label, office = f"a state of step {step}", self._office
        if known:
            terms.check(label, known, office.region, terms.as_record(own), office.heal)
        else:
            log.warning("nobody has told of its anchor: %s is compared at the next send", label)
        return True

    def _heard(self, region: int) -> dict[str, Any] | None:
        key = self._key(region)
        data = self._office.store.read(key)
        try:
            body = None if data is None else self._office.seal.open(key, data)
        except Rejected:
            self._office.tally.add("rejected_record")
            return None
        # Of an earlier job in that region's place it says nothing.
        same = body and body["incarnation"] == self._office.beats.latest()[region].incarnation
        return body if same else None

    def _key(self, region: int) -> str:
        return f"vouch/{self._office.beats.own.epoch}/{region}"
