"""What the other runs in a folder differ in, where a region waits in vain for its own.

A run's id follows from its settings. So a job with another seed is not refused: it waits, too, in
another run. The runs' records say by name what they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping

from lowcomm_jax.runtime import records
from lowcomm_jax.runtime.context import ExchangeContext
from lowcomm_jax.runtime.errors import Rejected

_NAMED = 3
"""Most runs, and most settings of one, that are told."""
_IDENTITY = records.by_name(records.text)


def differing(context: ExchangeContext, key: str) -> str:
    """A sentence about the other runs, the most alike first; "" where there are none to be read.

    Args:
      key: of a run's record.

    Raises:
      StoreUnavailable: the store does not answer.
    """
    found = []
    for run_id, data in context.store.beside(key).items():
        try:
            record = context.seal.of(run_id).open(key, data)
            there = _IDENTITY(record.get("identity", {}))
        except Rejected:
            continue  # of another secret, or of another format
        if differences := _between(there, context.identity):
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
