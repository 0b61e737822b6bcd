"""`AnchorCheck`: a newcomer compares the anchor it was given with those of all regions that train.

While a region asks for a state, each region that trains publishes digests of the anchors it has had
(`tell_soon`). The newcomer compares its own with them (`anchors_agree`), and raises `Parted` if it
does not hold.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from lowcomm_jax.rounds.state_transfer import StateTransfer
from lowcomm_jax.store import terms
from lowcomm_jax.store.context import ExchangeContext
from lowcomm_jax.store.errors import StoreUnavailable
from lowcomm_jax.store.records import Anchors, Terms

AnchorVersions = Mapping[tuple[int, str], Mapping[str, Any]]
"""Terms (`terms`) by (step, version), ascending; see `anchor_history.anchor_version`."""
log = logging.getLogger(__name__)


class AnchorCheck:
    """Writes this region's record of anchors, and reads those of others."""

    def __init__(self, context: ExchangeContext, state_transfer: StateTransfer):
        self._context, self._state_transfer = context, state_transfer
        self._thread: threading.Thread | None = None
        self._told: tuple | None = None
        self._since: dict[str, Terms] = {}  # since somebody asks: a state may travel for long
        self._records = 0  # that this job has written

    def tell_soon(self, versions: AnchorVersions) -> None:
        """Call `tell` in the background, if a region asks and there is a new version."""
        asking = self._state_transfer.asking()
        told = tuple(versions), tuple(asking.items())
        busy = self._thread is not None and self._thread.is_alive()
        if not asking and not busy:
            self._since = {}
        if not asking or not versions or busy or told == self._told:
            return

        def act() -> None:
            try:
                self.tell(versions)
                self._told = told
            except StoreUnavailable as error:
                log.info("this region publishes its anchors later: %s", error)

        self._thread = self._context.background.begin("anchors", act, serves=True)

    def tell(self, versions: AnchorVersions) -> None:
        """Write a record of all versions since a region asked, in place of the one before.

        Raises:
          StoreUnavailable: try again later.
        """
        context, start = self._context, self._prefix
        start += "{}.{}.".format(*context.heartbeat.job)
        self._since |= {name: terms.as_record(one) for (_, name), one in versions.items()}
        record = Anchors(max(step for step, _ in versions), dict(self._since))
        while context.slots.create(f"{start}{self._records}", record) != record:
            self._records += 1  # the answer to that one was lost
        if self._records:
            context.slots.remove(f"{start}{self._records - 1}")
        self._records += 1

    def anchors_agree(self, step: int, version: str, own: Mapping[str, Any], at_last: bool) -> bool:
        """Compare this region's anchor with those of all regions that train, of the same version.

        Args:
          step, version: of the state.
          own: its terms.
          at_last: do not wait for regions that have written nothing yet; they have no vote.

        Returns:
          True: all regions that train have written theirs, or `at_last`.

        Raises:
          Parted: anchors differ, and this region's is not the one that is kept (`heal`).
          StoreUnavailable: try again later.
        """
        self._context.heartbeat.check()
        known, missing = {}, False
        told = self._read_all()
        for region in sorted(self._state_transfer.donors()):
            record = told.get(region)
            if record is not None and version in record.versions:
                known[region] = record.versions[version]
            elif record is None or record.step <= step:  # else it never had this version
                missing = True
        if (missing or not known) and not at_last:
            return False
        label, context = f"a state of step {step}", self._context
        if known:
            terms.check(label, known, context.region, terms.as_record(own), context.heal)
        else:
            log.warning("nobody has told of its anchor: %s is compared at the next send", label)
        return True

    def _read_all(self) -> dict[int, Anchors]:
        """The newest record of each region; what an earlier job has written says nothing."""
        latest, slots = self._context.heartbeat.latest(), self._context.slots
        told = {
            slot: region
            for slot, (region, incarnation, _) in slots.numbered(self._prefix, 3).items()
            if region in latest and latest[region].incarnation == incarnation
        }
        # They ascend. Of all: a key that is no record must not stand for one.
        stand = slots.all_first(dict.fromkeys(told, Anchors))
        return {told[slot]: record for slot, record in stand.items()}

    @property
    def _prefix(self) -> str:
        return f"anchors/{self._context.heartbeat.own.epoch}/"
