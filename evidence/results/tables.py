"""Tables of comparisons within pages that are written by hand.

A page shows a comparison between two lines, and `results` writes what stands between them:

    <!-- comparison: evidence/records/quick.json -->
    <!-- end of comparison -->

The file is the compare.json that `compare` wrote, kept under version control.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.cli import RefusedError
from experiments.compare.at_equal import sentence
from experiments.compare.columns import columns, note
from experiments.compare.config import RESULT
from experiments.compare.result import VERSION
from experiments.compare.show import in_order, interval_of

_BEGIN, _END = "<!-- comparison:", "<!-- end of comparison -->"
_BLOCK = re.compile(rf"({_BEGIN} (\S+) -->\n)(?:(?!{_BEGIN}).)*?({_END})", re.DOTALL)


def refreshed(docs: Path) -> dict[Path, str]:
    """Every page with a comparison -> its text as the records have it.

    Raises:
      RefusedError: a record is missing, is none, or is of another version; a comparison without
        its end.
    """
    found, problems = {}, []

    def block(match: re.Match) -> str:
        file = Path(match[2])
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            version = result["version"]
        except FileNotFoundError:
            problems.append(f"there is no {file}: copy the {RESULT} of that comparison there")
        except (ValueError, KeyError, TypeError):
            problems.append(f"{file} is no {RESULT}: copy that of a comparison there")
        else:
            if version == VERSION:
                return f"{match[1]}{table(result)}\n{match[3]}"
            problems.append(f"{file} has version {version}, not {VERSION}: run it again")
        return match[0]

    for page in sorted(docs.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if not (begun := text.count(_BEGIN)):
            continue
        found[page], written = _BLOCK.subn(block, text)
        if not begun == written == text.count(_END):
            problems.append(f"{page}: each line `{_BEGIN} FILE -->` needs a line `{_END}`")
    if problems:
        raise RefusedError(problems, "results")
    return found


def table(result: Mapping[str, Any]) -> str:
    """What `compare` prints of costs, as Markdown, and who is ahead at equal time and bytes."""
    skipped = any(row.get("skipped") for row in result["variants"].values())
    shown = columns(result["networks"], skipped)
    heads = ["variant", *(heading.replace("- ", "") for heading in shown)]
    rows = [heads, ["---"] * len(heads)]
    rows += [
        [name, *(column.text(row) for column in shown.values())]
        for name, row in in_order(result).items()
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    failed = [
        f"Failed: {f['variant']}, seed {f['seed']}: {f['error']}." for f in result["failures"]
    ]
    about = [
        f"Loss in nats per token{interval_of(result)}.",
        note(result["networks"], result["step_seconds"]),
        sentence(result["at_equal"], result["baseline"], len(result["seeds"])),
        *failed,
    ]
    return "\n".join([*lines, "", " ".join(part for part in about if part)])
