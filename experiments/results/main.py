"""Make the pages of results from records: verdicts, tables, figures; nothing is trained.

    python -m experiments results            # docs/evidence.md and its pictures
    python -m experiments results --config=configs/campaign/wikitext.py
    python -m experiments results --check    # exit code 1 if they do not agree with the records

Every number on the page is computed from the records in the campaign's folder, and in that of the
campaign beside it (`config.beside`), whose new records change both pages. A page that was
edited by hand, or a picture of other records, fails the check. So does a table of a comparison in
another page of the folder (see `experiments/results/tables.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.campaign.main import DEFAULT
from experiments.campaign.plan import plan
from experiments.campaign.records import Records, read
from experiments.cli import (
    Flags,
    RefusedError,
    flag_problems,
    load_config,
    refuse_any,
    refuse_foreign,
    split_config,
)
from experiments.progress import tracked
from experiments.results import figures
from experiments.results.corpora import Judged
from experiments.results.effects import Effect, effects
from experiments.results.page import OVERVIEW, Evidence, page
from experiments.results.tables import refreshed
from experiments.results.verdict import verdicts

EXIT_DISAGREES = 1
_SHOWN_LINES = 20  # of what differs


def main(argv: Sequence[str]) -> int:
    """Write the page, or check it; returns the exit code."""
    path, overrides, others = split_config(argv)
    flags = Flags()
    flags.text("docs", "docs", "folder of the page")
    flags.switch("check", "write nothing; exit code 1 if the page differs from the records")
    values = flags.values
    found = flag_problems("results", others, values, __doc__)
    config, problems = load_config(path or DEFAULT, overrides)
    refuse_any(problems + found, "results")
    refuse_foreign(config, path or DEFAULT, "campaign")
    campaign = plan(config)
    ledger = read(campaign)
    if not ledger.found:
        problem = f"there are no records in {campaign.records}: run the campaign first"
        raise RefusedError([problem], "results")
    evidence, docs = gather(ledger, path), Path(values.docs)
    console = Console(highlight=False, soft_wrap=True)
    if values.check:
        found = disagreements(evidence, docs)
        for line in found:
            console.print(line, markup=False)
        return EXIT_DISAGREES if found else 0
    others = refreshed(docs)  # which may be refused
    for file, text in others.items():
        file.write_text(text, encoding="utf-8")
    for file in [*write(evidence, docs), *others]:
        console.print(f"written: {file}")
    return 0


def gather(ledger: Records, config: str | None = None) -> Evidence:
    """Effects and verdicts of a ledger's records; `config`: the campaign's file.

    Raises:
      RefusedError: the campaign beside it is none, or a record of it is damaged.
    """
    campaign, found, beside = ledger.campaign, effects(ledger.campaign, ledger), None
    if campaign.beside:
        config_of, problems = load_config(campaign.beside, [])
        refuse_any(problems, f"beside={campaign.beside}")
        refuse_foreign(config_of, campaign.beside, "campaign")
        other = plan(config_of)
        beside = Judged(other, effects(other, read(other)))
    return Evidence(campaign, ledger, found, verdicts(campaign, found), config, beside)


def write(evidence: Evidence, docs: Path) -> list[Path]:
    """Write the page and draw its pictures; those of claims without records are removed."""
    docs.mkdir(parents=True, exist_ok=True)
    file, folder = _places(evidence, docs)
    file.write_text(page(evidence), encoding="utf-8")
    wanted = pictures(evidence)
    for picture in folder.glob("*.png"):
        if picture.name not in wanted:
            picture.unlink()
    for name, shown in tracked(wanted.items(), "results: pictures", lambda item: item[0]):
        if name == OVERVIEW:
            figures.overview(evidence.campaign, shown, folder / name)
        else:
            claim = evidence.campaign.claims[shown[0].claim]
            figures.draw(evidence.campaign, claim, shown, folder / name)
    return [file, *(folder / name for name in wanted)]


def _places(evidence: Evidence, docs: Path) -> tuple[Path, Path]:
    """The page, and the folder of its pictures."""
    return docs / f"{evidence.campaign.page}.md", docs / evidence.campaign.page


def pictures(evidence: Evidence) -> dict[str, list[Effect]]:
    """File name -> the effects that the picture shows."""
    found = {f"{name}.png": of for name, of in evidence.effects.items() if of}
    losses = [e for of in evidence.effects.values() for e in of if e.measure == "loss"]
    return {OVERVIEW: losses, **found}


def disagreements(evidence: Evidence, docs: Path) -> list[str]:
    """Lines on what differs between pages and records; empty if they agree."""
    file, folder = _places(evidence, docs)
    found = _difference(file, page(evidence))
    for other, text in refreshed(docs).items():
        found += _difference(other, text)
    for name, shown in pictures(evidence).items():
        picture = folder / name
        if figures.digest_in(picture) != figures.digest(shown):
            found.append(f"{picture} does not show the records: run `results`")
    return found


def _difference(file: Path, here: str) -> list[str]:
    """Lines on what differs between a page and its text by the records."""
    there = file.read_text(encoding="utf-8") if file.is_file() else ""
    if there == here:
        return []
    lines = difflib.unified_diff(
        there.splitlines(), here.splitlines(), str(file), "the records", lineterm="", n=0
    )
    return [f"{file} does not agree with the records: run `results`", *lines][:_SHOWN_LINES]
