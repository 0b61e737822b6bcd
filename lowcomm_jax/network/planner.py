"""Answer before anyone pays: bytes, utilisation, hours, memory and expected loss of methods on a
network.

The time model is the layer-level model of `dag.py`, with the link replaced by the collective the
method runs on the given network: its volume is spread over the layers, its latency and constants
delay every arrival. Compute is the slowest region's mean step. Utilisations are those of steady
periods, without faults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lowcomm_jax.network.capacity import catch_up_violations
from lowcomm_jax.network.collectives import step_seconds, sync_seconds
from lowcomm_jax.network.dag import (
    TARGETS,
    DagSchedule,
    at_once,
    every_step,
    smallest_bandwidth,
    streaming,
    utilisation,
)
from lowcomm_jax.network.errors import raise_all
from lowcomm_jax.network.links import Network
from lowcomm_jax.network.memory import INNER_BYTES, MemoryPlan, activation_estimate, plan_memory
from lowcomm_jax.network.plan_methods import PlanMethod
from lowcomm_jax.network.routes import sent_bytes
from lowcomm_jax.network.scaling_laws import LossEstimate, expected_loss
from lowcomm_jax.network.shapes import Decoder, Param, param_count

SCALES = np.logspace(-3, 4, 176)  # bandwidth factors of the utilisation curve


@dataclass(frozen=True)
class Workload:
    """What is to be trained, and on what.

    Attributes:
        params: abstract parameters.
        layers: steps the model is cut into for overlap.
        tokens: training tokens over all regions.
        tokens_per_step: tokens of one inner step over all regions.
        network: regions and links; `compute_R` is the seconds of one inner step.
        mesh: axes inside a region ("stage", "fsdp", "tensor") for the memory figures.
        width, vocab, microbatch_tokens, remat: for the activation estimate.
    """

    params: Sequence[Param]
    layers: int
    tokens: float
    tokens_per_step: float
    network: Network
    mesh: Mapping[str, int] = field(default_factory=dict)
    width: int = 0
    vocab: int = 0
    microbatch_tokens: int = 0
    remat: bool = True

    @property
    def step_s(self) -> float:
        """Give the mean compute seconds of one inner step in the slowest region."""
        return step_seconds(self.network)

    @property
    def steps(self) -> float:
        """Count the inner steps of the run."""
        return self.tokens / self.tokens_per_step

    def violations(self) -> list[str]:
        """List what cannot be planned, each with its fix."""
        found = []
        if self.layers < 1 or not self.params:
            found.append("the model has no layers or parameters: give both")
        for label in ("tokens", "tokens_per_step"):
            if not getattr(self, label) > 0:
                found.append(f"{label} is {getattr(self, label)}: use more than 0")
        bad = {axis: size for axis, size in self.mesh.items() if size < 1}
        if bad:
            found.append(f"mesh axes {bad}: use sizes of at least 1")
        return found


def decoder_workload(
    model: Decoder, network: Network, tokens: float, tokens_per_step: float, **fields
) -> Workload:
    """Build the workload of a decoder; further fields as in `Workload`."""
    fields.setdefault("width", model.width)
    fields.setdefault("vocab", model.vocab)
    return Workload(model.params(), model.layers, tokens, tokens_per_step, network, **fields)


@dataclass(frozen=True)
class PlanRow:
    """One method on one network. Bytes and rates are per region unless named otherwise.

    Attributes:
        method: what was planned.
        payload_bytes: one payload of the whole model.
        sent_bytes_per_period, sent_bytes_total: bytes one region sends.
        transfer_s: seconds of one whole exchange alone (T_s), constants included.
        utilisation, hours, tokens_per_s: of the whole run.
        speedup: hours of AllReduce (fp32 ring every step) / hours.
        scales, curve: utilisation at the network's bandwidth times each scale.
        needed_gbps: {utilisation: smallest bandwidth of the slowest link}, None = not within a
            factor 10,000.
        memory: per device.
        loss: expected loss, None outside the law's domain; loss_label says why.
        penalty_nats: published penalty of the setting beside H = 30, None = unknown.
        penalty_label: its confidence and source.
        warnings: what will not work, with the smallest change that would.
    """

    method: PlanMethod
    payload_bytes: float
    sent_bytes_per_period: float
    sent_bytes_total: float
    transfer_s: float
    utilisation: float
    hours: float
    tokens_per_s: float
    speedup: float
    scales: np.ndarray
    curve: np.ndarray
    needed_gbps: dict[float, float | None]
    memory: MemoryPlan
    loss: float | None
    loss_label: str
    penalty_nats: float | None
    penalty_label: str
    warnings: tuple[str, ...]


def dag_schedule(method: PlanMethod, layers: int) -> DagSchedule:
    """Give a method's sends as the layer-level model needs them."""
    if method.period == 1 and method.fragments == 1:
        return every_step(layers)
    if method.fragments == 1:
        return at_once(layers, method.period, method.tau_steps)
    return streaming(layers, method.period, method.fragments, method.tau_steps)


def exchange_seconds(method: PlanMethod, work: Workload) -> tuple[float, float]:
    """Give (volume, latency) in seconds of one exchange of the whole model; latency is per fragment
    sent.
    """
    nbytes = method.payload_bytes(work.params)
    latency = sync_seconds(work.network, 0.0, method.route)
    return sync_seconds(work.network, nbytes, method.route) - latency, latency


def utilisation_curve(method: PlanMethod, work: Workload, scales: np.ndarray) -> np.ndarray:
    """Give the utilisation at the network's bandwidth times each scale."""
    volume, latency = exchange_seconds(method, work)
    link_s = volume * method.critical / work.layers / scales
    return utilisation(work.layers, work.step_s, link_s, dag_schedule(method, work.layers), latency)


def plan(work: Workload, methods: Sequence[PlanMethod]) -> list[PlanRow]:
    """Plan methods on a workload.

    Returns:
        One row a method, in order.

    Raises:
        ValueError: all violations in one message.
    """
    found = work.violations()
    for method in methods:
        found += method.violations(work.layers)
    raise_all("plan", found)
    baseline = PlanMethod("allreduce")
    slow = float(utilisation_curve(baseline, work, np.ones(1))[0])
    return [_row(method, work, slow) for method in methods]


def _row(method: PlanMethod, work: Workload, baseline: float) -> PlanRow:
    volume, latency = exchange_seconds(method, work)
    curve = utilisation_curve(method, work, np.append(SCALES, 1.0))
    here = float(curve[-1])
    needed = smallest_bandwidth(curve[:-1], TARGETS, SCALES * work.network.slowest_gbps)
    payload = method.payload_bytes(work.params)
    sent = sent_bytes(method.route, payload, _members(method, work))
    compute_s = work.steps * work.step_s
    estimate, label = _loss(method, work)
    penalty = method.penalty()
    return PlanRow(
        method=method,
        payload_bytes=payload,
        sent_bytes_per_period=sent,
        sent_bytes_total=sent * work.steps / method.period,
        transfer_s=volume + latency,
        utilisation=here,
        hours=compute_s / here / 3600.0,
        tokens_per_s=work.tokens_per_step / work.step_s * here,
        speedup=here / baseline,
        scales=SCALES,
        curve=curve[:-1],
        needed_gbps=dict(zip(TARGETS, needed, strict=True)),
        memory=_memory(method, work, payload),
        loss=estimate.loss if estimate else None,
        loss_label=label,
        penalty_nats=penalty.nats,
        penalty_label=f"{penalty.confidence}: {penalty.source}",
        warnings=tuple(_warnings(method, work, payload)),
    )


def _members(method: PlanMethod, work: Workload) -> int:
    return min(2, work.network.size) if method.route == "pair" else work.network.size


def _warnings(method: PlanMethod, work: Workload, payload: float) -> list[str]:
    """Say what cannot work; a blocking method simply waits, and its utilisation says so."""
    if method.tau_steps == 0 and method.fragments == 1:
        return []
    return catch_up_violations(work.network, method.route, payload, method.period, method.name)


def _loss(method: PlanMethod, work: Workload) -> tuple[LossEstimate | None, str]:
    """Give the law's loss plus the setting's penalty, or the reasons for giving none."""
    size = param_count(work.params)
    replicas = None if method.period == 1 else work.network.size
    estimate = expected_loss(size, replicas, work.tokens, extrapolate=True)
    penalty = method.penalty()
    if not estimate.inside:
        return None, estimate.label.replace("extrapolated", "outside the law's domain")
    if penalty.nats is None:
        return None, f"unknown penalty: {penalty.source}"
    inside = LossEstimate(
        estimate.loss + penalty.nats, True, "inside domain + published penalty", estimate.source
    )
    return inside, inside.label


def _memory(method: PlanMethod, work: Workload, payload: float) -> MemoryPlan:
    devices = int(np.prod([size for size in work.mesh.values()])) if work.mesh else 1
    flying = payload / method.fragments / devices
    received = (
        sent_bytes("all_gather", 1.0, _members(method, work))
        if method.route in ("all_gather", "pair")
        else 1.0
    )
    extra = {"payload sent + received": int(np.ceil((1.0 + received) * flying))}
    if method.fragments > 1 and method.tau_steps > 0:
        share = param_count(work.params) * 4.0 / method.fragments / devices
        extra["snapshot in flight (estimate: equal fragments)"] = int(np.ceil(share))
    activations = activation_estimate(
        work.layers, work.width, work.vocab, work.microbatch_tokens, work.mesh, work.remat
    )
    return plan_memory(
        work.params, work.mesh, {**INNER_BYTES, **(method.state or {})}, extra, activations
    )
