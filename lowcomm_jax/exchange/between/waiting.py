"""Whom a region waits for in an exchange."""

from __future__ import annotations

from lowcomm_jax.exchange.between.beats import Beats
from lowcomm_jax.exchange.between.request import Gathered


class Waiting:
    """Tells who may be expected to announce, of those that are alive.

    Whoever began the epoch with us is waited for, and whoever came in later from its first payload
    on; not one that asks for a state, nor one that was waited for in vain, until it has caught up.

    Attributes:
      roster: incarnation of the regions that began the epoch.
      behind: whether the others did not wait for us in the last exchange that is over.
    """

    def __init__(self, beats: Beats):
        self.roster: dict[int, int] = {}
        self.behind = False
        self._beats = beats
        self._behind: dict[int, int] = {}

    def awaited(self, region: int) -> bool:
        """Whether a region is alive and may be expected to announce."""
        beat = self._beats.latest().get(region)
        if beat is None or region not in self._beats.living(certain=False):
            return False
        began_with_us = self.roster.get(region) == beat.incarnation
        expected = not beat.wants and (began_with_us or beat.awaited)
        return expected and not self.left_behind(region)

    def left_behind(self, region: int) -> bool:
        """Whether another region was waited for in vain, and has not caught up."""
        beat = self._beats.latest().get(region)
        return beat is not None and beat.step <= self._behind.get(region, -1)

    def note(self, others: set[int], gathered: Gathered) -> None:
        """Whoever was waited for in vain is waited for again once it is past where we are now.

        A region tells the step of its last landing or send: one that stands still where we are has
        not come past. Nor must it come to where we are later: one that goes on as fast as we do
        never would.
        """
        self.behind = self._beats.region not in gathered.commit.present
        # Also whom only the writer of the record has heard.
        heard = gathered.heard | gathered.commit.terms.keys()
        for region in others & heard:
            self._behind.pop(region, None)
        for region in gathered.vain - heard:
            beat = self._beats.latest().get(region)
            if region not in self._behind or (beat and beat.step > self._behind[region]):
                self._behind[region] = self._beats.own.step
