"""Plans a run before anyone pays for it: bytes, utilisation, hours, memory and expected loss.

`plan` takes a `Workload` (model, tokens, network) and methods, and gives one `PlanRow` a method. It
raises one error that lists everything that cannot be planned.

Bytes and steps are those of a dry run (`dry_run`). The time model is the layer-level model of `dag`
on its payloads, with the link replaced by the collective that each takes on the given network. Its
latency and constants delay every arrival. Compute is the slowest region's mean step. Utilisations
are those of steady periods, without faults. `expected_loss` gives the loss that published figures
imply.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from lowcomm_jax.methods.base import Method
from lowcomm_jax.network.collectives import derive_tau, step_seconds, sync_seconds
from lowcomm_jax.network.links import Network
from lowcomm_jax.planner.dag import TARGETS, smallest_bandwidth, utilisation
from lowcomm_jax.planner.dry_run import Played, Rehearsal, Scenario, Sent, rehearse
from lowcomm_jax.planner.expected_loss import SOURCE, domain_reasons, law
from lowcomm_jax.planner.memory import MemoryPlan, activation_estimate
from lowcomm_jax.planner.methods import PlanMethod, planned
from lowcomm_jax.planner.requests import StoreRequests, learner_requests
from lowcomm_jax.planner.shapes import Shapes
from lowcomm_jax.refused import above_zero, refuse, whole
from lowcomm_jax.settings import described

SCALES = np.logspace(-3, 4, 176)  # bandwidth factors of the utilisation curve
AXES = ("stage", "fsdp", "tensor")


@described
@dataclass(frozen=True)
class Workload:
    """What is to be trained, and on what."""

    model: Annotated[Shapes, "abstract parameters and sizes"]
    tokens: Annotated[float, "training tokens over all regions"]
    tokens_per_step: Annotated[float, "tokens of one inner step over all regions"]
    network: Annotated[Network, "regions and links; `compute_R` is the seconds of one inner step"]
    mesh: Annotated[
        Mapping[str, int],
        "Sizes of the axes stage, fsdp and tensor inside a region, for the memory figures.",
    ] = field(default_factory=dict)
    microbatch_tokens: Annotated[
        int, "tokens of one microbatch on a device, for the estimate of activations"
    ] = 0
    remat: Annotated[
        bool, "whether each layer keeps its input alone, for the estimate of activations"
    ] = True
    scenario: Annotated[
        Scenario,
        "What a run would measure, and a plan has to assume. Besides, everyone takes part in each "
        "round and counts alike, and AdLoCo's trainers never merge and keep their first batch.",
    ] = field(default_factory=Scenario)

    @classmethod
    def of(
        cls,
        params: Any,
        network: Network,
        *,
        tokens: float,
        tokens_per_step: float,
        stacked: Sequence[str] = (),
        specs: Any = None,
        **others: Any,
    ) -> "Workload":
        """A workload of any model.

        Args:
            params: shapes of its parameters, such as `jax.eval_shape(model.init, rng)`.
            network, tokens, tokens_per_step, others: see the class.
            stacked: path prefixes of leaves with a leading axis of layers or experts; without a
                stack of layers the model has one, so that nothing hides within a step.
            specs: pytree of PartitionSpec inside a region; None = whole on every device.

        Raises:
            ValueError: the specs have another structure than the parameters.
        """
        leaves = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        if specs is not None and leaves[1] != jax.tree.structure(params):
            raise ValueError(
                "specs have another structure than the abstract parameters: give one spec for each "
                "leaf"
            )
        layout = None if specs is None else lambda mesh: (params, specs)
        model = Shapes.of(params, layout, stacked)
        return cls(model, tokens, tokens_per_step, network, **others)

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
        wrong = mesh_violations(self.mesh, self.model.layers)
        if not wrong and self.mesh.get("stage", 1) > 1 and not self.model.in_stages(self.mesh):
            wrong.append(
                f"mesh has {self.mesh['stage']} stages, and no specs say what a stage holds: give "
                "specs that name 'stage', or use stage=1"
            )
        return found + wrong


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
        played: its dry run.
        route: of its payloads.
        payload_bytes: of all payloads of one region in a period, anchors sent ahead included.
        sent_bytes_per_period: bytes that one region sends in a period.
        sent_bytes_total: bytes that one region sends in the run.
        transfer_s: seconds of a period's payloads one after the other, constants included.
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
        warnings: what makes the method wait, with the smallest change that ends it.
        requests: those of an independent learner to its store; None = the method has no store.
    """

    method: PlanMethod
    played: Played
    route: str
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
    warnings: tuple[str, ...]
    requests: StoreRequests | None = None


def plan(work: Workload, methods: Sequence[PlanMethod] | Mapping[str, Method]) -> list[PlanRow]:
    """Plan methods on a workload, without a device of it.

    Args:
        work: model, tokens and network (`Workload.of`).
        methods: rows; or any methods by name, one's own among them.

    Returns:
        One row a method, in order.

    Raises:
        Refused: everything that cannot be planned. Among it are overlapping methods that
            never catch up with the link, unless they are allowed to (`PlanMethod.stalls`).
    """
    if isinstance(methods, Mapping):
        methods = [PlanMethod(name, each) for name, each in methods.items()]
    found = work.violations()
    for method in methods:
        regions = work.network.size if isinstance(work.network, Network) else 2
        found += method.violations(work.model.layers, regions)
    refuse("cannot be planned", found)
    runs = [_derived(method, work) for method in methods]
    found = [line for run in runs for line in _overlap_violations(*run, work)]
    refuse("cannot be planned", found)
    baseline = planned("allreduce", stacked=work.model.stacked)
    slow = float(utilisation_curve(rehearsed(baseline, work).play(), work, np.ones(1))[0])
    return [_row(*run, work, slow) for run in runs]


# -- time --------------------------------------------------------------------------------------


def rehearsed(method: PlanMethod, work: Workload) -> Rehearsal:
    """The method on the workload's model and regions."""
    return rehearse(
        method.method,
        work.model.tree,
        work.network.size,
        stacked=work.model.stacked,
        scenario=work.scenario,
        network=work.network,
        inner=method.inner,
    )


def _derived(method: PlanMethod, work: Workload) -> tuple[PlanMethod, Played]:
    """The row and its dry run, with the overlap that hides its largest payload, if asked for."""
    if method.margin is None:
        return method, rehearsed(method, work).play()
    # Programs and payloads are the same at every overlap above 0.
    rehearsal = rehearsed(method.with_overlap(min(1, method.period - 1)), work)
    played = rehearsal.play()
    slowest = max(sum(exchange_seconds(sent, work)) for sent in played.sends)
    method = method.with_overlap(derive_tau(slowest, work.step_s, method.margin))
    if method.tau >= method.period:
        return method, played  # which is refused
    settled = rehearsal.programs.method.schedule
    return method, rehearsal.play(dataclasses.replace(settled, delay=method.tau))


def never_catches_up(method: PlanMethod, played: Played, work: Workload) -> list[str]:
    """One line where the bytes of an overlapping method's period, latency left out, take longer on
    the link than the period computes: it falls further behind with every period.

    A blocking method waits for the link instead, and its utilisation shows the wait.
    """
    volume = _a_period(played, method.period, lambda sent: exchange_seconds(sent, work)[0])
    room = method.period * work.step_s
    if method.tau == 0 or volume <= room:
        return []
    factor, gbps = volume / room, work.network.slowest_gbps
    return [
        f"{method.name}: the bytes of one period need {volume:.3g} s of link time but a period "
        f"computes only {room:.3g} s, so fragments never catch up: raise the bandwidth "
        f"x{factor:.3g} (slowest link {gbps:.3g} -> {gbps * factor:.3g} Gbit/s), or the period to "
        f"{math.ceil(method.period * factor - 1e-9)}, or compress x{factor:.3g} more"
    ]


def utilisation_curve(played: Played, work: Workload, scales: np.ndarray) -> np.ndarray:
    """Give the utilisation at the network's bandwidth times each scale."""

    def seconds(sent: Sent) -> tuple[np.ndarray, float]:
        volume, latency = exchange_seconds(sent, work)
        return volume / scales, latency

    layers = work.model.layers
    return utilisation(layers, work.step_s, played.sends, seconds, played.warm, played.steps)


def exchange_seconds(sent: Sent, work: Workload) -> tuple[float, float]:
    """Give (volume, latency) of a payload's exchange, in seconds."""
    latency = sync_seconds(work.network, 0, sent.route)
    return sync_seconds(work.network, sent.nbytes, sent.route) - latency, latency


def _a_period(played: Played, period: int, of: Any) -> float:
    """Sum over the payloads of a period."""
    counted = sum(of(s) for s in played.sends if played.warm < s.step <= played.steps)
    return counted * period / (played.steps - played.warm)


def store_requests(method: PlanMethod, played: Played, work: Workload) -> StoreRequests | None:
    """Give the requests of an independent learner to its store; None = no such method."""
    schedule = method.method.schedule
    if not schedule.by_rounds or schedule.most == 1:
        return None
    nbytes = _a_period(played, method.period, lambda sent: sent.nbytes) / method.fragments
    return learner_requests(work.network, nbytes, method.period, method.fragments, work.step_s)


def _overlap_violations(method: PlanMethod, played: Played, work: Workload) -> list[str]:
    if method.stalls:
        return []
    if method.tau >= method.period and not method.method.schedule.land_after_send:
        return [
            f"{method.name}: hiding a fragment takes tau = {method.tau}, not less than the period "
            f"of {method.period}: raise the period to {method.tau + 1}, or cut the model into "
            "more fragments"
        ]
    asked = store_requests(method, played, work)
    if asked is not None and asked.exchange_s > method.tau * work.step_s:
        steps = math.ceil(asked.exchange_s / work.step_s)
        return [
            f"{method.name}: writing, committing and fetching a fragment takes "
            f"{asked.exchange_s:.3g} s, and tau = {method.tau} hides "
            f"{method.tau * work.step_s:.3g} s: use tau >= {steps}; stalls=True plans later "
            "landings"
        ]
    behind = never_catches_up(method, played, work)
    return [f"{line}; stalls=True plans its waits" for line in behind]


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
    replicas = None if method.law == "data_parallel" else regions
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


def _row(method: PlanMethod, played: Played, work: Workload, baseline: float) -> PlanRow:
    curve = utilisation_curve(played, work, np.append(SCALES, 1.0))
    here = float(curve[-1])
    needed = smallest_bandwidth(curve[:-1], TARGETS, SCALES * work.network.slowest_gbps)
    penalty, period = method.penalty(), method.period
    return PlanRow(
        method=method,
        played=played,
        route=played.sends[0].route,
        payload_bytes=_a_period(played, period, lambda sent: sent.nbytes),
        sent_bytes_per_period=played.sent_a_step * period,
        sent_bytes_total=played.sent_a_step * work.steps,
        transfer_s=_a_period(played, period, lambda sent: sum(exchange_seconds(sent, work))),
        utilisation=here,
        hours=work.steps * work.step_s / here / 3600.0,
        tokens_per_s=work.tokens_per_step / work.step_s * here,
        speedup=here / baseline,
        scales=SCALES,
        curve=curve[:-1],
        needed_gbps=dict(zip(TARGETS, needed, strict=True)),
        memory=memory_plan(played, work),
        loss=expected_loss(method, work.model.size, work.network.size, work.tokens),
        penalty_nats=penalty.nats,
        warnings=tuple(never_catches_up(method, played, work)),
        requests=store_requests(method, played, work),
    )


def memory_plan(played: Played, work: Workload) -> MemoryPlan:
    """Give the bytes of one device, which has its share of parameters of state and payloads."""
    model = work.model
    held = model.held(work.mesh)
    share = held / model.size
    largest = max(sent.nbytes for sent in played.sends)
    others = {"all_gather": work.network.size - 1, "pair": 1}.get(played.sends[0].route, 1)
    payloads = max(played.flying, largest) * (1 + others)
    estimates = {"payloads sent and received": math.ceil(payloads * share)}
    if played.snapshots:
        estimates["snapshots in flight"] = math.ceil(4.0 * played.snapshots * share)
    if model.width:  # else they are unknown
        estimates["activations"] = activation_estimate(
            model.layers, model.width, model.vocab, work.microbatch_tokens, work.mesh, work.remat
        )
    return MemoryPlan({what: round(held * each) for what, each in played.kept.items()}, estimates)


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
