"""Whether data of a file has the fields and types that its reader needs: structs of msgspec."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec

from experiments.cli import RefusedError

_MOST = sys.float_info.max
Number = Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)]
"""A finite number."""
Positive = Annotated[float, msgspec.Meta(gt=0, le=_MOST)]
Count = Annotated[int, msgspec.Meta(ge=1)]


def misfit(value: Any, kind: Any) -> str | None:
    """What keeps data of a JSON file from being of a type, with the place; None = nothing.

    Args:
      kind: a struct, which has the fields that are needed; others may be there.
    """
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return None


def read_json(path: Path, title: str, fix: str) -> Any:
    """The content of a JSON file.

    Raises:
      RefusedError: it cannot be read, or is no JSON; one line, which ends with `fix`.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "no text in UTF-8"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = f"no JSON ({error})"
    raise RefusedError([f"{path}: {reason}; {fix}"], title)
