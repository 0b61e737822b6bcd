"""What the other runs in a folder differ in, where a region waits in vain for its own.

A run's id follows from its settings. So a job with another seed is not refused: it waits, too, in
another run. The runs' records say by name what they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping

from lowcomm_jax.store.context import ExchangeContext
from lowcomm_jax.store.errors import Rejected, Unreadable
from lowcomm_jax.store.records import ANY_FORMAT, RUN, Run

_NAMED = 3
"""Most runs, and most settings of one, that are told."""


def differing(context: ExchangeContext) -> str:
    """A sentence about the other runs, the most alike first; "" where there are none to be read.

    Raises:
      StoreUnavailable: the store does not answer.
    """
    found = []
    for run_id, data in context.store.beside(RUN).items():
        try:
            record = context.slots.seal.of(run_id).open(RUN, data, Run, ANY_FORMAT)
        except (Rejected, Unreadable):
            continue  # of another secret, or of another format
        if differences := _between(record.identity, context.identity):
            found.append(differences)
    told = [_shortened(one, "; ") for one in sorted(found, key=len)]
    if not told:
        return ""
    runs = _shortened([f"a run whose config differs in {one}" for one in told], ", and ")
    return f"the folder also holds {runs}"


def _between(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Each setting in which two runs differ; none where one of them has no identity."""
    if not (there and here):
        return []
    return [
        f"{name}: {there.get(name, 'nothing')} instead of {here.get(name, 'nothing')}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _shortened(parts: list[str], between: str) -> str:
    more = len(parts) - _NAMED
    return between.join(parts[:_NAMED]) + (f"{between}{more} more" if more > 0 else "")
