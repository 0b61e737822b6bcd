"""Which tests are contract: those that the first table of `tests/README.md` names by pattern."""

import re
from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def patterns() -> list[str]:
    """Of paths below `tests`."""
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|[^|]*\|$", (TESTS / "README.md").read_text(), re.M)
    return [pattern for row in rows for pattern in re.findall(r"`([^`]*test_[^`]*\.py)`", row)]


def matches(pattern: str, path: Path) -> bool:
    """Whether a file is one of a pattern's; `*` stands within one folder."""
    folder, _, name = pattern.rpartition("/")
    return path.parent == TESTS / folder and fnmatch(path.name, name)


def is_contract(path: Path) -> bool:
    return any(matches(pattern, path) for pattern in patterns())
