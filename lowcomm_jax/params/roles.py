"""Roles that differ by region: which rows of which leaves a region trains.

In: the shapes of the trained leaves. Out: a bool mask by leaf and region (`trained_rows`). It is
static. A region's inner steps leave what it does not train where it is, and the mean of an entry is
over those regions that train it.

A row is an entry of one axis of a leaf: the axis of experts, of layers, of a matrix's rows.
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowcomm_jax.refused import is_unknown, is_whole, refuse

__all__ = ["NAMES", "RegionRoles", "Rows", "Shares", "trained_rows"]
UNFIT = "roles do not fit the parameters"


class RegionRoles(abc.ABC):
    """Which rows of which leaves a region trains; of a leaf that it does not name, all.

    A frozen dataclass of its settings, so that checkpoints can describe it.
    """

    def violations(self, regions: int) -> list[str]:
        """Settings that cannot work with R regions, one line with its fix each."""
        del regions
        return []

    @abc.abstractmethod
    def masks(self, shapes: Mapping[str, Any], regions: int) -> dict[str, np.ndarray]:
        """Leaf name -> bool `[R, ...]`, of leaves that some region does not train whole.

        Args:
          shapes: leaf name -> shape of one region's trained leaf, as `jax.ShapeDtypeStruct`.
          regions: R of the run.

        Returns:
          Masks with an axis of 1 where all of a leaf's axis is alike.

        Raises:
          Refused: these leaves do not fit; all lines at once.
        """


@dataclasses.dataclass(frozen=True)
class Shares(RegionRoles):
    """Rows are cut into R shares, one a region, in order: n / R each where R divides n.

    Attributes:
      leaves: regular expression of the names of the leaves that are cut.
      axis: of the rows.
    """

    leaves: str
    axis: int = 0

    def violations(self, regions: int) -> list[str]:
        del regions
        found = _no_axis(self.axis)
        try:
            re.compile(self.leaves)
        except (re.error, TypeError) as error:
            found.append(f"roles: {self.leaves!r} is no regular expression ({error}): correct it")
        return found

    def masks(self, shapes: Mapping[str, Any], regions: int) -> dict[str, np.ndarray]:
        named = [name for name in shapes if re.search(self.leaves, name)]
        found, problems = {}, []
        if not named:
            problems.append(
                f"roles: {self.leaves!r} matches none of {len(shapes)} trained leaves, as "
                f"{next(iter(shapes))!r}: correct it"
            )
        for name in named:
            rows = _rows(name, shapes[name].shape, self.axis, problems)
            if rows is not None and rows < regions:
                problems.append(
                    f"roles: {name!r} has {rows} rows along axis {self.axis} for {regions} regions:"
                    " leave it out of the expression, or use fewer regions"
                )
            elif rows is not None:
                # Region r has rows r n // R to (r + 1) n // R.
                owner = (np.arange(1, rows + 1) * regions - 1) // rows
                of_region = owner == np.arange(regions)[:, None]
                found[name] = _along(of_region, len(shapes[name].shape), self.axis)
        refuse(UNFIT, problems)
        return found


@dataclasses.dataclass(frozen=True)
class Rows(RegionRoles):
    """The rows that each region trains, by leaf.

    Attributes:
      of_regions: one mapping a region: leaf name -> (first row, row behind the last); of a leaf
        that the region's mapping does not name it trains all.
      axis: of the rows.
    """

    of_regions: Sequence[Mapping[str, Sequence[int]]] = dataclasses.field(hash=False)
    axis: int = 0

    def violations(self, regions: int) -> list[str]:
        found, given = _no_axis(self.axis), self.of_regions
        if not isinstance(given, Sequence) or not all(isinstance(x, Mapping) for x in given):
            return [
                *found,
                f"roles={given!r}: give one mapping a region, leaf name to (first, end)",
            ]
        if len(given) != regions:
            found.append(f"roles: {len(given)} mappings for {regions} regions; give one each")
        for r, one in enumerate(given):
            for name, rows in one.items():
                pair = isinstance(rows, Sequence) and len(rows) == 2 and all(map(is_whole, rows))
                if not (pair and 0 <= rows[0] <= rows[1]):
                    found.append(
                        f"roles: region {r} has {name!r}: {rows!r}; give its first row and the one "
                        "behind its last, two whole numbers from 0"
                    )
        return found

    def masks(self, shapes: Mapping[str, Any], regions: int) -> dict[str, np.ndarray]:
        problems: list[str] = []
        found = {}
        for name in dict.fromkeys(name for one in self.of_regions for name in one):
            if name not in shapes:
                problems.append(f"roles: leaf {name!r} {is_unknown(name, shapes)}")
                continue
            shape = shapes[name].shape
            rows = _rows(name, shape, self.axis, problems)
            if rows is None:
                continue
            of_region = np.ones((regions, rows), bool)
            for r, one in enumerate(self.of_regions):
                first, end = one.get(name, (0, rows))
                if end > rows:
                    problems.append(
                        f"roles: region {r} has rows {first} to {end} of {name!r}, which has {rows}"
                        f" along axis {self.axis}: give at most {rows}"
                    )
                of_region[r] = (np.arange(rows) >= first) & (np.arange(rows) < end)
            found[name] = _along(of_region, len(shape), self.axis)
        refuse(UNFIT, problems)
        return found


NAMES: dict[str, type[RegionRoles]] = {"rows": Rows, "shares": Shares}


def trained_rows(
    roles: RegionRoles | None, shapes: Mapping[str, Any], regions: int
) -> dict[str, np.ndarray]:
    """The masks of `RegionRoles.masks`, checked, with the whole of a leaf's first axis.

    So fragments cut them like leaves. Without roles there are none.

    Raises:
      Refused: they do not fit the leaves; all lines at once.
    """
    if roles is None:
        return {}
    found, problems = {}, []
    for name, mask in roles.masks(shapes, regions).items():
        if name not in shapes:
            problems.append(f"roles: leaf {name!r} {is_unknown(name, shapes)}")
            continue
        shape, mask = shapes[name].shape, np.asarray(mask, bool)
        wanted = (regions, *shape)
        if mask.ndim != len(wanted) or any(m not in (1, n) for m, n in zip(mask.shape, wanted)):
            problems.append(
                f"roles: the mask of {name!r} is {list(mask.shape)}: give {list(wanted)}, with 1 "
                "where an axis is alike"
            )
            continue
        found[name] = np.broadcast_to(mask, (regions, *shape[:1], *mask.shape[2:]))
    refuse(UNFIT, problems)
    return found


def _no_axis(axis: Any) -> list[str]:
    if is_whole(axis) and axis >= 0:
        return []
    return [f"axis={axis!r}: give the number of the axis of rows, from 0"]


def _rows(name: str, shape: Sequence[int], axis: int, problems: list[str]) -> int | None:
    """Length of a leaf's axis of rows; None and a line where it has none."""
    if axis < len(shape):
        return shape[axis]
    problems.append(f"roles: {name!r} is {list(shape)} and has no axis {axis}: leave it out")
    return None


def _along(of_region_RxN: np.ndarray, ndim: int, axis: int) -> np.ndarray:
    """`[R, n]` as `[R, 1, n, 1]`, with n on a leaf's axis."""
    regions, rows = of_region_RxN.shape
    return of_region_RxN.reshape(regions, *(1,) * axis, rows, *(1,) * (ndim - axis - 1))
