"""Plans a run before anyone pays for it: bytes, utilisation, hours, memory and expected loss.

`plan` takes a `Workload` (model, tokens, network) and methods, and gives one `PlanRow` a method. It
raises one error that lists everything that cannot be planned.

The time model is the layer-level model of `dag`, with the link replaced by the collective that the
method runs on the given network. The collective's volume is spread over the layers; its latency and
constants delay every arrival. Compute is the slowest region's mean step. Utilisations are those of
steady periods, without faults. `expected_loss` gives the loss that published figures imply.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lowcomm_jax.network.collectives import (
    catch_up_violations,
    derive_tau,
    step_seconds,
    sync_seconds,
)
from lowcomm_jax.network.links import Network
from lowcomm_jax.network.routes import sent_bytes
from lowcomm_jax.planner.dag import (
    TARGETS,
    DagSchedule,
    at_once,
    every_step,
    smallest_bandwidth,
    streaming,
    utilisation,
)
from lowcomm_jax.planner.expected_loss import SOURCE, domain_reasons, law
from lowcomm_jax.planner.memory import (
    INNER_BYTES,
    MemoryPlan,
    activation_estimate,
    held_elements,
    plan_memory,
)
from lowcomm_jax.planner.methods import AUTO, DATA_PARALLEL, PlanMethod, planned
from lowcomm_jax.planner.requests import StoreRequests, learner_requests
from lowcomm_jax.planner.shapes import Shapes
from lowcomm_jax.refused import above_zero, refuse, whole

SCALES = np.logspace(-3, 4, 176)  # bandwidth factors of the utilisation curve
AXES = ("stage", "fsdp", "tensor")


@dataclass(frozen=True)
class Workload:
    """What is to be trained, and on what.

    Attributes:
        model: abstract parameters and sizes.
        tokens: training tokens over all regions.
        tokens_per_step: tokens of one inner step over all regions.
        network: regions and links; `compute_R` is the seconds of one inner step.
        mesh: sizes of `AXES` inside a region, for the memory figures.
        microbatch_tokens: tokens of one microbatch on a device, for the estimate of activations.
        remat: whether each layer keeps its input alone, for the same estimate.
    """

    model: Shapes
    tokens: float
    tokens_per_step: float
    network: Network
    mesh: Mapping[str, int] = field(default_factory=dict)
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
        found = above_zero("tokens", self.tokens) + network_violations(self.network)
        found += above_zero("tokens_per_step", self.tokens_per_step)
        found += whole("microbatch_tokens", self.microbatch_tokens, 0)
        return found + mesh_violations(self.mesh, self.model.layers)


@dataclass(frozen=True)
class ExpectedLoss:
    """Evaluation losses in nats per token; None = unknown, and the label says why.

    Attributes:
        law: the scaling law's figure for exactly this setting.
        law_label: where that is from, or why it is unknown.
        total: the law's figure for its own setting (H = 30, dense, no overlap), plus the published
            penalty of what differs from that setting.
        total_label: where that is from, or why it is unknown.
    """

    law: float | None
    law_label: str
    total: float | None
    total_label: str


@dataclass(frozen=True)
class PlanRow:
    """One method on one network. Bytes and rates are per region unless named otherwise.

    Attributes:
        method: what was planned; its tau is a number.
        payload_bytes: one payload of the whole model.
        sent_bytes_per_period: bytes that one region sends in a period.
        sent_bytes_total: bytes that one region sends in the run.
        transfer_s: seconds of one whole exchange alone (T_s), constants included.
        utilisation: share of the run's time in which the slowest region computes.
        hours: of the whole run.
        tokens_per_s: tokens of all regions together, a second.
        speedup: hours of AllReduce (fp32, two-shot, every step) over hours of this method.
        scales: factors of the network's bandwidth.
        curve: utilisation at each of them.
        needed_gbps: {utilisation: smallest bandwidth of the slowest link}, None = not within a
            factor 10,000.
        memory: bytes of one device.
        loss: expected loss, by the law alone and with penalties.
        penalty_nats: published penalty of the setting beside H = 30, None = unknown.
        penalty_label: confidence and source of the penalty.
        warnings: what makes the method wait, with the smallest change that ends it.
        requests: those of an independent learner to its store; None = the method has no store.
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
    loss: ExpectedLoss
    penalty_nats: float | None
    penalty_label: str
    warnings: tuple[str, ...]
    requests: StoreRequests | None = None


def plan(work: Workload, methods: Sequence[PlanMethod]) -> list[PlanRow]:
    """Plan methods on a workload.

    Returns:
        One row a method, in order.

    Raises:
        Refused: everything that cannot be planned. Among it are overlapping methods that
            never catch up with the link, unless they are allowed to (`PlanMethod.stalls`).
    """
    found = work.violations()
    for method in methods:
        found += method.violations(work.model.layers)
    refuse("cannot be planned", found)
    methods = [with_derived_tau(method, work) for method in methods]
    found = [line for method in methods for line in _overlap_violations(method, work)]
    refuse("cannot be planned", found)
    slow = float(utilisation_curve(planned("allreduce"), work, np.ones(1))[0])
    return [_row(method, work, slow) for method in methods]


# -- time --------------------------------------------------------------------------------------


def with_derived_tau(method: PlanMethod, work: Workload) -> PlanMethod:
    """Put the number of steps that hide the largest fragment's transfer in the place of "auto"."""
    if method.tau != AUTO:
        return method
    layers = work.model.layers
    volume, latency = exchange_seconds(method, work)
    largest = math.ceil(layers / method.fragments) / layers
    transfer = volume * method.critical * largest + latency
    return replace(method, tau=derive_tau(transfer, work.step_s, method.margin))


def never_catches_up(method: PlanMethod, work: Workload) -> list[str]:
    """One line where an overlapping method falls further behind its link with every period.

    A blocking method waits for the link instead, and its utilisation shows the wait.
    """
    if method.tau_steps == 0:
        return []
    volume, _ = exchange_seconds(method, work)
    return catch_up_violations(work.network, volume, method.period, method.name)


def utilisation_curve(method: PlanMethod, work: Workload, scales: np.ndarray) -> np.ndarray:
    """Give the utilisation at the network's bandwidth times each scale."""
    volume, latency = exchange_seconds(method, work)
    layers = work.model.layers
    link_s = volume * method.critical / layers / scales
    return utilisation(layers, work.step_s, link_s, dag_schedule(method, layers), latency)


def exchange_seconds(method: PlanMethod, work: Workload) -> tuple[float, float]:
    """Give (volume, latency) of one exchange, in seconds.

    Volume is that of the whole model; latency comes on top for every fragment sent.
    """
    nbytes = method.payload_bytes(work.model.params)
    latency = _seconds(work.network, 0.0, method.travels)
    return _seconds(work.network, nbytes, method.travels) - latency, latency


@functools.lru_cache(maxsize=1024)
def _seconds(network: Network, nbytes: float, route: str) -> float:
    """`sync_seconds`, cached, since a search asks for the same exchange many times."""
    return sync_seconds(network, nbytes, route)


def dag_schedule(method: PlanMethod, layers: int) -> DagSchedule:
    """Give a method's sends as the layer-level model needs them."""
    if method.period == 1 and method.fragments == 1:
        return every_step(layers)
    if method.fragments == 1:
        return at_once(layers, method.period, method.tau_steps)
    return streaming(layers, method.period, method.fragments, method.tau_steps)


def store_requests(method: PlanMethod, work: Workload) -> StoreRequests | None:
    """Give the requests of an independent learner to its store; None = no such method."""
    if not method.learners:
        return None
    nbytes = method.payload_bytes(work.model.params) / method.fragments
    return learner_requests(work.network, nbytes, method.period, method.fragments, work.step_s)


def _overlap_violations(method: PlanMethod, work: Workload) -> list[str]:
    if method.stalls:
        return []
    if (
        asked := store_requests(method, work)
    ) and asked.exchange_s > method.tau_steps * work.step_s:
        steps = math.ceil(asked.exchange_s / work.step_s)
        return [
            f"{method.name}: writing, committing and fetching a fragment takes "
            f"{asked.exchange_s:.3g} s, and tau = {method.tau_steps} hides "
            f"{method.tau_steps * work.step_s:.3g} s: use tau >= {steps}; stalls=True plans later "
            "landings"
        ]
    behind = [f"{line}; stalls=True plans its waits" for line in never_catches_up(method, work)]
    if behind or method.tau_steps <= method.period:
        return behind
    steps = method.tau_steps
    return [
        f"{method.name}: hiding a fragment takes tau = {steps}, more than the period of "
        f"{method.period}: raise the period to {steps}, or cut the model into more fragments"
    ]


# -- expected loss -----------------------------------------------------------------------------


def expected_loss(method: PlanMethod, params: float, regions: int, tokens: float) -> ExpectedLoss:
    """Give the loss that published figures imply; unknown outside their domain.

    Args:
        method: what is planned.
        params: parameters of the model.
        regions: replicas M.
        tokens: training tokens over all regions.
    """
    if method.law is None:
        unknown = f"unknown: no scaling law is published for {method.name}"
        return ExpectedLoss(None, unknown, None, unknown)
    replicas = None if method.law == DATA_PARALLEL else regions
    outside = domain_reasons(params, replicas, tokens)
    own = domain_reasons(params, replicas, tokens, method.period) + _differences(method)
    figure, penalty = law(params, replicas), method.penalty()
    by_law, with_penalty = None, None
    law_label = "unknown: " + "; ".join(own)
    if not own:
        by_law, law_label = figure, f"inside the domain of {SOURCE}"
    if outside:
        total_label = "unknown: outside the law's domain: " + "; ".join(outside)
    elif penalty.nats is None:
        total_label = f"unknown penalty: {penalty.source}"
    else:
        with_penalty = figure + penalty.nats
        total_label = f"{SOURCE} + penalty ({penalty.confidence}: {penalty.source})"
    return ExpectedLoss(by_law, law_label, with_penalty, total_label)


def _differences(method: PlanMethod) -> list[str]:
    """List what sets a method apart from the runs the law was fitted to, the period aside."""
    settings = (
        ("codec", method.codec, "fp32"),
        ("fragments", method.fragments, 1),
        ("tau", method.tau, 0),
    )
    return [f"{name} = {is_}: the law covers {was}" for name, is_, was in settings if is_ != was]


# -- one row -----------------------------------------------------------------------------------


def _row(method: PlanMethod, work: Workload, baseline: float) -> PlanRow:
    volume, latency = exchange_seconds(method, work)
    curve = utilisation_curve(method, work, np.append(SCALES, 1.0))
    here = float(curve[-1])
    needed = smallest_bandwidth(curve[:-1], TARGETS, SCALES * work.network.slowest_gbps)
    payload = method.payload_bytes(work.model.params)
    sent = sent_bytes(method.travels, payload, _members(method, work))
    compute_s = work.steps * work.step_s
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
        loss=expected_loss(method, work.model.size, work.network.size, work.tokens),
        penalty_nats=penalty.nats,
        penalty_label=f"{penalty.confidence}: {penalty.source}",
        warnings=tuple(never_catches_up(method, work)),
        requests=store_requests(method, work),
    )


def _members(method: PlanMethod, work: Workload) -> int:
    return 2 if method.travels == "pair" else work.network.size


def _memory(method: PlanMethod, work: Workload, payload: float) -> MemoryPlan:
    """Bytes of one device. Of payloads in flight it has the share that it has of the state."""
    held = held_elements(work.model.params, work.mesh)
    share = max(held) / work.model.size
    flying = 1
    if method.fragments > 1:
        flying = max(1, math.ceil(method.tau_steps * method.fragments / method.period))
    part = min(flying, method.fragments) / method.fragments * share
    received = 1.0
    if method.travels in ("all_gather", "pair"):
        received = sent_bytes(method.travels, 1.0, _members(method, work))
    estimates = {"payloads sent and received": math.ceil((1.0 + received) * payload * part)}
    state = {**INNER_BYTES, **(method.state or {})}
    if 0 < method.tau_steps < method.period:
        if method.fragments == 1:
            state["snapshot in flight"] = 4.0
        else:
            estimates["snapshots in flight"] = math.ceil(4.0 * work.model.size * part)
    model = work.model
    estimates["activations"] = activation_estimate(
        model.layers, model.width, model.vocab, work.microbatch_tokens, work.mesh, work.remat
    )
    return plan_memory(held, state, estimates)


# -- what cannot be planned --------------------------------------------------------------------


def network_violations(network: Network) -> list[str]:
    """Refuse a network on which nothing travels."""
    if network.size > 1:
        return []
    return [f"network {network.name!r} has one region: a plan needs at least two"]


def mesh_violations(mesh: Any, layers: int) -> list[str]:
    """List what is wrong with a region's mesh for a model of so many layers, each with its fix."""
    if not isinstance(mesh, Mapping):
        return [f"mesh is {mesh!r}: use {{axis: size}} with axes out of {', '.join(AXES)}"]
    found = [
        f"mesh axis {axis!r} is unknown: use {', '.join(AXES)}" for axis in mesh if axis not in AXES
    ]
    bad = [line for axis, size in mesh.items() for line in whole(f"mesh.{axis}", size)]
    stages = mesh.get("stage", 1)
    if not bad and stages > layers:
        found.append(f"mesh.stage is {stages}: a model of {layers} layers fills {layers} at most")
    return found + bad
