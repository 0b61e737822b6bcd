"""`PlanMethod`: a method under a name, as a plan takes it; `plan_method` makes one from a config.

A row holds the method itself: what it sends and keeps, and when, comes from a dry run
(`dry_run`). How its paper runs it stands with its factory (`methods.base.published`). So a
method that is new is planned without a line here.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax

from lowcomm_jax import methods
from lowcomm_jax.compression import Codec, LowRank, registry
from lowcomm_jax.compression.two_shot import per_tensor
from lowcomm_jax.methods.base import Law, published_by
from lowcomm_jax.planner.dry_run import period_of, tau_of
from lowcomm_jax.planner.expected_loss import (
    Penalty,
    codec_penalty,
    gradient_penalty,
    overlap_penalty,
    period_penalty,
    total,
)
from lowcomm_jax.refused import Refused, collect, is_unknown, refuse, whole

AUTO = "auto"


@dataclass(frozen=True, eq=False)
class PlanMethod:
    """One row of a plan.

    Attributes:
        name: label.
        method: what is planned.
        law: see `methods.base.Published`.
        margin: inner steps added to the overlap that hides a fragment's transfer, which then takes
            the place of the method's own; None = as the method has it.
        stalls: whether to plan the method, with its waits, even if its fragments never catch up
            with the link.
        inner: see `methods.base.Published`.
        preset, settings: the factory and its keywords, where a config names them.
    """

    name: str
    method: methods.Method
    law: Law | None = None
    margin: int | None = None
    stalls: bool = False
    inner: optax.GradientTransformation | None = None
    preset: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def period(self) -> int:
        """H; 1 = gradients every step."""
        return period_of(self.method)

    @property
    def fragments(self) -> int:
        """K."""
        return self.method.schedule.fragments

    @property
    def tau(self) -> int:
        """Inner steps from a send to its landing; the period = one whole round."""
        return tau_of(self.method)

    @property
    def eager(self) -> bool:
        """Whether a region uses its own fresh part before the others' has arrived."""
        return self.method.takes_own_parts

    @property
    def codec(self) -> str:
        """The codec's name."""
        return codec_name(self.method.codec)

    @property
    def rank(self) -> int | None:
        """Of a low-rank codec in the first rounds."""
        inner = _inner(self.method.codec)
        return inner.rank if isinstance(inner, LowRank) else None

    def with_overlap(self, tau: int) -> "PlanMethod":
        """The row with another delay."""
        return self._with_schedule(delay=tau, margin=None)

    def with_period(self, period: int) -> "PlanMethod":
        """The row with another period; a period's overlap is the new one."""
        return self._with_schedule(period=period)

    def _with_schedule(self, margin: Any = ..., **fields: Any) -> "PlanMethod":
        schedule = dataclasses.replace(self.method.schedule, **fields)
        method = dataclasses.replace(self.method, schedule=schedule)
        margin = self.margin if margin is ... else margin
        return dataclasses.replace(self, method=method, margin=margin)

    def penalty(self) -> Penalty:
        """Give the published loss penalty of this setting, in nats, or that there is none."""
        if self.law is None:
            return Penalty(None, "found", f"no published figure for {self.name}")
        if self.law == "data_parallel":
            return gradient_penalty(self.codec)
        overlap = overlap_penalty(self.tau, self.period, self.eager)
        return total([period_penalty(self.period), overlap, codec_penalty(self.codec)])

    def violations(self, layers: int, regions: int) -> list[str]:
        """List what cannot be planned, each with its fix."""
        found = list(self.method.problems) or self.method.schedule.violations(regions)
        most = 0 if found else min(layers, self.period)
        if not found and self.fragments > most and self.method.pattern == "strided":
            found = [
                f"{self.fragments} fragments: use 1 to {most} ({layers} layers, period "
                f"{self.period})"
            ]
        if self.margin is not None:
            found += whole("margin", self.margin, 0)
            if self.method.schedule.land_after_send or not self.method.has_anchor:
                found.append(f"{AUTO!r} needs a method that lands some steps after its send")
        if not isinstance(self.stalls, bool):
            found.append(f"stalls is {self.stalls!r}: use True or False")
        return [f"{self.name}: {line}" for line in found]


# -- how rows are made -----------------------------------------------------------------------------

# `allreduce` is another name for DDP, the method that all others are compared with.
FACTORIES: dict[str, Callable[..., methods.Method]] = {"allreduce": methods.ddp} | methods.NAMES


def asked_for(regions: int) -> dict[str, Any]:
    """Values of keywords that a factory has no default for; regions are alike.

    A plan may leave these out. Other keywords without a default it has to give, unless the factory
    says what its paper had (`methods.base.published`).
    """
    return {
        "period": 100,
        "fragments": 4,
        "overlap": 5,
        "alpha": 0.5,
        "gamma": 0.3,
        "rate": 1.0,
        "seconds": 600.0,
        "step_seconds": 6.0,
        "speeds": (1.0,) * regions,
        "groups": tuple((region,) for region in range(regions)),
        # Payloads and states are of one size, whoever trains what; models here have no experts.
        "roles": {"name": "shares", "leaves": "mlp/up", "axis": 1},
        "experts": "mlp/up",
        "compare": "mlp/up",
    }


def codec_name(codec: Codec | None) -> str:
    """A codec by its own name, of low rank without the rank, which has a figure of its own."""
    if codec is None:
        return "fp32"
    inner = _inner(codec)
    if isinstance(inner, LowRank):
        return f"low_rank_{inner.factors.name}"
    named = codec if inner is None else inner
    return named.name or type(named).__name__


def _inner(codec: Codec | None) -> Any:
    """The codec of most leaves; None = dense, or a codec that has none."""
    one = None if codec is None else per_tensor(codec.at(0))
    return None if one is None else one.default


def planned(
    name: str,
    regions: int = 2,
    factory: Callable[..., methods.Method] | None = None,
    stacked: Sequence[str] = ("blocks",),
    **settings: Any,
) -> PlanMethod:
    """The row of a method of `lowcomm_jax.methods`, or of `allreduce`, as published.

    Args:
        factory: of a method of your own, in the place of the one of this name.
        stacked: path prefixes of the model's leaves with a leading axis of layers or experts, whose
            rows codecs code one by one; by default those of a decoder.
        settings: keywords of the factory that differ; `overlap="auto"` takes as many steps as hide
            a fragment's transfer, and `margin` more.

    Raises:
        ValueError: a setting that the factory refuses.
    """
    factory = factory or FACTORIES[name]
    takes, paper = inspect.signature(factory).parameters, published_by(factory)
    published = dict(paper.settings)
    if "codec" in settings:
        published.pop("rank", None)
    any_number = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [k for k, x in takes.items() if x.default is x.empty and x.kind not in any_number]
    usual = {k: value for k, value in asked_for(regions).items() if k in needed}
    keywords = {**usual, **published, **settings}
    known = {"stacked", *keywords}
    refuse(name, [f"field {k!r} is missing: give it" for k in needed if k not in known])
    given = {**keywords, "overlap": 0} if keywords.get("overlap") == AUTO else keywords
    for part in ("codec", "global_codec"):
        codec = given.get(part, takes[part].default if part in takes else None)
        if codec == "fp32":
            given = {**given, part: None}
        elif isinstance(codec, str | Mapping):
            spec = {"name": codec} if isinstance(codec, str) else codec
            spec = {"stacked": stacked, **spec}
            own = ":" in str(spec.get("name"))  # one's own is taken as it is, as in training
            given = {**given, part: registry.make(spec) if own else spec}
    if "stacked" in takes:
        given = {"stacked": stacked, **given}
    made = factory(**given)
    law = paper.law if all(settings.get(rule) is None for rule in _RULES) else None
    return PlanMethod(name, made, law, inner=paper.inner, preset=name, settings=keywords)


_OWN = ("preset", "margin", "stalls")  # fields of a row that no factory takes
# With another one, what a paper has lost is not known to hold.
_RULES = ("outer", "merge", "landing", "schedule", "topology", "roles", "inner_batching")


def plan_method(
    name: str,
    spec: Mapping[str, Any],
    regions: int = 2,
    factories: Callable[[str], Callable[..., methods.Method] | None] = FACTORIES.get,
    stacked: Sequence[str] = ("blocks",),
) -> PlanMethod:
    """Build a row from its fields, {"preset": a method, keyword: value, ...}.

    Keywords are those of the method's factory; `margin` and `stalls` are the plan's.

    Args:
        name: of the row.
        spec: its fields.
        factories: gives the factory of a preset; None = there is no such preset.
        stacked: see `planned`.

    Raises:
        Refused: an unknown preset or keyword, or a value that the factory refuses.
    """
    base = spec.get("preset")
    factory = factories(base) if isinstance(base, str) else None
    if factory is None:
        text = f"preset {base!r} {is_unknown(base, FACTORIES)}, or module:function"
        raise Refused(f"method {name!r}", [text])
    takes = inspect.signature(factory).parameters
    known = (*takes, *_OWN)
    unknown = sorted(set(spec) - set(known), key=str)
    found = [f"field {k!r} {is_unknown(k, known)}" for k in unknown]
    settings = {k: v for k, v in spec.items() if k in takes}
    overlap = settings.get("overlap")
    if isinstance(overlap, str) and overlap.isdecimal():  # of a field that held "auto": text alone
        settings["overlap"] = int(overlap)
    automatic = settings.get("overlap") == AUTO
    if "margin" in spec and not automatic:
        found.append(f"margin needs overlap={AUTO!r}: leave it out")
    make = functools.partial(planned, base, regions, factory, **{"stacked": stacked, **settings})
    row = None if found else collect(found, "", make)
    refuse(f"method {name!r}", found)
    margin = spec.get("margin", 0) if automatic else None
    return dataclasses.replace(row, name=name, margin=margin, stalls=spec.get("stalls", False))
