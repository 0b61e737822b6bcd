"""Cut one region, or all regions, on one machine off from the rendezvous folder, and undo it.

Each region reaches the folder through a symbolic link of its own (WORKDIR/doors/region<i>).
Pointing that link to nothing cuts off one region; moving the folder away cuts off all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def folder_problems(rendezvous: Path) -> list[str]:
    """A problem where both the folder and the moved one exist: either may be the run's."""
    if not (rendezvous.is_dir() and _away(rendezvous).is_dir()):
        return []
    fix = f"remove the one that is not the run's, and call the other {rendezvous.name}"
    return [f"there are both {rendezvous} and {_away(rendezvous).name}: {fix}"]


def make_ready(rendezvous: Path, regions: int) -> None:
    """Make the folder, or restore it after a killed launcher, and link all regions to it."""
    if _away(rendezvous).is_dir():
        reconnect_all(rendezvous)
    rendezvous.mkdir(parents=True, exist_ok=True)
    for region in range(regions):
        reconnect_region(rendezvous, region)


def region_link(rendezvous: Path, region: int) -> Path:
    """The path by which a region reaches the folder, so that it alone can be cut off."""
    return rendezvous.with_name("doors") / f"region{region}"


def reconnect_region(rendezvous: Path, region: int) -> None:
    """Point a region's link to the folder."""
    _point(region_link(rendezvous, region), rendezvous)


def cut_region(rendezvous: Path, region: int) -> None:
    """Point a region's link to nothing."""
    _point(region_link(rendezvous, region), os.devnull)


def _point(link: Path, target: Path | str) -> None:
    """Point a symbolic link elsewhere, in one step."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f"{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.rename(link)


def _away(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.away")


def cut_all(folder: Path) -> None:
    """Move the folder away and put a file in its place, so that every access fails."""
    folder.rename(_away(folder))
    while not folder.is_file():
        # A write that was under way may have made the folder anew.
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(IsADirectoryError):
            folder.write_text("")


def reconnect_all(folder: Path) -> None:
    """Undo `cut_all`, also where that was interrupted."""
    folder.unlink(missing_ok=True)
    _away(folder).rename(folder)
