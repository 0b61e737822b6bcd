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

from lowcomm_jax.runtime import records, terms
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.errors import Rejected, StoreUnavailable
from lowcomm_jax.runtime.state_transfer import StateTransfer
from lowcomm_jax.runtime.terms import Terms

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

    def tell_soon(self, versions: AnchorVersions) -> None:
        """Call `tell` on a thread of its own, if a region asks and there is a new version."""
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

        self._thread = threading.Thread(
            target=self._context.heartbeat.run_guarded,
            args=(act,),
            name="lowcomm-anchors",
            daemon=True,
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread of `tell_soon`, if any."""
        if self._thread is not None:
            self._thread.join()

    def tell(self, versions: AnchorVersions) -> None:
        """Overwrite this region's record, with all versions written since a region asked.

        Raises:
          StoreUnavailable: try again later.
        """
        key, context = self._key(self._context.region), self._context
        self._since |= {name: terms.as_record(one) for (_, name), one in versions.items()}
        body = {
            "incarnation": context.heartbeat.own.incarnation,
            "step": max(step for step, _ in versions),
            "moments": self._since,
        }
        context.store.write(key, context.seal.close(key, body))

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
        known, missing = {}, False
        for region in sorted(self._state_transfer.donors()):
            body = self._read(region)
            if body is not None and version in body["moments"]:
                known[region] = body["moments"][version]
            elif body is None or body["step"] <= step:  # else it never had this version
                missing = True
        if (missing or not known) and not at_last:
            return False
        label, context = f"a state of step {step}", self._context
        if known:
            terms.check(label, known, context.region, terms.as_record(own), context.heal)
        else:
            log.warning("nobody has told of its anchor: %s is compared at the next send", label)
        return True

    def _read(self, region: int) -> dict[str, Any] | None:
        key = self._key(region)
        data = self._context.store.read(key)
        try:
            body = None if data is None else self._context.seal.open(key, data, _told)
        except Rejected:
            self._context.counter.add("rejected_record")
            return None
        # A record of an earlier job in that region's place says nothing.
        same = body and body["incarnation"] == self._context.heartbeat.latest()[region].incarnation
        return body if same else None

    def _key(self, region: int) -> str:
        return f"vouch/{self._context.heartbeat.own.epoch}/{region}"


def _told(value: Any) -> dict[str, Any]:
    moments = records.by_name(records.terms)
    return records.fields(value, incarnation=records.whole, step=records.whole, moments=moments)
