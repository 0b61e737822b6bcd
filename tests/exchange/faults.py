"""Ways to break a run that meets in a folder."""

import contextlib
import pathlib
import shutil

from lowcomm_jax.exchange.between.secret import Seal


def folder(party) -> pathlib.Path:
    """Where the regions meet."""
    return pathlib.Path(party.url.removeprefix("file://"))


def vanish(region) -> None:
    """End a region as a crash does: from one moment to the next, without a word."""
    region._office.closing.set()
    region._office.beats.stop(leaving=False)
    region._office.transport.close()


@contextlib.contextmanager
def outage(party):
    """A file stands where the folder was: nothing can be read, listed or written."""
    place = folder(party)
    away = place.with_name("away")
    place.rename(away)
    while not place.is_file():
        # A write that was under way may have made the folder anew.
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(IsADirectoryError):
            place.write_text("")
    try:
        yield
    finally:
        place.unlink()
        away.rename(place)


def forge(party, key: str, body: dict) -> None:
    """A stranger writes to the store what it likes, signed with a secret of its own."""
    path = folder(party) / "run" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(Seal("run", b"a secret of a stranger").close(key, body))
