"""Units of a leaf over the devices of a region, as evenly as they go (`windows`)."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Deal:
    """U units of w values, T values in all, over D devices.

    Attributes:
      size: T, a multiple of D.
      unit: w.
      devices: D.
    """

    size: int
    unit: int
    devices: int

    @property
    def count(self) -> int:
        """U; the last unit may be filled up."""
        return -(-self.size // self.unit)

    @property
    def each(self) -> int:
        """Units that every device has room for."""
        return -(-self.count // self.devices)

    @property
    def starts(self) -> np.ndarray:
        """First unit of each device, and U: int32 `[D + 1]`."""
        return np.array([d * self.count // self.devices for d in range(self.devices + 1)], np.int32)

    @property
    def held(self) -> np.ndarray:
        """Units of each device, int32 `[D]`."""
        return np.diff(self.starts)

    @property
    def slots(self) -> np.ndarray:
        """Units for what each device has room for: its own, the last of them again; `[D, each]`."""
        slots = self.starts[:-1, None] + np.arange(self.each, dtype=np.int32)[None]
        return np.clip(slots, 0, np.maximum(self.starts[1:, None] - 1, 0))

    @property
    def filled(self) -> np.ndarray:
        """Which places of that room hold the U units, `[U]`."""
        return np.flatnonzero(np.arange(self.each)[None] < self.held[:, None])

    @property
    def shifts(self) -> np.ndarray:
        """Values by which each device's units begin after its window, and U's end, `[D + 1]`."""
        windows = np.arange(self.devices + 1, dtype=np.int64) * (self.size // self.devices)
        return (self.starts.astype(np.int64) * self.unit - windows).astype(np.int32)

    @property
    def before(self) -> int:
        """Most values that a device's units need of the window before its own."""
        return max(0, -int(self.shifts[:-1].min()))

    @property
    def behind(self) -> int:
        """Most values that a device's units need of the window behind its own."""
        ends = self.shifts[:-2] + self.each * self.unit - self.size // self.devices
        return max(0, int(ends.max(initial=0)))

    @property
    def early(self) -> int:
        """Most values of a window that lie in the units of the device before."""
        return max(0, int(self.shifts[:-1].max()))

    @property
    def late(self) -> int:
        """Most values of a window that lie in the units of the device behind."""
        return max(0, -int(self.shifts[1:].min()))

    def works(self) -> bool:
        """Whether neighbours alone have what a device needs, and every device has a unit.

        So it is from two units a device on.

        >>> Deal(512, 64, 4).works(), Deal(256, 100, 4).works()
        (True, False)
        """
        if self.size % self.devices or self.count < self.devices:
            return False
        least = int(self.held.min()) * self.unit
        window = self.size // self.devices
        return max(self.before, self.behind) <= window and max(self.early, self.late) <= least
