"""DiLoCoX (arXiv 2506.21263): one-step delay, low-rank int4 payloads, adaptive rank and H.

At boundary t every region sends its compressed pseudo-gradient, with error feedback of decay 1
(`compression.error_feedback`), and takes the reduced one of the round before (`delayed_diloco`).

All regions hold the same anchor. The work of round t is in the anchor that round t + 2 starts from.
At the first boundary nothing has arrived, and every region restarts from the unmoved anchor.

Differs from the paper, whose listing we had not: factors are one-shot, with a warm basis of each
region's own (`compression.codecs.low_rank`). Rank and H adapt as `schedule.rank_driven` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax

from lowcomm_jax.compression import Codec, LowRank, registry
from lowcomm_jax.compression.codec_levels import CodecLevels
from lowcomm_jax.methods.base import Method, published, timing_problems
from lowcomm_jax.network import derive_tau
from lowcomm_jax.refused import at_least, collect, is_unknown, is_whole
from lowcomm_jax.rules.outer import nesterov
from lowcomm_jax.schedule import Ranked, Schedule, Staggered
from lowcomm_jax.schedule.base import FirstRound


@dataclasses.dataclass(frozen=True)
class AdaGradCmp:
    """How rank and round length adapt (`schedule.rank_driven`).

    Attributes:
      window: c, rounds whose measured ranks are averaged.
      energy: share of the squared norm that the measured rank holds, in (0, 1].
      buckets: how many ranks occur, evenly spaced from r_1 down to the floor; each compiles once.
      floor: smallest rank; default r_1 / 8.
      shortest: fewest steps of a round; default H_1 / 8.
      probe: rounds between two probing rounds one bucket higher; None = never.
    """

    window: int = 5
    energy: float = 0.95
    buckets: int = 8
    floor: int | None = None
    shortest: int | None = None
    probe: int | None = None

    def ranks(self, rank: int) -> tuple[int, ...]:
        """The buckets from r_1 down; fewer where two would be the same."""
        floor = max(1, rank // 8) if self.floor is None else self.floor
        gaps = max(1, self.buckets - 1)
        spaced = {rank - (rank - floor) * k // gaps for k in range(self.buckets)}
        return tuple(sorted(spaced, reverse=True))

    def violations(self, rank: int) -> list[str]:
        """Settings that cannot work with r_1 = `rank`, one line with its fix each."""
        problems = []
        if not 0 < self.energy <= 1:
            problems.append(f"adaptive.energy={self.energy}: a share in (0, 1] is needed")
        if not is_whole(self.buckets) or self.buckets < 1:
            problems.append(f"adaptive.buckets={self.buckets}: a whole number from 1 is needed")
        if self.floor is not None and not is_whole(self.floor):
            problems.append(f"adaptive.floor={self.floor}: must be a whole number")
        elif self.floor is not None and not 1 <= self.floor <= rank:
            problems.append(f"adaptive.floor={self.floor}: must lie in [1, rank={rank}]")
        return problems


@published(law="diloco", period=125, rank=2048)
def dilocox(
    period: int,
    codec: str | Mapping[str, Any] | Codec | None = "low_rank_int4",
    rank: int | None = None,
    delay: int = 1,
    adaptive: AdaGradCmp | Mapping[str, Any] | bool | None = None,
    outer: optax.GradientTransformation | None = None,
    inner_batching: Any = None,
    first_round: FirstRound = "empty",
    step_seconds: float | None = None,
    sync_seconds: float | None = None,
) -> Method:
    """Overlap a whole round, with compressed payloads whose rank and period adapt.

    Args:
      period: H_1, inner steps of the first rounds.
      codec: name or section of a codec, which gets error feedback of decay 1 unless it says
        otherwise; or a codec, taken as it is; None = dense fp32.
      rank: r_1, rank of low-rank codecs in the first rounds; None = 32.
      delay: rounds from send to landing: 1, or 0, which lands every payload at its own boundary
        (without a codec that is DiLoCo).
      adaptive: adapt rank and H; None = yes if the codec is low-rank and given by name.
      outer: Optax transform of the mean pseudo-gradient; default Nesterov 0.7 / 0.9.
      inner_batching: as in `diloco`.
      first_round: with delay 1: `empty`, where the first boundary lands nothing; or `blocking`,
        where the first payload lands at once.
      step_seconds: T_step, seconds of an inner step, with `sync_seconds`. No round of delay 1 may
        be shorter than T_comm / T_step steps: a shorter `period` is refused, and adaptive rounds
        stay at least as long. None = the network's; without a network nothing is checked.
      sync_seconds: T_comm, seconds that the largest payload travels; None = the network's.
    """
    unfit = timing_problems(step_seconds, sync_seconds)
    problems = unfit + _number_problems(rank, delay, first_round)
    if delay == 0 and (step_seconds, sync_seconds) != (None, None):
        unused = "step_seconds and sync_seconds are unused: only rounds of delay 1 need them"
        problems.append(unused)
    delay = 0 if delay == 0 else 1
    steps = period if at_least("period", period, 1) is None else 1  # else the schedule says so
    first = int(rank) if is_whole(rank) and rank > 0 else 32
    named = isinstance(codec, (str, Mapping))
    low_rank, found = _codec_problems(codec) if named else (False, [])
    problems += found
    rule, found = _adaptation(adaptive, low_rank)
    problems += found
    if rank is not None and not low_rank:
        problems.append(f"rank={rank} is unused: only low-rank codecs given by name have one")
    late = delay == 1
    # None = as the network says; nothing travels behind a round that waits.
    travel: tuple[int, ...] | None = None if late else ()
    if late and step_seconds is not None and sync_seconds is not None and not unfit:
        travel = (derive_tau(sync_seconds, step_seconds),)
    schedule: Schedule = Staggered(
        period,
        delay=delay * steps,
        land_after_send=late,
        travel=travel,
        first_round=first_round,
    )
    if rule is not None:
        found = rule.violations(first)
        problems += found
        ranks = (first,) if found else rule.ranks(first)
        shortest = max(1, steps // 8) if rule.shortest is None else rule.shortest
        schedule = Ranked(
            period=period,
            ranks=ranks,
            window=rule.window,
            shortest=shortest,
            travel=None if travel is None else travel * len(ranks),
            probe=rule.probe,
            delay=delay * steps,
            land_after_send=late,
            first_round=first_round,
            energy=rule.energy,
        )
    if named and not problems:
        ranks = schedule.ranks if rule else (first,)
        codec = collect(problems, "codec: ", lambda: _codec_levels(codec, ranks, low_rank))
    return Method(
        name="dilocox",
        schedule=schedule,
        outer=nesterov(0.7, 0.9) if outer is None else outer,
        codec=None if isinstance(codec, str | Mapping) else codec,
        inner_batching=inner_batching,
        problems=tuple(problems),
    )


def _number_problems(rank: Any, delay: Any, first_round: str) -> list[str]:
    found = []
    if delay == 0 and first_round == "blocking":
        found.append("first_round='blocking' is unused: with delay=0 every round blocks")
    if delay not in (0, 1):
        found.append(f"delay={delay}: use 0 or 1 round")
    if rank is not None:
        found += [line for line in [at_least("rank", rank, 1)] if line is not None]
    return found


def _codec_problems(codec: str | Mapping[str, Any]) -> tuple[bool, list[str]]:
    """(whether the codec of this name has a rank, what is wrong with its settings)."""
    spec = {"name": codec} if isinstance(codec, str) else codec
    problems: list[str] = []
    leaf = collect(problems, "codec: ", lambda: registry.make_leaf(spec.get("name")))
    if leaf is None:
        return True, problems  # whatever it is meant to be: only the name is wrong
    if not isinstance(leaf, LowRank):
        return False, []
    problems = [f"codec.{k} is unused: give it as rank" for k in ("rank", "basis") if k in spec]
    if spec.get("reduce") == "two_shot":
        problems.append("codec.reduce='two_shot': factors cannot be encoded a second time")
    return True, problems


def _adaptation(adaptive, low_rank: bool) -> tuple[AdaGradCmp | None, list[str]]:
    """The rule, or None for constant rank and H."""
    if adaptive is None or adaptive is False:
        return (AdaGradCmp() if low_rank and adaptive is None else None), []
    if not low_rank:
        return None, ["adaptive needs a low-rank codec given by name: its payload has no rank"]
    if adaptive is True:
        return AdaGradCmp(), []
    if isinstance(adaptive, AdaGradCmp):
        return adaptive, []
    if not isinstance(adaptive, Mapping):
        return None, [f"adaptive={adaptive!r}: give True, False or settings of AdaGradCmp"]
    fields = [f.name for f in dataclasses.fields(AdaGradCmp)]
    wrong = [k for k in adaptive if k not in fields]
    if wrong:
        return None, [f"adaptive.{k} {is_unknown(k, fields)}" for k in wrong]
    return AdaGradCmp(**adaptive), []


def _codec_levels(codec: str | Mapping[str, Any], ranks: tuple[int, ...], low_rank: bool) -> Codec:
    """One codec per bucket, all over one warm basis of r_1 columns and one residual."""
    spec = {"error_feedback": 1.0, **({"name": codec} if isinstance(codec, str) else codec)}
    if not low_rank:
        return registry.make(spec)
    levels = [registry.make({**spec, "rank": r, "basis": ranks[0]}) for r in ranks]
    return levels[0] if len(levels) == 1 else CodecLevels(levels[0], tuple(levels[1:]))
