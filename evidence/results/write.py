"""Make the pages of evidence from records: verdicts, tables, figures; nothing is trained.

    python -m evidence            # all pages and their pictures, and the tables of docs/
    python -m evidence --check    # exit code 1 if they do not agree with the records
    python -m evidence --config=evidence/configs/wikitext.py     # one campaign's page alone

Every number on a page is computed from the records in the campaign's folder, and in that of the
campaign beside it (`config.beside`), whose new records change both pages. A page that was
edited by hand, or a picture of other records, fails the check. So do the parts of docs/ that are
ours (see `evidence/results/blocks.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from evidence.campaign.run import DEFAULT
from evidence.results import figures
from evidence.results.blocks import refreshed
from evidence.results.effects import Effect
from evidence.results.gathered import TITLE, Evidence, gather, loaded
from evidence.results.page import page
from experiments.cli import Flags, parse_flags, refuse_any, split_config, unexpected
from experiments.progress import plain_console, tracked

OVERVIEW = "overview.png"
CAMPAIGNS = (DEFAULT, "evidence/configs/wikitext.py")
EXIT_DISAGREES = 1
_SHOWN_LINES = 20  # of what differs


def main(argv: Sequence[str]) -> int:
    """Write the pages, or check them; returns the exit code."""
    path, overrides, others = split_config(argv)
    flags = Flags()
    flags.text("pages", "evidence/pages", "folder of the pages")
    flags.text("docs", "docs", "folder of pages with tables of comparisons")
    flags.switch("check", "write nothing; exit code 1 if a page differs from the records")
    values = flags.values
    problems = unexpected(parse_flags(TITLE, others, values, __doc__), {})
    pages, docs = Path(values.pages), Path(values.docs)
    refuse_any(problems, TITLE)
    made = [gather(*loaded(config, overrides)) for config in ([path] if path else CAMPAIGNS)]
    others = {} if path else refreshed(docs, made)  # which may be refused
    console = plain_console(highlight=False, soft_wrap=True)
    if values.check:
        lines = [line for evidence in made for line in disagreements(evidence, pages)]
        lines += [line for file, text in others.items() for line in difference(file, text)]
        for line in lines:
            console.print(line)
        return EXIT_DISAGREES if lines else 0
    for file, text in others.items():
        file.write_text(text, encoding="utf-8")
    for file in [*(file for evidence in made for file in write(evidence, pages)), *others]:
        console.print(f"written: {file}")
    return 0


def write(evidence: Evidence, pages: Path) -> list[Path]:
    """Write the page, draw pictures that show other records, remove those of no claim."""
    pages.mkdir(parents=True, exist_ok=True)
    file, folder = _places(evidence, pages)
    file.write_text(page(evidence), encoding="utf-8")
    wanted = pictures(evidence)
    for picture in folder.glob("*.png"):
        if picture.name not in wanted:
            picture.unlink()
    for name, shown in tracked(wanted.items(), "results: pictures", lambda item: item[0]):
        if figures.digest_in(folder / name) == figures.digest(shown):
            continue
        if name == OVERVIEW:
            figures.overview(evidence.campaign, shown, folder / name)
        else:
            claim = evidence.campaign.claims[shown[0].claim]
            figures.draw(evidence.campaign, claim, shown, folder / name)
    return [file, *(folder / name for name in wanted)]


def _places(evidence: Evidence, pages: Path) -> tuple[Path, Path]:
    """The page, and the folder of its pictures."""
    return pages / f"{evidence.campaign.page}.md", pages / evidence.campaign.page


def pictures(evidence: Evidence) -> dict[str, list[Effect]]:
    """File name -> the effects that the picture shows."""
    found = {f"{name}.png": of for name, of in evidence.effects.items() if of}
    losses = [e for of in evidence.effects.values() for e in of if e.measure == "loss"]
    return {OVERVIEW: losses, **found}


def disagreements(evidence: Evidence, pages: Path) -> list[str]:
    """Lines on what differs between pages and records; empty if they agree."""
    file, folder = _places(evidence, pages)
    found = difference(file, page(evidence))
    for name, shown in pictures(evidence).items():
        picture = folder / name
        if figures.digest_in(picture) != figures.digest(shown):
            found.append(f"{picture} does not show the records: run `python -m evidence`")
    return found


def difference(file: Path, here: str) -> list[str]:
    """Lines on what differs between a page and its text by the records."""
    there = file.read_text(encoding="utf-8") if file.is_file() else ""
    if there == here:
        return []
    lines = difflib.unified_diff(
        there.splitlines(), here.splitlines(), str(file), "the records", lineterm="", n=0
    )
    title = f"{file} does not agree with the records: run `python -m evidence`"
    return [title, *lines][:_SHOWN_LINES]
