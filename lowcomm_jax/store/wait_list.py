"""`WaitList`: whom an exchange waits for."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from lowcomm_jax.store.heartbeat import Heartbeat
from lowcomm_jax.store.records import Commit, Late

_NOT_BEHIND = -1  # every step is past it


class WaitList:
    """Decides which living regions an exchange waits for.

    An exchange waits for the regions that began the membership epoch together with this one; for
    one that joined later, from its first payload on. It does not wait for a region that asks for a
    state, nor for one that missed an earlier exchange, until that has caught up.

    Which regions are late stands in the commit records, so that the members of an exchange agree on
    it. Did each decide by itself, one could wait for a late region just when another does not, and
    would be passed over by it, again and again.

    Attributes:
      roster: incarnation of the regions that began the membership epoch.
      behind: whether the last exchange that this region joined went on without it.
      late: other regions that have missed an exchange, and announced nothing since, as records say.
    """

    def __init__(self, heartbeat: Heartbeat):
        self.roster: dict[int, int] = {}
        self.behind = False
        self.late: dict[int, Late] = {}
        self._heartbeat = heartbeat
        self._noted: dict[int, int] = {}  # by region: the last exchange that said how it is
        self._lock = threading.Lock()

    def awaited(self, region: int) -> bool:
        """Whether an exchange waits for this region: it is alive and expected to announce."""
        beat = self._heartbeat.latest().get(region)
        if beat is None or region not in self._heartbeat.living(certain=False):
            return False
        began_with_us = self.roster.get(region) == beat.incarnation
        expected = not beat.wants and (began_with_us or beat.awaited)
        return expected and not self.left_behind(region)

    def left_behind(self, region: int) -> bool:
        """Whether another region missed an exchange, and has not caught up."""
        beat, late = self._heartbeat.latest().get(region), self.late.get(region)
        return beat is not None and late is not None and beat.step <= late.step

    def missed(self, regions: Iterable[int]) -> int:
        """The most exchanges that have waited in vain for one of these since it announced."""
        found = [late.missed for region in regions if (late := self.late.get(region))]
        return max(found, default=0)

    def late_in(self, silent: Iterable[int], awaited: Collection[int] = ()) -> dict[int, Late]:
        """The regions that are late once an exchange is over, for its commit record.

        Later exchanges wait for a region that missed one once its step is past this region's step
        of now. An equal step is not enough, since it may have stopped there. A later step of this
        region is not used, since a region of the same speed would never reach it.

        Args:
          silent: members that have not announced.
          awaited: those of them that this exchange has waited for in vain.
        """
        found = {}
        for region in silent:
            late = self.late.get(region)
            if region in awaited and not self.left_behind(region):
                late = Late(self._heartbeat.own.step, self.missed([region]) + 1)
            if late is not None:
                found[region] = late
        return found

    def note(self, number: int, members: Iterable[int], joins: bool, commit: Commit) -> None:
        """Note what the record of an exchange says of its other members, when it is over.

        A region that is late itself takes nobody to be left behind: the others may have stood still
        together with it. One that is left behind keeps the step that it is to come to, and one that
        stays silent what it has missed, whatever a region says that has just come in.

        Args:
          number: of the exchange, from 0, in the order in which this region begins them.
          joins: whether this region announces in it.
        """
        me = self._heartbeat.region
        with self._lock:
            if joins and number >= self._noted.get(me, 0):
                self.behind = not commit.saw(me, self._heartbeat.own.incarnation)
            for region in members:
                if number < self._noted.get(region, 0):
                    continue  # exchanges end in any order
                self._noted[region] = number
                late = commit.late.get(region)
                if region == me or late is None:
                    self.late.pop(region, None)
                elif me in commit.late:
                    self.late[region] = Late(_NOT_BEHIND, late.missed)
                elif not self.left_behind(region):
                    missed = max(late.missed, self.missed([region]))
                    self.late[region] = Late(late.step, missed)
