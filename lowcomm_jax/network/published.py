"""Published figures, each with its source and how far it may be trusted.

Confidence: "found" = read in the source; "second-hand" = from an independent summary; "recalled" =
from memory of the paper, not checked against it. Nothing marked "recalled" is used as a fact: it is
shown beside our figure with the error.
"""

from dataclasses import dataclass

from lowcomm_jax.network.dag import TARGETS

STREAMING = "arXiv 2501.18512, table 4"
EAGER = "arXiv 2502.12996, bandwidth table (99 %)"
SCALING = "arXiv 2503.09799, bandwidth table (90 %)"
DILOCOX = "arXiv 2506.21263"


@dataclass(frozen=True)
class DagRow:
    """Gbit/s needed for some utilisations.

    Attributes:
        model: key of `DAG_MODELS`.
        method: "data_parallel", "diloco", "streaming".
        period, tau, bits: H, overlap in inner steps, bits per parameter.
        gbps: {utilisation: published Gbit/s}.
        source, confidence: see the module.
        required: whether our model has to land within one grid point (asserted by the tests).
    """

    model: str
    method: str
    period: int
    tau: int
    bits: int
    gbps: dict[float, float]
    source: str
    confidence: str = "found"
    required: bool = True


@dataclass(frozen=True)
class DagModel:
    """Size used in the published simulations: parameters, layers, seconds per step, layers per
    fragment.
    """

    params: float
    layers: int
    step_s: float
    fragment_layers: int = 3


DAG_MODELS = {
    "1B": DagModel(1e9, 24, 0.1),
    "10B": DagModel(1e10, 48, 0.8),
    "100B": DagModel(1e11, 108, 4.9),
}


def _row(values: tuple[float, ...]) -> dict[float, float]:
    return dict(zip(TARGETS, values, strict=True))


DAG_ROWS = (
    DagRow("1B", "data_parallel", 1, 0, 16, _row((86.8, 152.6, 184.2, 222.3, 569.0)), STREAMING),
    DagRow("1B", "diloco", 100, 0, 16, _row((1.4, 6.2, 13.3, 23.3, 86.8)), STREAMING),
    DagRow("1B", "streaming", 100, 0, 16, _row((1.4, 5.2, 9.1, 16.0, 28.1)), STREAMING),
    DagRow("1B", "streaming", 100, 1, 16, _row((1.4, 4.3, 6.2, 9.1, 11.0)), STREAMING),
    DagRow("1B", "streaming", 100, 1, 4, _row((0.4, 0.9, 1.7, 2.0, 3.0)), STREAMING),
    DagRow("10B", "data_parallel", 1, 0, 16, {0.9: 222.3, 0.99: 471.5}, f"{SCALING}; {EAGER}"),
    DagRow("10B", "diloco", 10, 0, 16, {0.9: 86.8}, SCALING),
    DagRow("10B", "diloco", 50, 0, 16, {0.9: 23.3}, SCALING),
    DagRow("10B", "diloco", 100, 0, 16, {0.9: 13.3}, SCALING),
    DagRow("10B", "diloco", 300, 0, 16, {0.9: 4.3}, SCALING),
    DagRow("10B", "streaming", 100, 1, 4, {0.99: 1.7}, EAGER),
    DagRow("100B", "data_parallel", 1, 0, 16, {0.99: 471.5}, EAGER),
    DagRow("100B", "streaming", 100, 1, 4, {0.99: 1.4}, EAGER),
    DagRow("1B", "streaming", 30, 1, 4, {0.99: 4.3}, EAGER, required=False),
    DagRow("10B", "streaming", 30, 1, 4, {0.99: 3.0}, EAGER, required=False),
    DagRow("100B", "streaming", 30, 1, 4, {0.99: 2.0}, EAGER, required=False),
    DagRow("1B", "streaming", 30, 30, 4, {0.99: 2.4}, EAGER, required=False),
    DagRow("10B", "streaming", 30, 30, 4, {0.99: 1.4}, EAGER, required=False),
    DagRow("100B", "streaming", 30, 30, 4, {0.99: 0.9}, EAGER, required=False),
    DagRow("1B", "streaming", 100, 100, 4, {0.99: 0.2}, EAGER, required=False),
    DagRow("10B", "streaming", 100, 100, 4, {0.99: 0.3}, EAGER, required=False),
    DagRow("100B", "streaming", 100, 100, 4, {0.99: 0.4}, EAGER, required=False),
)

# Streaming DiLoCo, 1B on Dolma, 25B tokens, hours: infinite bandwidth and 1 Gbit/s (arXiv
# 2501.18512, tables 1 and 7).
HOURS = {"compute": 0.67, "data_parallel": 109.0, "streaming_fp4": 0.88, "gbps": 1.0, "model": "1B"}

# NoLoCo: simulated for the reference sheet (full duplex, in units of exp(mu)); not the paper's own
# table. (regions, sigma): (tree all-reduce, mean pair, slowest pair of a round)
NOLOCO_ROWS = {
    (64, 0.5): (15.4, 1.45, 3.4),
    (64, 1.0): (34.6, 2.5, 12.1),
    (1024, 0.0): (20.0, 1.0, 1.0),
    (1024, 0.5): (27.3, 1.45, 5.1),
    (1024, 1.0): (77.8, 2.5, 28.0),
}


@dataclass(frozen=True)
class DilocoxRow:
    """DiLoCoX at 107B over 1 Gbit/s: tokens per second and how sure the figure is."""

    label: str
    tokens_per_s: float
    loss: float
    confidence: str


DILOCOX_SPEEDUP = 357.0  # found: abstract of arXiv 2506.21263
DILOCOX_ROWS = (
    DilocoxRow("AllReduce", 10.4, 3.90, "recalled"),
    DilocoxRow("DiLoCoX", 3728.0, 4.20, "recalled"),
    DilocoxRow("DiLoCoX without overlap", 2197.0, 4.15, "recalled"),
    DilocoxRow("DiLoCoX without compression", 1168.0, 4.02, "recalled"),
)


@dataclass(frozen=True)
class SyncRow:
    """A measured synchronisation.

    Attributes:
        label, gbps: shaped rate.
        nbytes, members: payload and ring size.
        measured_s: (low, high) seconds.
        first: whether it was the first collective of its run.
        source: which public measurement.
    """

    label: str
    gbps: float
    nbytes: float
    members: int
    measured_s: tuple[float, float]
    first: bool
    source: str


def _ratio_rows() -> tuple[SyncRow, ...]:
    """Rows published as measured / ring prediction; the ring predictions are the source's own."""
    rows = []
    for label, gbps, ring_s, warm, first in (
        ("5 Gbit/s", 5.0, 0.298, (1.05, 1.17), (2.3, 3.5)),
        ("1 Gbit/s", 1.0, 1.49, (1.006, 1.02), (1.24, 1.54)),
        ("200 Mbit/s", 0.2, 7.46, (1.10, 1.12), (1.12, 1.17)),
        ("50 Mbit/s", 0.05, 29.8, (1.22, 1.29), (1.18, 1.24)),
    ):
        for ratios, is_first in ((warm, False), (first, True)):
            seconds = (ring_s * ratios[0], ring_s * ratios[1])
            rows.append(SyncRow(label, gbps, 123.4e6, 4, seconds, is_first, "diloco-measured"))
    return tuple(rows)


SYNC_ROWS = (
    *_ratio_rows(),
    SyncRow("1 Gbit/s", 1.0, 204.8e6, 2, (6.2, 6.2), False, "ft-diloco"),
    SyncRow("100 Mbit/s", 0.1, 204.8e6, 2, (20.9, 20.9), False, "ft-diloco"),
    SyncRow("50 Mbit/s", 0.05, 204.8e6, 2, (38.4, 38.4), False, "ft-diloco"),
)
