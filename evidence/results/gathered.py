"""What pages show: a campaign with its records, differences and verdicts."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

from evidence.campaign.ledger import Records, read
from evidence.campaign.order import Points
from evidence.campaign.plan import Campaign, Rung, plan
from evidence.campaign.run import DEFAULT
from evidence.results import corpora
from evidence.results.corpora import Judged
from evidence.results.effects import OPPOSITE, SEEN, Effect, effects
from evidence.results.markdown import count
from evidence.results.verdict import (
    ORDER,
    Verdict,
    verdicts,
)
from experiments.cli import RefusedError, load_config, refuse_any

TITLE = "cannot make the pages"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything that the page shows.

    Attributes:
      campaign: claims, arms and rungs.
      ledger: records of the runs.
      effects: those of each claim, by its name.
      verdicts: one for each claim and split of the data.
      config: the file of the campaign.
      beside: the campaign on other texts that the page compares with; None = none.
    """

    campaign: Campaign
    ledger: Records
    effects: dict[str, list[Effect]]
    verdicts: tuple[Verdict, ...]
    config: str
    beside: corpora.Judged | None = None

    @functools.cached_property
    def points(self) -> Points:
        """The learning rates that were settled."""
        return Points(self.ledger)

    def command(self, *name: str) -> str:
        """A command of this campaign."""
        return " ".join(["python -m evidence", *name, f"--config={self.config}"])

    def params(self, rung: Rung) -> str:
        """Parameters of a rung's model, for people."""
        return count(self.campaign.sizes[rung.size].params)

    def verdict(self, claim: str, split: str) -> Verdict | None:
        """The verdict on a claim on data of this split; None if there is none."""
        return next((v for v in self.verdicts if (v.claim, v.split) == (claim, split)), None)

    def tested(self, claim: str, split: str) -> list[Effect]:
        """Effects of a claim on data of this split that have enough seeds."""
        return [e for e in self.effects[claim] if e.rung.split == split and e.tested]

    def statuses(self, verdict: Verdict) -> Counter[str]:
        """How many rungs of a verdict are seen, the opposite and open."""
        return Counter(effect.status for effect in self.tested(verdict.claim, verdict.split))

    def sorted_verdicts(self) -> list[Verdict]:
        """The verdicts, those against a claim first; of equal ones, those with more against it."""

        def key(verdict: Verdict):
            found = self.statuses(verdict)
            against = (found[OPPOSITE] - found[SEEN]) / max(1, found.total())
            return ORDER.index(verdict.word), -against, verdict.claim, verdict.split

        return sorted(self.verdicts, key=key)


def loaded(path: str, overrides: Sequence[tuple[str, str]] = ()) -> tuple[Records, str]:
    """The records of a campaign, and its file.

    Raises:
      RefusedError: it is no campaign, cannot be run, or has no records.
    """
    config, problems = load_config(path, overrides)
    refuse_any(problems, TITLE)
    campaign = plan(config)
    ledger = read(campaign)
    if not ledger.found:
        problem = f"there are no records in {campaign.records}: run the campaign first"
        raise RefusedError([problem], TITLE)
    return ledger, path


def gather(ledger: Records, config: str = DEFAULT) -> Evidence:
    """Effects and verdicts of a ledger's records; `config`: the campaign's file.

    Raises:
      RefusedError: the campaign beside it is none, has no records, or a damaged one.
    """
    campaign, found, beside = ledger.campaign, effects(ledger), None
    if campaign.beside:
        other = loaded(campaign.beside)[0]
        beside = Judged(other.campaign, effects(other))
    return Evidence(campaign, ledger, found, verdicts(campaign, found), config, beside)
