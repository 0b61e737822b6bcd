"""`Participation`: whether the others count what this region sends."""

from __future__ import annotations

import logging
from collections import deque

RUNNING = 3
"""So many exchanges in a row without this region are no accident."""

log = logging.getLogger(__name__)


class Participation:
    """Whether the others counted the newest payloads that this region has sent."""

    def __init__(self) -> None:
        self._counted: deque[bool] = deque(maxlen=RUNNING)
        self._told = False

    def note(self, counted: bool) -> None:
        """Note how an exchange ended; warns where so many in a row have left this region out."""
        self._counted.append(counted)
        if counted:
            self._told = False
        elif not self._told and self.none(RUNNING):
            self._told = True
            log.warning(
                "this region was not counted in %d exchanges running, and trains on: the others "
                "get nothing that it learns. See whether they reach its address, and whether its "
                "steps or its link are too slow for them",
                RUNNING,
            )

    def none(self, sends: int) -> bool:
        """Whether nothing counted of the last three payloads, or of all where there were fewer.

        Args:
          sends: of the run so far. Of fewer payloads, as after a restart, nothing follows.
        """
        return len(self._counted) == min(sends, RUNNING) > 0 and not any(self._counted)
