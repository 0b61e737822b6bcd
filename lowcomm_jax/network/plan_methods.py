"""Methods as the planner sees them: what is sent how often, what is kept, what it costs in loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowcomm_jax.network.errors import raise_all
from lowcomm_jax.network.penalties import (
    Penalty,
    codec_penalty,
    overlap_penalty,
    period_penalty,
    total,
)
from lowcomm_jax.network.shapes import Param

BLOCK = 256  # elements that share one fp32 scale in the block quantisers
BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "int8": 8.0 + 32.0 / BLOCK,
    "int4": 4.0 + 32.0 / BLOCK,
    "e3m0": 4.0 + 32.0 / BLOCK,
    "topk_2bit": 64.0 * (12 + 2) / 4096.0,
}
CODECS = (*BITS, "low_rank_int4")
ONE_PERIOD = "period"


@dataclass(frozen=True)
class PlanMethod:
    """One row of a plan.

    Attributes:
        name: label.
        period: inner steps between two sends of the same parameters; 1 = gradients every step.
        fragments: how many parts travel separately.
        tau: inner steps a landing comes after its send; "period" = one whole period.
        codec: one of `CODECS`, or a number of bits per parameter.
        rank: of the low-rank codec.
        route: how it travels, see `routes.ROUTES`.
        tensors: dense tensors that travel per exchange (2 for NoLoCo: pseudo-gradient and anchor).
        critical: share of the bytes on the critical path (NoLoCo sends the anchor early: 0.5).
        eager: one-period methods that use their own fresh part.
        state: {what: bytes per parameter} kept beside the inner optimizer.
        payload_nbytes: bytes of one payload of the whole model as a real codec announces them;
            overrides `codec`.
    """

    name: str
    period: int = 1
    fragments: int = 1
    tau: int | str = 0
    codec: str | float = "fp32"
    rank: int | None = None
    route: str = "ring"
    tensors: int = 1
    critical: float = 1.0
    eager: bool = False
    state: Mapping[str, float] | None = None
    payload_nbytes: int | None = None

    @property
    def tau_steps(self) -> int:
        """Give tau as a number."""
        return self.period if self.tau == ONE_PERIOD else int(self.tau)

    def payload_bytes(self, params: Sequence[Param]) -> float:
        """Give the bytes of one region's payload for the whole model."""
        if self.payload_nbytes is not None:
            return float(self.payload_nbytes)
        if self.codec == "low_rank_int4":
            return self.tensors * sum(low_rank_bytes(p.shape, self.rank or 64) for p in params)
        bits = BITS[self.codec] if isinstance(self.codec, str) else float(self.codec)
        return self.tensors * sum(p.size for p in params) * bits / 8.0

    def penalty(self) -> Penalty:
        """Give the published loss penalty of this setting (nats), unknown where nothing is
        published.
        """
        if self.period == 1:
            return codec_penalty("fp32")
        codec = self.codec if isinstance(self.codec, str) else f"{self.codec:g} bits"
        overlap = overlap_penalty(self.tau_steps, self.period, self.eager)
        return total([period_penalty(self.period), overlap, codec_penalty(codec)])

    def violations(self, layers: int) -> list[str]:
        """List what cannot be planned, each with its fix."""
        found = []
        if self.period < 1:
            found.append(f"{self.name}: period {self.period}: use at least 1")
        if not 1 <= self.fragments <= min(layers, max(self.period, 1)):
            found.append(
                f"{self.name}: {self.fragments} fragments: use 1 to "
                f"{min(layers, max(self.period, 1))} "
                f"({layers} layers, period {self.period})"
            )
        if isinstance(self.tau, str) and self.tau != ONE_PERIOD:
            found.append(
                f"{self.name}: tau {self.tau!r}: use a number of inner steps or {ONE_PERIOD!r}"
            )
        elif not 0 <= self.tau_steps <= max(self.period, 1):
            found.append(f"{self.name}: tau {self.tau_steps}: use 0 to {self.period} (the period)")
        if isinstance(self.codec, str) and self.codec not in CODECS:
            found.append(
                f"{self.name}: codec {self.codec!r}: use {', '.join(CODECS)} or bits per parameter"
            )
        return found


def low_rank_bytes(shape: tuple[int, ...], rank: int) -> float:
    """Give the int4 bytes of one tensor as two factors, or of the tensor itself where that is
    smaller.

    Tensors of more than two dimensions count as (first, rest).
    """
    rows = shape[0] if shape else 1
    columns = 1
    for dimension in shape[1:]:
        columns *= dimension
    elements = min(rank * (rows + columns), rows * columns) if len(shape) > 1 else rows
    return elements * BITS["int4"] / 8.0


ANCHOR, MOMENTUM, RESIDUAL = {"anchor": 4.0}, {"outer momentum": 4.0}, {"residual": 4.0}
SNAPSHOT = {"snapshot in flight": 4.0}

OUTER = {**ANCHOR, **MOMENTUM}

PRESETS = {
    method.name: method
    for method in (
        PlanMethod("allreduce"),
        PlanMethod("local_sgd", period=100, state=ANCHOR),
        PlanMethod("diloco", period=100, state=OUTER),
        PlanMethod(
            "streaming_diloco",
            period=100,
            fragments=8,
            tau=1,
            codec="e3m0",
            route="two_shot",
            state=OUTER,
        ),
        PlanMethod(
            "eager_diloco", period=100, tau=ONE_PERIOD, eager=True, state={**OUTER, **SNAPSHOT}
        ),
        PlanMethod("cocodc", period=100, fragments=4, tau=5, state=OUTER),
        PlanMethod(
            "dilocox",
            period=125,
            tau=ONE_PERIOD,
            codec="low_rank_int4",
            rank=2048,
            route="all_gather",
            state={**OUTER, **RESIDUAL},
        ),
        PlanMethod(
            "noloco",
            period=50,
            codec="bf16",
            route="pair",
            tensors=2,
            critical=0.5,
            state=OUTER,
        ),
        PlanMethod(
            "sparseloco",
            period=30,
            codec="topk_2bit",
            route="all_gather",
            state={**ANCHOR, **RESIDUAL},
        ),
        PlanMethod(
            "muloco", period=30, codec="int4", route="two_shot", state={**OUTER, **RESIDUAL}
        ),
    )
}


def plan_method(spec: str | Mapping) -> PlanMethod:
    """Build a method from a preset's name or a mapping {"preset": name, field: value, ...}.

    Raises:
        ValueError: unknown preset or field.
    """
    fields = {"preset": spec} if isinstance(spec, str) else dict(spec)
    name = fields.pop("preset", None)
    found = []
    if name is not None and name not in PRESETS:
        found.append(f"preset {name!r} is unknown: use {', '.join(PRESETS)}")
    unknown = sorted(set(fields) - set(PlanMethod.__dataclass_fields__))
    found += [
        f"field {k!r} is unknown: use {', '.join(PlanMethod.__dataclass_fields__)}" for k in unknown
    ]
    if name is None and "name" not in fields:
        found.append("a method needs a preset or a name")
    raise_all(f"method {fields.get('name', name)!r}", found)
    return replace(PRESETS[name], **fields) if name else PlanMethod(**fields)
