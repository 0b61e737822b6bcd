"""`PlanMethod`: what a plan needs of a method, and how that is read off the method itself.

A `PlanMethod` says what is sent how often, what is kept, and what the setting costs in loss.
`planned` gives that of a factory of `lowcomm_jax.methods`, `plan_method` that of a config.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from lowcomm_jax import methods
from lowcomm_jax.compression import Codec, LowRank
from lowcomm_jax.compression.two_shot import per_tensor
from lowcomm_jax.network.routes import EXCHANGES
from lowcomm_jax.planner.expected_loss import (
    Penalty,
    codec_penalty,
    gradient_penalty,
    overlap_penalty,
    period_penalty,
    total,
)
from lowcomm_jax.planner.memory import INNER_BYTES
from lowcomm_jax.planner.shapes import Param
from lowcomm_jax.refused import Refused, above_zero, is_unknown, not_negative, refuse, whole
from lowcomm_jax.schedule import Learners

BLOCK = 256  # elements that share one fp32 scale in the block quantisers
SPARSE, COSINE = "topk_2bit", "dct_topk"
BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "int8": 8.0 + 32.0 / BLOCK,
    "int4": 4.0 + 32.0 / BLOCK,
    "e3m0": 4.0 + 32.0 / BLOCK,
    SPARSE: 64.0 * (12 + 2) / 4096.0,
    COSINE: 32.0 * (12 + 32) / 4096.0,
}
LOW_RANK = "low_rank_int4"
PARTIAL = (LOW_RANK, SPARSE, COSINE)  # the mean of such payloads is not encoded again
CODECS = (*BITS, LOW_RANK)
ONE_PERIOD, AUTO = "period", "auto"
DATA_PARALLEL, DILOCO = "data_parallel", "diloco"


@dataclass(frozen=True)
class PlanMethod:
    """One row of a plan.

    Attributes:
        name: label.
        period: inner steps between two sends of the same parameters; 1 = gradients every step.
        fragments: how many parts travel separately.
        tau: inner steps a landing comes after its send; "period" = one whole period; "auto" = as
            many as hide a fragment's transfer, and `margin` more.
        margin: steps that are added where tau is "auto".
        codec: one of `CODECS`, or a number of bits per parameter.
        rank: rank of the low-rank codec; None = 64.
        route: one of `routes.EXCHANGES`; None = as the exchange sends it (`travels`).
        tensors: dense tensors that travel per exchange (2 for NoLoCo: pseudo-gradient and anchor).
        critical: share of the bytes on the critical path (NoLoCo sends the anchor early: 0.5).
        eager: whether a region uses its own fresh part, before the others' has arrived.
        law: the scaling law its loss follows, "data_parallel" or "diloco"; None = none published.
        stalls: whether to plan the method, with its waits, even if its fragments never catch up
            with the link.
        state: {what: bytes per parameter} kept beside the inner optimizer.
        payload_nbytes: bytes of one payload of the whole model as a real codec announces them;
            overrides `codec`.
        learners: whether independent learners (Decoupled DiLoCo) meet through a store. A plan then
            has the store's requests, and tau must hide a round.
    """

    name: str
    period: int = 1
    fragments: int = 1
    tau: int | str = 0
    margin: int = 0
    codec: str | float = "fp32"
    rank: int | None = None
    route: str | None = None
    tensors: int = 1
    critical: float = 1.0
    eager: bool = False
    law: str | None = None
    stalls: bool = False
    state: Mapping[str, float] | None = None
    payload_nbytes: int | None = None
    learners: bool = False

    @property
    def tau_steps(self) -> int:
        """Give tau as a number (once "auto" is replaced, see `plan.with_derived_tau`)."""
        return self.period if self.tau == ONE_PERIOD else int(self.tau)

    @property
    def travels(self) -> str:
        """Give the route, as the exchange does (`compression.two_shot.route`).

        Dense and quantised payloads are reduced by slices (two-shot), which sends less from three
        regions on. Three kinds go to every region: sparse and low-rank payloads, codecs known by
        their bytes alone, and payloads of which a region uses its own part.
        """
        if self.route is not None:
            return self.route
        if self.codec == "fp32":
            return "two_shot"
        whole = self.eager or self.codec in PARTIAL or not isinstance(self.codec, str)
        return "all_gather" if whole or self.payload_nbytes is not None else "two_shot"

    def payload_bytes(self, params: Sequence[Param]) -> float:
        """Give the bytes of one region's payload for the whole model."""
        if self.payload_nbytes is not None:
            return float(self.payload_nbytes)
        if self.codec == LOW_RANK:
            return self.tensors * sum(low_rank_bytes(p.shape, self.rank or 64) for p in params)
        bits = BITS[self.codec] if isinstance(self.codec, str) else float(self.codec)
        return self.tensors * sum(p.size for p in params) * bits / 8.0

    def penalty(self) -> Penalty:
        """Give the published loss penalty of this setting, in nats, or that there is none."""
        codec = self.codec if isinstance(self.codec, str) else f"{self.codec:g} bits"
        if self.law is None:
            return Penalty(None, "found", f"no published figure for {self.name}")
        if self.law == DATA_PARALLEL:
            return gradient_penalty(codec)
        overlap = overlap_penalty(self.tau_steps, self.period, self.eager)
        return total([period_penalty(self.period), overlap, codec_penalty(codec)])

    def violations(self, layers: int) -> list[str]:
        """List what cannot be planned, each with its fix."""
        found = [f"{self.name}: {line}" for line in self._number_violations()]
        known = (
            ("codec", self.codec, CODECS, " or a number of bits per parameter above 0"),
            ("route", self.route, EXCHANGES, " or leave it out"),
            ("law", self.law, (DATA_PARALLEL, DILOCO), " or leave it out"),
        )
        found += [
            f"{self.name}: {field} {value!r}: use {', '.join(choices)}{more}"
            for field, value, choices, more in known
            if isinstance(value, str) and value not in choices
        ]
        if found:
            return found
        most = min(layers, self.period)
        if self.fragments > most:
            found.append(
                f"{self.name}: {self.fragments} fragments: use 1 to {most} ({layers} layers, "
                f"period {self.period})"
            )
        if self.tau != AUTO and self.tau_steps > self.period:
            found.append(f"{self.name}: tau {self.tau_steps}: use 0 to {self.period} (the period)")
        return found

    def _number_violations(self) -> list[str]:
        found = []
        for field, least in (("period", 1), ("fragments", 1), ("margin", 0), ("tensors", 1)):
            found += whole(field, getattr(self, field), least)
        if self.tau not in (ONE_PERIOD, AUTO):
            text = f", {ONE_PERIOD!r} or {AUTO!r}"
            found += [line + text for line in whole("tau", self.tau, 0)]
        if not isinstance(self.codec, str):
            found += above_zero("codec", self.codec, 64)
        if self.rank is not None:
            found += whole("rank", self.rank)
        for field, value in (("route", self.route), ("law", self.law)):
            if value is not None and not isinstance(value, str):
                found.append(f"{field} is {value!r}: use a name, or leave it out")
        found += above_zero("critical", self.critical, 1.0)
        for field in ("eager", "stalls", "learners"):
            if not isinstance(getattr(self, field), bool):
                found.append(f"{field} is {getattr(self, field)!r}: use True or False")
        if self.payload_nbytes is not None:
            found += above_zero("payload_nbytes", self.payload_nbytes)
        if self.state is not None and not isinstance(self.state, Mapping):
            return [*found, f"state is {self.state!r}: use {{what: bytes per parameter}}"]
        for what, each in (self.state or {}).items():
            found += not_negative(f"state {what!r}", each)
        return found


def low_rank_bytes(shape: tuple[int, ...], rank: int) -> float:
    """Give the int4 bytes of one tensor as two factors, or as it is where that is smaller.

    Tensors of more than two dimensions count as (first, rest).
    """
    rows = shape[0] if shape else 1
    columns = 1
    for dimension in shape[1:]:
        columns *= dimension
    elements = min(rank * (rows + columns), rows * columns) if len(shape) > 1 else rows
    return elements * BITS["int4"] / 8.0


# -- reading methods ---------------------------------------------------------------------------

# `allreduce` is another name for DDP, the method that all others are compared with.
FACTORIES = {"allreduce": methods.ddp} | {
    name: factory
    for name in methods.__all__
    if inspect.isfunction(factory := getattr(methods, name))
}
# Values of keywords that a factory has no default for.
ASKED_FOR = {
    "period": 100,
    "fragments": 4,
    "overlap": 5,
    "alpha": 0.5,
    "speeds": (1.0, 1.0),
    "groups": ((0,), (1,)),
}
# Settings of the papers where they differ from those, or from the factories' defaults.
PUBLISHED = {
    "streaming_diloco": {"fragments": 8, "overlap": 1, "codec": "e3m0"},
    "decoupled_diloco": {"period": 12, "overlap": 2},
    "dilocox": {"period": 125, "rank": 2048},
    "noloco": {"period": 50, "codec": "bf16"},
    "sparseloco": {"period": 30},
    "muloco": {"period": 30},
    "isoloco": {"period": 30},
    "restarted_diloco": {"period": 64},
    "decoupled_momentum": {"period": 30},
}
LAWS = {"allreduce": DATA_PARALLEL, "ddp": DATA_PARALLEL} | dict.fromkeys(
    ("diloco", "streaming_diloco", "eager_diloco", "dilocox", "sparseloco"), DILOCO
)
# Names of methods' own codecs -> names that published figures have for them.
_CODECS = {"stat8": "int8", "stat4": "int4", "topk64_stat2": SPARSE, "dct_topk32": COSINE}
_SIDE = 8192  # rows and columns of the matrix on which state and payloads are measured


@functools.cache
def planned(name: str) -> PlanMethod:
    """The plan of a method of `lowcomm_jax.methods`, or of `allreduce`, as published."""
    factory, settings = FACTORIES[name], PUBLISHED.get(name, {})
    asked = {
        key: ASKED_FOR[key]
        for key, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    found = read_method(factory(**{**asked, **settings}), name)
    if name == "demo":  # The residual is the momentum; there are no Adam moments.
        found = replace(found, state={"adam m": 0.0, "adam v": 0.0, **found.state})
    return found


def read_method(method: methods.Method, name: str) -> PlanMethod:
    """What a plan needs to know of a method.

    A codec without published figures is planned by its bits per parameter. So are channels: each
    adds its share of the entries, as often as it sends.
    """
    schedule, trainers = method.schedule, 1 if method.trainers is None else method.trainers.count
    gossip, everyone = method.topology is not None, method.reads_payloads or method.base != "anchor"
    codec, rank = _codec(method.codec) if method.has_anchor else (0.0, None)
    period = schedule.period
    if method.channels:
        every = [channel.every for channel in method.channels]
        period = period if method.has_anchor else min(every)
        codec = (_bits(method.codec) if method.has_anchor else 0.0) + sum(
            _bits(channel.codec) / channel.selection.stride * period / channel.every
            for channel in method.channels
        )
    late, route = schedule.land_after_send, "two_shot" if method.channels else None
    if gossip or everyone:
        route = "pair" if gossip else "all_gather"
    return PlanMethod(
        name,
        period=period,
        fragments=schedule.fragments,
        tau=ONE_PERIOD if late else int(np.max(schedule.delay)),
        codec=codec,
        rank=rank,
        route=route,
        tensors=2 if gossip else trainers,
        critical=0.5 if gossip else 1.0,
        eager=method.takes_own_parts,
        learners=isinstance(schedule, Learners),
        law=LAWS.get(name),
        state={what: each for what, each in _state(method, trainers).items() if each},
    )


def _codec(codec: Codec | None) -> tuple[str | float, int | None]:
    """(name or bits per parameter, rank) of a codec."""
    if codec is None:
        return "fp32", None
    one = per_tensor(codec.at(0))
    inner = None if one is None else one.default
    if isinstance(inner, LowRank) and inner.factors.name == "int4":
        return LOW_RANK, inner.rank
    label = "" if inner is None else _CODECS.get(inner.name, inner.name)
    return (label if label in CODECS else _bits(codec)), None


def _bits(codec: Codec | None) -> float:
    """Bits per parameter of a large matrix."""
    return 32.0 if codec is None else 8.0 * codec.nbytes(_MATRIX) / _SIDE**2


def _state(method: methods.Method, trainers: int) -> dict[str, float]:
    """Bytes per parameter of what is kept beside the inner optimizer, by name."""
    outer = method.outer_of(0)
    found = {
        "anchor": 4.0 * (method.signal == "progress" and method.has_anchor),
        "received anchor": 4.0 * (method.base == "received"),
        "outer momentum": 0.0 if outer is None else _kept(outer.init),
        "residual": 0.0 if method.codec is None else _kept(method.codec.init),
    }
    others = (trainers - 1) * (sum(found.values()) + sum(INNER_BYTES.values()))
    return {**found, "other trainers": others}


def _kept(init: Callable[[Any], Any]) -> float:
    """Bytes per parameter of a state; leaves smaller than the parameters count nothing."""
    leaves = jax.tree.leaves(jax.eval_shape(init, _MATRIX))
    return sum(4.0 * (leaf.size // _SIDE**2) for leaf in leaves)


_MATRIX = {"w": jax.ShapeDtypeStruct((_SIDE, _SIDE), np.float32)}


def plan_method(spec: str | Mapping) -> PlanMethod:
    """Build a row from a method's name or a mapping {"preset": name, field: value, ...}.

    Raises:
        Refused: an unknown preset or field, or something that is neither name nor mapping.
    """
    if isinstance(spec, str):
        spec = {"preset": spec}
    if not isinstance(spec, Mapping):
        text = f"{spec!r} is no method: use a method's name or {{preset: name, field: value}}"
        raise Refused("method", [text])
    fields = dict(spec)
    base = fields.pop("preset", None)
    name = fields.get("name", base)
    found = []
    if base is not None and base not in tuple(FACTORIES):
        found.append(f"preset {base!r} {is_unknown(base, FACTORIES)}")
    known = PlanMethod.__dataclass_fields__
    found += [
        f"field {k!r} {is_unknown(k, known)}" for k in sorted(set(fields) - set(known), key=str)
    ]
    if name is None:
        found.append("a method needs a preset or a name")
    refuse(f"method {name!r}", found)
    tau = fields.get("tau")
    if isinstance(tau, str) and tau.isdecimal():  # a config field that held "auto" takes text alone
        fields["tau"] = int(tau)
    return replace(planned(base), **fields) if base else PlanMethod(**fields)
