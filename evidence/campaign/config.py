"""Every setting of a campaign, with its default.

A file in evidence/configs/ calls `campaign(...)`; the command line overrides any field.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Size:
    """A model.

    Attributes:
      params: about how many parameters it has, for the estimate of hours.
      batch: sequences a step of all regions together: every number of regions sees equal tokens.
      fields: of the train config.
    """

    params: float
    batch: int
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A paper's claim on two arms: the measure of `here` is at most (1 + margin) of `there`.

    Attributes:
      says: the claim in a sentence.
      source: arXiv id.
      here, there: names of arms.
      margin: relative. 0 = `here` is better; 0.01 = `here` is at most one per cent worse.
      mind: where a result that would change our mind is to be looked for, in words.
      published: the paper's own figure.
      stages: key of a stage -> fields that replace those of the stage for this claim; None in
        place of the fields = no part in it.
      measure: "loss", the final one; or "anchor_variance", of the regions' anchors at the end.
      again: config of `compare` that looks at the claim at one scale, in minutes.
    """

    says: str
    source: str
    here: str
    there: str
    margin: float
    mind: str
    published: str = ""
    stages: dict[str, Any] = dataclasses.field(default_factory=dict)
    measure: str = "loss"
    again: str = ""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A ladder of scales: all combinations, each with all seeds.

    Attributes:
      sizes: names of sizes.
      rounds: outer rounds, of H inner steps each.
      regions: numbers of regions.
      splits: of the data over regions, `data.sharding` of the train config.
      seeds: that are reported.
    """

    sizes: tuple[str, ...]
    rounds: tuple[int, ...]
    regions: tuple[int, ...]
    splits: tuple[str, ...] = ("iid",)
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Successive halving over each arm's points, anew for every size.

    Attributes:
      rungs: (rounds, points) each: the best `points` of the rung before train for `rounds`.
      regions, split: of the tuning runs.
      seeds: of the tuning runs, never reported; the mean of their losses counts.
      widen: how often the points next to the best that were not tried train for the last rung's
        rounds. Beyond the grid the next value of a field is 1, 2 or 5 times a power of ten.
    """

    rungs: tuple[tuple[int, int], ...] = ()
    regions: int = 4
    split: str = "iid"
    seeds: tuple[int, ...] = (100,)
    widen: int = 0


def campaign(**changes: Any) -> ConfigDict:
    """The config of a campaign.

    Args:
      changes: any field, see below.
    """
    config = ConfigDict()
    config.title = "Campaign"
    config.records = "evidence/records/campaign"  # folder of one small file a run, to be committed
    config.page = "campaign"  # name of its page and of the folder of pictures
    config.text = "texts"  # what the models read, in words, for the page
    config.origin = ""  # where these texts come from, for who runs more
    config.see = ""  # what the page says of other pages
    config.beside = ""  # file of a campaign with claims of these names on other texts
    config.common = {}  # fields of the train config that all runs share
    config.period = 30  # H, inner steps a round, of every method that has one
    config.evaluations = 6  # of a run that is reported, at equal distances
    config.sizes = {}  # name -> `size(...)`, from the smallest
    config.arms = {}  # name -> `arm(...)` or `variant(...)`: a method as the campaign compares it
    config.claims = {}  # name -> `claim(...)`
    # Key -> `stage(...)`. A stage runs when those before it lack nothing any more.
    config.stages = {}
    config.tuning = tuning()
    # Virtual time is that of links of this kind between all regions, at `step_seconds` a step.
    config.link = {"bandwidth_gbps": 1.0, "delay_ms": 30.0}
    config.step_seconds = 0.02
    for key, value in changes.items():
        config[key] = value
    return config.lock()


def size(params: float, batch: int, **fields: Any) -> dict[str, Any]:
    """A `Size`, as a config holds it."""
    return vars(Size(params, batch, fields))


def claim(*values: Any, **fields: Any) -> dict[str, Any]:
    """A `Claim`, as a config holds it."""
    return vars(Claim(*values, **fields))


def stage(*values: Any, **fields: Any) -> dict[str, Any]:
    """A `Stage`, as a config holds it."""
    return vars(Stage(*values, **fields))


def tuning(**fields: Any) -> dict[str, Any]:
    """A `Tuning`, as a config holds it."""
    return vars(Tuning(**fields))


def arm(config: str, over: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    """A method as the campaign compares it.

    Args:
      config: a file in configs/ or its bare name.
      over: fields that are tuned and their values, as in `vary` of a comparison:
        "inner.learning_rate=1e-3,2e-3". All arms have equally many points.
      changes: fields of the train config.
    """
    return {"config": config, "over": tuple(over), "set": changes}


def variant(of: str, **changes: Any) -> dict[str, Any]:
    """An arm with other settings, which trains at the learning rates that were tuned for it.

    Args:
      of: name of the arm.
      changes: fields of the train config, over those of the arm.
    """
    return {"of": of, "set": changes}
