"""The wire codec of methods that are made by theirs: the paper's, or the one given instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowcomm_jax.compression import Codec, make


def wire_codec(
    given: Any,
    paper: Callable[[], Codec],
    stacked: Sequence[str],
    **settings: tuple[Any, Any],
) -> tuple[Codec, tuple[str, ...]]:
    """The codec that is given (a codec, name or mapping), else the paper's.

    Args:
      settings: of the paper's codec, name -> (value, the factory's default).

    Returns:
      (codec, problems): settings that the given codec leaves without effect.

    Raises:
      ValueError: an unknown name or setting of a codec.
    """
    if given is None:
        return paper(), ()
    unused = [f"{k}={value!r}" for k, (value, default) in settings.items() if value != default]
    problem = (
        f"codec is given, so {', '.join(unused)} would have no effect: remove one or the other"
    )
    return make(given, stacked=tuple(stacked)), (problem,) if unused else ()
