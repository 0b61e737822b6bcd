"""The folder where jobs on one machine meet, cut off from one region or from all."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def folder_problems(rendezvous: Path) -> list[str]:
    """Why it cannot be said which folder is to be that of a run."""
    if not (rendezvous.is_dir() and _away(rendezvous).is_dir()):
        return []
    fix = f"remove the one that is not the run's, and call the other {rendezvous.name}"
    return [f"there are both {rendezvous} and {_away(rendezvous).name}: {fix}"]


def make_ready(rendezvous: Path, regions: int) -> None:
    """The folder is there, whatever a launcher that was killed has left of it, and all doors lead
    to it."""
    if _away(rendezvous).is_dir():
        bring_back(rendezvous)
    rendezvous.mkdir(parents=True, exist_ok=True)
    for region in range(regions):
        open_door(rendezvous, region)


def door(rendezvous: Path, region: int) -> Path:
    """The name by which a region knows the folder, so that it alone can be cut off."""
    return rendezvous.with_name("doors") / f"region{region}"


def open_door(rendezvous: Path, region: int) -> None:
    """Let a region's door lead to the folder."""
    _lead(door(rendezvous, region), rendezvous)


def shut_door(rendezvous: Path, region: int) -> None:
    """Let it lead nowhere."""
    _lead(door(rendezvous, region), os.devnull)


def _lead(link: Path, target: Path | str) -> None:
    """Point a symbolic link elsewhere, in one step."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f"{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.rename(link)


def _away(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.away")


def take_away(folder: Path) -> None:
    """A file stands where the folder was: nothing can be read, listed or written there."""
    folder.rename(_away(folder))
    while not folder.is_file():
        # A write that was under way may have made the folder anew.
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(IsADirectoryError):
            folder.write_text("")


def bring_back(folder: Path) -> None:
    """Undo `take_away`, also where that was cut short."""
    folder.unlink(missing_ok=True)
    _away(folder).rename(folder)
