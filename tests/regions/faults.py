"""Ways to break a run that meets in a folder."""

import contextlib
import pathlib

from experiments.faults.rendezvous_cut import cut_all, reconnect_all
from lowcomm_jax.store.secret import Seal


def folder(party) -> pathlib.Path:
    """Where the regions meet."""
    return pathlib.Path(party.url.removeprefix("file://"))


def vanish(region) -> None:
    """End a region as a crash does: from one moment to the next, without a word."""
    region._context.closing.set()
    region._context.heartbeat.stop(leaving=False)
    region._context.transport.close()


@contextlib.contextmanager
def outage(party):
    """Nothing can be read, listed or written."""
    cut_all(folder(party))
    try:
        yield
    finally:
        reconnect_all(folder(party))


def forge(party, key: str, body: dict) -> None:
    """A stranger writes to the store what it likes, signed with a secret of its own."""
    path = folder(party) / "run" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(Seal("run", b"a secret of a stranger").close(key, body))
