"""Parts of pages that are written by hand otherwise: what stands between two lines is ours.

    <!-- comparison: evidence/records/quick.json -->
    <!-- end of comparison -->

becomes the table of a compare.json, which `compare` wrote, kept under version control; and

    <!-- claims -->
    <!-- end of claims -->

the papers' claims with their verdicts, a row each.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.results.effects import on_variants
from evidence.results.gathered import Evidence
from evidence.results.markdown import table
from evidence.results.sections import told_verdict
from evidence.results.verdict import HOLDS_FROM, NOT_SEEN, ORDER
from experiments.cli import refuse_any
from experiments.compare.at_equal import sentence
from experiments.compare.config import RESULT
from experiments.compare.result import VERSION
from experiments.compare.show import in_order, interval_of
from experiments.report.columns import columns, note

_SHORT = {
    None: "-",
    **dict(zip(ORDER, ORDER)),
    NOT_SEEN: "not seen",
    HOLDS_FROM: "holds from a scale on",
}
_BEGIN = re.compile(r"<!-- (?:comparison: \S+|claims) -->")
_BLOCK = re.compile(
    rf"(<!-- (comparison|claims)(?:: (\S+))? -->\n)(?:(?!{_BEGIN.pattern}).)*?(<!-- end of \2 -->)",
    re.DOTALL,
)


def refreshed(docs: Path, made: Sequence[Evidence] = ()) -> dict[Path, str]:
    """Every page with such a part -> its text as the records have it.

    Args:
      made: of the campaigns whose claims are told; the first has the rows.

    Raises:
      RefusedError: a record is missing, is none, or is of another version; a part without its end.
    """
    found, problems = {}, []

    def block(match: re.Match) -> str:
        begin, kind, file, end = match.groups()
        if kind == "claims":
            return f"{begin}{claims(made)}\n{end}"
        try:
            result = json.loads(Path(file).read_text(encoding="utf-8"))
            version = result["version"]
        except FileNotFoundError:
            problems.append(f"there is no {file}: copy the {RESULT} of that comparison there")
        except (ValueError, KeyError, TypeError):
            problems.append(f"{file} is no {RESULT}: copy that of a comparison there")
        else:
            if version == VERSION:
                return f"{begin}{comparison(result)}\n{end}"
            problems.append(f"{file} has version {version}, not {VERSION}: run it again")
        return match[0]

    for page in sorted(docs.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if begun := len(_BEGIN.findall(text)):
            found[page], written = _BLOCK.subn(block, text)
            ends = len(re.findall("<!-- end of (?:comparison|claims) -->", text))
            if not begun == written == ends:
                problems.append(f"{page}: each `<!-- ... -->` needs its line `<!-- end of ... -->`")
    refuse_any(problems, "cannot make the pages")
    return found


def comparison(result: Mapping[str, Any]) -> str:
    """What `compare` prints of costs, as Markdown, and who is ahead at equal time and bytes."""
    skipped = any(row.get("skipped") for row in result["variants"].values())
    shown = columns(result["networks"], skipped)
    heads = ["variant", *(heading.replace("- ", "") for heading in shown)]
    rows = (
        [name, *(column.text(row) for column in shown.values())]
        for name, row in in_order(result).items()
    )
    failed = [
        f"Failed: {f['variant']}, seed {f['seed']}: {f['error']}." for f in result["failures"]
    ]
    about = [
        f"Loss in nats per token{interval_of(result)}.",
        note(result["networks"], result["step_seconds"]),
        sentence(result["at_equal"], result["baseline"], len(result["seeds"])),
        *failed,
    ]
    return "\n".join([*table(heads, rows), "", " ".join(part for part in about if part)])


def claims(made: Sequence[Evidence]) -> str:
    """The claims between methods on data that are i.i.d., and how settings of methods fare."""
    first, others = made[0], made[1:]
    campaign, rows, settings = first.campaign, [], Counter()
    for verdict in first.sorted_verdicts():
        if on_variants(campaign, verdict.claim):
            settings[verdict.word] += 1
        elif verdict.split == "iid":
            claim = campaign.claims[verdict.claim]
            largest = first.tested(claim.name, "iid")[-1:]
            at = [
                f"{e.told} at {first.params(e.rung)}, "
                f"{e.rung.rounds} rounds, {e.rung.regions} regions"
                for e in largest
            ]
            elsewhere = [
                _SHORT[v and v.word]
                for of, split in ((first, "topic"), *((other, "iid") for other in others))
                for v in [of.verdict(claim.name, split)]
            ]
            page = f"../evidence/pages/{campaign.page}.md#{claim.name}"
            read = f"[{claim.name}]({page})" + (f", `{claim.again}`" if claim.again else "")
            cells = (f"{claim.says} ({claim.source})", f"**{told_verdict(first, verdict)}**", *at)
            rows.append((*cells, *elsewhere, read))
    heads = ("claim", "verdict", "largest scale", "regions with topics of their own")
    counts = ", ".join(f"{n} {_SHORT[word]}" for word, n in settings.items())
    return "\n".join(
        [
            *table((*heads, *(of.campaign.text for of in others), "read on"), rows),
            "",
            f"Beside these, {settings.total()} claims on settings of a method: {counts}.",
        ]
    )
