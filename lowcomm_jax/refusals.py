"""The table of refusals: settings of an engine that cannot work together, each with its fix.

A row reads a `Setup` and names answers of the method (what travels, what anchors there are), never
a method. In its text `{s.block}` is a setting, and `{m.name}` an answer of the method. Rules,
codecs and schedules list what is wrong with their own numbers; rows take these lines over.
`problems` gives everything that is wrong at once; `Engine`, `AdaptiveEngine` and the commands call
it before any work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, get_args

import jax
import numpy as np
import optax

from lowcomm_jax.channels.source import PARAMS
from lowcomm_jax.compression import Codec
from lowcomm_jax.compression.base import Wrapper
from lowcomm_jax.compression.ef21 import averages_senders
from lowcomm_jax.compression.two_shot import per_tensor
from lowcomm_jax.exchange import GroupExchange, MeshExchange
from lowcomm_jax.mesh.regions import AXES, slice_of
from lowcomm_jax.methods.base import per_fragment
from lowcomm_jax.params.fragments import Pattern
from lowcomm_jax.refused import Problem, Row, collect, found_by, is_number, is_whole, refuse
from lowcomm_jax.rules.batching import BatchPolicy
from lowcomm_jax.rules.merge import Merge, Reads
from lowcomm_jax.settings import FROM_1, misfits
from lowcomm_jax.setup import Setup
from lowcomm_jax.sync.part_checks import call_problems

TITLE = "these settings cannot work"


def problems(setup: Setup, unknown: Collection[str] = ()) -> list[Problem]:
    """Everything that is wrong with these settings, each thing once.

    Args:
      unknown: settings that are not known yet, or whose problems were told elsewhere: no row reads
        them.
    """
    found = misfits(setup, unknown)
    unusable = {*unknown, *(problem.about for problem in found)}
    return found + found_by(ROWS, setup, unusable, ("method",), s=setup, m=setup.method)


def refuse_setup(setup: Setup) -> None:
    """Refuse settings that cannot work.

    Raises:
      Refused: with every problem.
    """
    refuse(TITLE, [problem.text for problem in problems(setup)])


# -- conditions that are longer than a row --------------------------------------------------------


def _network(s: Setup) -> list[str]:
    found: list[str] = []
    collect(found, "network: ", lambda: s.links)
    return found


def _idle_processes(s: Setup) -> str | None:
    """Processes of the program without a device of the mesh.

    Every process runs every program, and cannot run one on a mesh without its own devices.
    """
    devices = list(s.placed.mesh.devices.flat)
    idle = set(range(jax.process_count())) - {d.process_index for d in devices}
    absent = not set(devices) <= set(jax.devices())  # (`aot`)
    return None if absent or not idle else f"processes {sorted(idle)}"


def _slices_of_a_region(s: Setup) -> int | None:
    """Slices of the mesh, where a region would span several."""
    devices_Rx = s.placed.mesh.devices.reshape(s.placed.mesh.devices.shape[0], -1)
    spans = any(len({slice_of(d) for d in row}) > 1 for row in devices_Rx)
    return len({slice_of(d) for d in devices_Rx.flat}) if spans else None


def _misfit_weights(s: Setup) -> bool:
    if isinstance(s.weights, str):
        return s.weights not in ("equal", "tokens")
    try:
        given = np.asarray(s.weights, np.float64)
    except (TypeError, ValueError):
        return True
    fits = given.shape == (s.regions,) and np.isfinite(given).all() and (given >= 0).all()
    return not (fits and given.sum() > 0)


def _idle_weights(s: Setup) -> str | None:
    """What to use where the weights differ, and each arrival is applied by itself."""
    if s.method.base != "received" or _misfit_weights(s):
        return None
    two_levels = s.method.servers is not None  # then 0 counts like any other number
    fix = "'equal'" if two_levels else "'equal', or 0 for regions that do not count"
    if isinstance(s.weights, str):
        return fix if s.weights != "equal" else None
    weights = np.asarray(s.weights, np.float64)
    return fix if np.unique(weights[two_levels | (weights > 0)]).size > 1 else None


def _unfit_pattern(s: Setup) -> bool:
    pattern = s.method.pattern
    if isinstance(pattern, str):
        return pattern not in get_args(Pattern)
    several = isinstance(pattern, Sequence | np.ndarray)
    return not (several and all(isinstance(each, str | re.Pattern) for each in pattern))


def _codec(s: Setup) -> Codec | None:
    return None if _wrapped_leaf_codec(s) else s.method.codec


def _wrapped_personal(s: Setup) -> str | None:
    """The name of a personal codec inside another one."""
    codec = s.method.codec
    while isinstance(codec, Wrapper):
        codec = codec.codec
        if isinstance(codec, Codec) and codec.personal:
            return codec.name
    return None


def _wrapped_leaf_codec(s: Setup) -> str | None:
    """The type of what a wrapper holds that is no `Codec`."""
    codec = s.method.codec
    while isinstance(codec, Wrapper):
        codec = codec.codec
    return None if isinstance(codec, Codec | None) else type(codec).__name__


def _increments(s: Setup) -> bool:
    codec = _codec(s)
    return codec is not None and codec.increments


def _misplaced_personal_codec(s: Setup) -> bool:
    m, codec = s.method, _codec(s)
    own_anchors = m.anchors == "per_region" and m.signal == "progress"
    fits = own_anchors and not m.schedule.land_after_send and m.topology is None
    return codec is not None and codec.personal and not fits


def _servers_codec(s: Setup) -> Codec | None:
    return None if s.method.servers is None else s.method.servers.codec


def _is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def _reduces(codec: Codec | None) -> bool:
    part = None if codec is None else per_tensor(codec)
    return part is not None and part.reduce == "two_shot"


def _rules(s: Setup) -> tuple[tuple[str, Any], ...]:
    return ("outer", s.method.outer), ("landing", s.method.landing)


def _miscounted_rules(s: Setup) -> list[str]:
    k = s.method.schedule.fragments
    return [
        f"{name}: {len(rules)} rules for {k} fragments; give one, or one per fragment"
        for name, rules in _rules(s)
        if per_fragment(rules) and len(rules) != k
    ]


def _no_transforms(s: Setup) -> list[str]:
    return [
        f"{name}={rule!r}: give an Optax transform, a tuple of one per fragment, or None"
        for name, rules in _rules(s)
        for rule in (rules if per_fragment(rules) else (rules,))
        if not (rule is None or isinstance(rule, optax.GradientTransformation))
    ]


def _no_outer_rule(s: Setup) -> bool:
    m = s.method
    moves = m.signal == "progress" and m.has_anchor and not m.problems
    return moves and (m.outer is None or (per_fragment(m.outer) and None in m.outer))


def _needing_one_mean(s: Setup) -> list[str]:
    m = s.method
    one_mean = m.anchors == "shared" and m.signal == "progress"
    given = {"merge": m.merge, "hands_out": m.hands_out}
    return [name for name, value in given.items() if value is not None and not one_mean]


def _unmet(needs: dict[str, bool]) -> list[str]:
    return [need for need, met in needs.items() if not met]


def _unmet_by_servers(s: Setup) -> list[str]:
    m = s.method
    needs = {
        "schedule.TwoLevels": m.schedule.local_servers,
        "base='received'": m.base == "received",
        "the mean (merge=None)": m.merge is None,
        "no landing rule": m.landing is None,
    }
    return [] if m.servers is None else _unmet(needs)


def _unmet_by_roles(s: Setup) -> list[str]:
    m = s.method
    needs = {
        "signal='progress'": m.signal == "progress",
        "a main exchange (not schedule.Never)": m.has_anchor,
        "anchors='shared', topology=None": m.anchors == "shared" and m.topology is None,
        "base='anchor'": m.base == "anchor",
        "a schedule whose regions copy no peer": not m.schedule.copies,
        "a dense payload (codec=None)": m.codec is None,
        "the mean (merge=None)": m.merge is None,
        "no channels": not m.channels,
        "a fixed batch and one trainer (no inner_batching, no trainers)": not m.adapts,
    }
    return [] if m.roles is None else _unmet(needs)


def _lands_at_once(s: Setup) -> bool:
    """Whether a round by several regions at paces of their own is to land where it is sent."""
    schedule = s.method.schedule
    delay, *others = np.ravel(np.asarray(schedule.delay, object)).tolist() or [None]
    several = schedule.by_rounds and schedule.most != 1
    return several and not others and is_whole(delay) and delay < 1


def _unmet_by_gossip(s: Setup) -> list[str]:
    m, delays = s.method, np.ravel(np.asarray(s.method.schedule.delay, object))
    needs = {
        "anchors='per_region'": m.anchors == "per_region",
        "base='anchor'": m.base == "anchor",
        "signal='progress'": m.signal == "progress",
        "a schedule that lands first": not m.schedule.land_after_send,
        "a schedule that reads no change rates": m.schedule.statistic == "none",
        "one overlap for all regions": all(each == delays[0] for each in delays),
    }
    return [] if m.topology is None else _unmet(needs)


def _compiles_for_hours(s: Setup) -> list[str]:
    """Partitions of gossip in a program of too many permutes."""
    m = s.method
    if m.topology is None or m.topology.violations(s.regions) or s.regions % s.placed.slots:
        return []
    return GroupExchange(MeshExchange(s.everyone), m.topology).violations()


def _unfit_for_channels(s: Setup) -> list[str]:
    """What does not go with channels, with its fix."""
    m = s.method
    late = any(c.delay and c.source == PARAMS for c in m.channels)
    unfit = {
        "gossiping regions never meet all; leave topology out": m.topology is not None,
        "regions that exchange gradients are equal; use signal='progress'": m.signal == "gradient",
        "regions at a pace of their own make no step at times; use another schedule": (
            m.schedule.uneven
        ),
        "batches that grow and trainers are not supported; leave them out": m.adapts,
        "with several fragments an anchor would make part of a late payload stale; use one, or a "
        "delay of 0": late and m.schedule.fragments > 1,
    }
    return [what for what, has in unfit.items() if has and m.channels]


def _repeated_channels(s: Setup) -> list[str]:
    found = []
    for what in ("name", "source"):
        values = [getattr(channel, what) for channel in s.method.channels]
        found += [
            f"channels: {what}={value!r} stands in {values.count(value)} of them; give each its own"
            for value in dict.fromkeys(values)
            if values.count(value) > 1
        ]
    return found


def _unused_without_sends(s: Setup) -> list[str]:
    m = s.method
    given = {"landing": m.landing, "codec": m.codec, "outer": m.outer}
    unused = [name for name, value in given.items() if value is not None]
    return unused if m.channels and not m.has_anchor else []


def _batch_policy(s: Setup) -> list[str]:
    policy = s.method.inner_batching
    return policy.violations() if isinstance(policy, BatchPolicy) else []


def _no_batch_policy(s: Setup) -> str | None:
    """The fix where an `AdaptiveEngine` is to run a method without a batch policy."""
    if not s.adaptive or s.method.inner_batching is not None:
        return None
    if s.method.trainers is not None:
        return "trainers need a batch policy, too: give inner_batching, as batching.Fixed(b)"
    return "give inner_batching, a policy of lowcomm_jax.batching, or use lc.Engine"


def _below_start(s: Setup) -> int | None:
    """The policy's first batch, where no microbatch may be as large."""
    if not s.adaptive:
        return None
    policy, most = s.method.inner_batching, s.largest_microbatch
    if most is None or not isinstance(policy, BatchPolicy) or policy.violations():
        return None
    return policy.start if most < policy.start else None


def _in_flight_at_merges(s: Setup) -> bool:
    several = s.method.trainer_count != 1
    return s.method.adapts and several and bool(np.any(np.asarray(s.method.schedule.delay) != 0))


def _routed(loss_fn: Any) -> bool:
    return getattr(getattr(loss_fn, "__self__", None), "routed", False)


# Between jobs.


def _no_cpu(s: Setup) -> bool:
    """Whether nothing averages payloads beside the training."""
    if not (s.separate and s.regions > 2 and s.method.reduces_all):
        return False
    try:
        return not jax.local_devices(backend="cpu")
    except RuntimeError:
        return True


def _own_order(s: Setup) -> bool:
    schedule = s.method.schedule
    one_by_one = s.method.base == "received"
    return not schedule.local_servers and (schedule.most == 1) != one_by_one


def _simulated_pace(s: Setup) -> bool:
    schedule = s.method.schedule
    known = schedule.by_rounds or schedule.local_servers
    return schedule.uneven and not known and not _own_order(s)


def _parting_trainers(s: Setup) -> bool:
    """Whether regions could not decide alike on batches and merges."""
    m, schedule = s.method, s.method.schedule
    at_once = not np.any(np.asarray(schedule.delay, object)) and not schedule.land_after_send
    plain = schedule.fragments == 1 and at_once and not schedule.header_floats()
    own = m.topology is not None or m.anchors != "shared" or m.base == "received"
    return m.adapts and (not plain or own or schedule.uneven)


def _simulated_settings(s: Setup) -> list[str]:
    schedule = s.method.schedule
    given = {name: getattr(schedule, name) for name in schedule.simulated}
    return [f"{name}={value}" for name, value in given.items() if value]


# -- the table ------------------------------------------------------------------------------------

ON_A_MESH = (
    Row(
        "mesh",
        lambda s: s.mesh is not None and tuple(s.mesh.axis_names) != AXES,
        "mesh axes {s.mesh.axis_names}: use lowcomm_jax.make_mesh " + f"({AXES})",
    ),
    Row(
        "regions mesh exchange",
        lambda s: s.regions % s.placed.slots and math.gcd(s.regions, s.placed.slots),
        "regions={s.regions} does not divide over {s.placed.slots} region slots of the mesh: use a "
        "region axis of {wrong} (mesh.region={wrong})",
    ),
    Row(
        "mesh regions exchange",
        _idle_processes,
        "the mesh of {s.placed.mesh.size} devices has none of {wrong}: use all devices "
        "(mesh.fsdp=0), or start fewer processes",
    ),
    Row(
        "regions mesh exchange",
        _slices_of_a_region,
        "regions={s.regions}: a region of this mesh would span several of the {wrong} slices, and "
        "exchange inside it over the network between them: use a multiple of {wrong} regions, and "
        "mesh.region={wrong} or a multiple",
    ),
    Row("network", _network),
    Row(
        "network regions",
        lambda s: s.links is not None and len(s.links.regions) != s.regions,
        "network has {s.links.size} regions, the engine {s.regions}: make them equal",
    ),
    Row(
        "method network",
        lambda s: s.method.schedule.needs_network and s.network is None,
        "gamma without T_c and T_s: give both (step_seconds, sync_seconds), or measured=True, or a "
        "network",
    ),
    Row(
        "concurrent_exchange method mesh regions exchange",
        lambda s: s.concurrent_exchange and s.why_not_concurrent,
        "concurrent_exchange: {wrong}; leave it out",
    ),
    Row(
        "offload method",
        lambda s: s.offload and s.method.signal == "gradient",
        "offload: {m.name} needs its anchor at every step; leave it out",
    ),
    Row(
        "offload method",
        lambda s: s.offload and s.method.servers is not None,
        "offload: the servers of {m.name} stay on the devices; leave it out",
    ),
    Row(
        "offload",
        lambda s: s.offload and jax.process_count() > 1,
        "offload: not with several processes; leave it out",
    ),
    Row(
        "hops loss_fn",
        lambda s: s.hops is None and _routed(s.loss_fn),
        "hops is missing: this loss_fn moves values between regions; give Pipeline.hops",
    ),
    Row(
        "hops exchange",
        lambda s: s.hops is not None and s.separate,
        "hops: paths lead through one program; use exchange='mesh', or do not route",
    ),
    Row(
        "hops mesh regions exchange",
        lambda s: s.hops is not None and not s.separate and s.regions != s.placed.slots,
        "hops: {s.regions} regions on {s.placed.slots} slots of the mesh; paths lead from slot to "
        "slot: use a region axis of {s.regions} (mesh.region={s.regions})",
    ),
    Row(
        "hops method",
        lambda s: s.hops is not None and s.method.signal == "gradient",
        "hops: the regions of {m.name} are equal, paths would mix nothing; leave it out",
    ),
    Row(
        "hops method",
        lambda s: s.hops is not None and s.method.schedule.uneven,
        "hops: regions of {m.name} stand still at times, and paths lead through all; leave it out, "
        "or use another method",
    ),
)

WEIGHTS_AND_GUARDS = (
    Row(
        "weights regions",
        _misfit_weights,
        "weights={s.weights!r}: use 'equal', 'tokens' or {s.regions} numbers >= 0, one of them "
        "positive",
    ),
    Row(
        "weights method",
        lambda s: _increments(s) and not (isinstance(s.weights, str) and s.weights == "equal"),
        "weights={s.weights!r}: codec {m.codec.name} keeps a running mean of equal regions; use "
        "weights='equal', or error_feedback",
    ),
    Row(
        "weights method regions",
        _idle_weights,
        "weights={s.weights!r}: {m.name} applies every arrival by itself, whatever its weight; use "
        "{wrong}",
    ),
    Row(
        "weights method",
        lambda s: s.method.channels and isinstance(s.weights, str) and s.weights == "tokens",
        "weights='tokens': channels average by fixed weights; use 'equal', or a number a region",
    ),
    Row(
        "outlier_factor method",
        lambda s: s.outlier_factor is not None and s.method.base == "received",
        "outlier_factor={s.outlier_factor}: {m.name} applies every arrival by itself, and no "
        "median is known; leave it out",
    ),
    Row(
        "outlier_factor method",
        lambda s: s.outlier_factor is not None and s.method.topology is not None,
        "outlier_factor={s.outlier_factor}: gossiping regions do not know the median over all of "
        "them; leave it out",
    ),
    Row(
        "max_update_norm method",
        lambda s: s.max_update_norm is not None and (s.method.servers or not s.method.has_anchor),
        "max_update_norm={s.max_update_norm}: {m.name} has no outer update that is clipped; leave "
        "it out",
    ),
)

OF_THE_METHOD = (
    Row("method", lambda s: list(s.method.problems)),
    Row("method regions", lambda s: s.method.schedule.violations(s.regions)),
    Row(
        "method",
        lambda s: s.method.rest not in ("own", "dealt"),
        "rest={m.rest!r}: use own, dealt",
    ),
    Row(
        "method",
        _unfit_pattern,
        "pattern={m.pattern!r}: use "
        + ", ".join(get_args(Pattern))
        + ", or a regular expression for each fragment",
    ),
    # What travels.
    Row(
        "method",
        _wrapped_leaf_codec,
        "codec: what it wraps codes leaves, not trees: put compression.PerTensor around {wrong}",
    ),
    Row(
        "method",
        _wrapped_personal,
        "codec {m.codec.name} wraps {wrong}, which changes the mean by its own state: use that as "
        "it is",
    ),
    Row(
        "method",
        _misplaced_personal_codec,
        "codec {m.codec.name} needs anchors='per_region', signal='progress' and a landing before "
        "the next send; use another codec with {m.name}",
    ),
    Row(
        "method",
        lambda s: _increments(s) and not s.method.reduces_all and s.method.merge is None,
        "codec {m.codec.name} sends changes of a mean over all regions, which needs one anchor and "
        "one mean of all of them; use error_feedback",
    ),
    Row(
        "method",
        lambda s: _increments(s) and s.method.reduces_all and averages_senders(s.method.codec),
        "codec {m.codec.name} sends changes of a mean over all regions, and averages over senders: "
        "give the codec in it mean='regions'",
    ),
    Row(
        "method",
        lambda s: s.method.signal == "gradient" and _codec(s) and _codec(s).reads_params,
        "codec {m.codec.name} compares what is sent with the weights, and gradients are no change "
        "of them yet; use another codec with {m.name}",
    ),
    Row(
        "method",
        lambda s: _reduces(_codec(s)) and not s.method.reduces_all,
        "codec.reduce='two_shot': {m.name} needs the payloads themselves, not only their mean; use "
        "all_gather, or leave it out",
    ),
    # Rules.
    Row("method", _miscounted_rules),
    Row("method", _no_transforms),
    Row(
        "method",
        _no_outer_rule,
        "outer=None: with signal='progress' an outer rule moves the anchor; give one, as "
        "lowcomm_jax.outer.average(), for every fragment",
    ),
    Row(
        "method",
        _needing_one_mean,
        "{wrong}: needs anchors='shared' and signal='progress', where one direction moves one "
        "anchor",
    ),
    Row(
        "method",
        lambda s: s.method.rules_differ and s.method.signal == "gradient",
        "outer: with signal='gradient' there is one rule for all parameters; give one",
    ),
    Row("method", lambda s: s.method.merge is not None and s.method.merge.violations()),
    Row(
        "method",
        lambda s: s.method.reads not in get_args(Reads),
        "merge: it reads {m.reads!r}: use reads = 'payloads', 'norms' or 'mean'",
    ),
    Row(
        "method",
        lambda s: (
            s.method.merge is not None
            and (type(s.method.merge).weigh is not Merge.weigh) != (s.method.reads == "norms")
        ),
        "merge: it reads {m.reads}: reads = 'norms' and `weigh` go together; give both or neither",
    ),
    Row(
        "method",
        lambda s: s.method.merge is not None and _increments(s),
        "merge: codec {m.codec.name} sends changes of a mean, and no payload that a merge rule "
        "could read; leave merge or the codec out",
    ),
    Row(
        "method",
        lambda s: s.method.reads != "mean" and s.method.schedule.energy is not None,
        "merge: the rank is measured of a mean that is reduced on the way, and this rule reads "
        "{m.reads}; leave the schedule's energy (adaptive) or the rule out",
    ),
    # Servers, groups, channels.
    Row("method", _unmet_by_servers, "servers: two levels need {wrong}"),
    Row("method", lambda s: s.method.servers is not None and list(s.method.servers.problems)),
    Row(
        "method",
        lambda s: s.method.servers is not None and not _is_share(s.method.servers.blend),
        "blend={m.servers.blend!r}: the weight of the global model lies in [0, 1]",
    ),
    Row(
        "method",
        lambda s: (codec := _servers_codec(s)) is not None and (codec.increments or codec.personal),
        "global_codec {m.servers.codec.name}: a server's update is applied by itself, and no mean "
        "is kept; use error_feedback",
    ),
    Row(
        "method",
        lambda s: _reduces(_servers_codec(s)),
        "global_codec.reduce='two_shot': nothing is reduced there; leave it out",
    ),
    Row(
        "method regions",
        lambda s: s.method.roles is not None and s.method.roles.violations(s.regions),
    ),
    Row("method", _unmet_by_roles, "roles that differ by region need {wrong}"),
    Row("method", _unmet_by_gossip, "topology={m.topology}: gossip needs {wrong}"),
    Row(
        "method regions",
        lambda s: s.method.topology is not None and s.method.topology.violations(s.regions),
    ),
    Row("method regions mesh exchange", _compiles_for_hours),
    Row(
        "method",
        lambda s: not (s.method.channels or s.method.has_anchor),
        "schedule: it never sends, and there are no channels: nothing is exchanged; add one",
    ),
    Row("method", lambda s: [line for c in s.method.channels for line in c.violations()]),
    Row("method", _repeated_channels),
    Row("method", _unfit_for_channels, "channels: {wrong}"),
    Row(
        "method",
        _unused_without_sends,
        "{wrong}: {m.name} has no main exchange, so it would have no effect; leave it out",
    ),
    # Batches that grow, and trainers.
    Row("method", lambda s: s.method.trainers is not None and s.method.trainers.violations()),
    Row("method", _batch_policy),
    Row(
        "method",
        lambda s: not isinstance(s.method.inner_batching, BatchPolicy | None),
        "inner_batching={m.inner_batching!r}: give a policy of lowcomm_jax.batching, or None for a "
        "fixed batch",
    ),
    Row(
        "method",
        lambda s: s.method.adapts and s.method.signal == "gradient",
        "inner_batching, trainers: {m.name} exchanges a gradient at every step and takes a fixed "
        "batch and one trainer; leave them out",
    ),
    Row(
        "method",
        _in_flight_at_merges,
        "trainers={m.trainer_count}: payloads of {m.name} are in flight when they merge; use a "
        "schedule that lands at its send, or trainers=1",
    ),
    # Functions that cannot be called as the engine calls them.
    Row("method loss_fn", lambda s: call_problems(s.method, s.loss_fn)),
    # The engine that batches need, and what it needs.
    Row(
        "method",
        lambda s: s.method.adapts and not s.adaptive,
        "{m.name} has a batch policy or trainers (inner_batching, trainers): use "
        "lowcomm_jax.AdaptiveEngine, which takes the same arguments",
    ),
    Row(
        "largest_microbatch method",
        _below_start,
        "largest_microbatch={s.largest_microbatch} is below start={wrong}: start with "
        "{s.largest_microbatch}, or give more",
    ),
    Row("method", _no_batch_policy, "{m.name} has no batch policy: {wrong}"),
    Row(
        "method",
        lambda s: s.adaptive and (s.method.schedule.needs_network or s.method.schedule.measured),
        "{m.name} draws T_c and T_s from a network or measures them, and with a growing batch "
        "T_c is no constant: give its numbers instead",
    ),
    Row(
        "accumulate method",
        lambda s: s.adaptive and s.accumulate != 1,
        "accumulate={s.accumulate}: the batch policy decides how batches are cut; leave it out",
    ),
)


def _between(condition: Callable[[Setup], Any]) -> Callable[[Setup], Any]:
    return lambda s: s.separate and condition(s)


BETWEEN_JOBS = tuple(
    Row(row.about, _between(row.wrong), row.text)
    for row in (
        Row(
            "exchange regions",
            lambda s: s.exchange.count != s.regions,
            "the exchange has {s.exchange.count} regions, the engine {s.regions}: make them equal",
        ),
        Row(
            "mesh exchange",
            lambda s: s.placed.slots != 1,
            "the mesh has {s.placed.slots} region slots, but this job is one region: use region=1, "
            "and fsdp or tensor for its devices",
        ),
        Row(
            "exchange method",
            lambda s: s.method.schedule.uneven and s.exchange.lingers,
            "exchange: payloads of {m.name} must outlive who wrote them; use exchange.store "
            "without transport= (exchange=store)",
        ),
        Row(
            "exchange method",
            lambda s: s.exchange.heal != "stop" and s.method.adapts,
            "heal={s.exchange.heal!r}: every trainer has an anchor of its own, and regions may "
            "part in some; use heal='stop' with {m.name}",
        ),
        Row(
            "exchange method",
            lambda s: s.exchange.heal != "stop" and s.method.schedule.most == 1,
            "heal={s.exchange.heal!r}: the record of an arrival has one region's anchor, and no "
            "majority; use heal='stop' with {m.name}",
        ),
        Row(
            "outlier_factor exchange",
            lambda s: s.outlier_factor is not None,
            "outlier_factor={s.outlier_factor}: a job does not know the other regions' norms when "
            "it sends; leave it out",
        ),
        Row(
            "exchange method regions",
            _no_cpu,
            "exchange: payloads are averaged on the host's processor, beside the training; add cpu "
            "to JAX_PLATFORMS",
        ),
        Row(
            "exchange method",
            lambda s: s.method.signal == "gradient",
            "exchange: {m.name} exchanges at every step, and not between jobs; use exchange='mesh'",
        ),
        Row(
            "exchange method",
            _parting_trainers,
            "exchange: between jobs batches and merges of {m.name} follow from rounds that land "
            "whole and at once, in all regions; use one fragment and no overlap, or "
            "exchange='mesh'",
        ),
        Row(
            "exchange method",
            lambda s: s.method.channels,
            "exchange: in {m.name} channels exchange inside the inner steps' program; use "
            "exchange='mesh'",
        ),
        Row(
            "method exchange",
            _simulated_settings,
            "{wrong}: between jobs regions are as fast, and as often away, as they are; leave it "
            "out",
        ),
        Row(
            "method exchange",
            _lands_at_once,
            "overlap={m.schedule.delay}: between jobs a round is written, committed and read "
            "beside the training; use at least 1",
        ),
        Row(
            "exchange method",
            lambda s: s.method.schedule.local_servers,
            "exchange: local servers of {m.name} are simulated only; use exchange='mesh'",
        ),
        Row(
            "exchange method",
            _own_order,
            "exchange: between jobs contributions are applied one by one in the order of their "
            "arrival alone; give {m.name} base='received' and schedule.Arrivals, or neither, or "
            "use exchange='mesh'",
        ),
        Row(
            "exchange method",
            _simulated_pace,
            "exchange: regions at a pace of their own are simulated only, and {m.name} has them; "
            "use exchange='mesh'",
        ),
        Row(
            "exchange method",
            lambda s: s.method.takes_own_parts,
            "exchange: {m.name} applies a region's own part apart from the others', and not "
            "between jobs; use exchange='mesh'",
        ),
        Row(
            "exchange method",
            _increments,
            "exchange: codec {m.codec.name} keeps a running mean of all regions, in which the "
            "share of a job that was lost and comes back would stay for good; use error feedback "
            "in its place, or exchange='mesh'",
        ),
        Row(
            "method exchange",
            lambda s: not s.method.schedule.one_delay,
            "overlap={m.schedule.delay}: between jobs all regions have the same; give one number",
        ),
    )
)

ROWS = (*ON_A_MESH, *WEIGHTS_AND_GUARDS, *OF_THE_METHOD, *BETWEEN_JOBS)


# -- at `run(microbatch=)` ------------------------------------------------------------------------


UNFIT = "these microbatches cannot work"

OF_MICROBATCHES = (
    Row(
        "accumulate",
        lambda s: s.accumulate > 1,
        "accumulate={s.accumulate} cuts batches too: leave it out of the engine",
    ),
    Row(
        "method",
        lambda s: s.method.channels,
        "{m.name} has channels, which exchange inside the program of fixed batches: leave "
        "microbatch= out, or cut it with Engine(accumulate=)",
    ),
    Row(
        "hops",
        lambda s: s.hops is not None,
        "hops: regions that route microbatches to one another need as many of them; cut the batch "
        "with Engine(accumulate=)",
    ),
    Row(
        "method",
        lambda s: s.method.signal == "gradient",
        "{m.name} exchanges a gradient at every step and takes a fixed batch: leave microbatch= "
        "out, or cut it with Engine(accumulate=)",
    ),
    Row(
        "network",
        lambda s: s.network is not None,
        "network: its seconds of a step are those of a fixed batch; cut it with "
        "Engine(accumulate=), or leave the network out",
    ),
)


def microbatch_problems(setup: Setup, sizes: Sequence[int]) -> list[str]:
    """Why steps cannot run on microbatches of these sizes, one line with its fix each."""
    if not sizes:
        return []
    lines = [FROM_1.problem("microbatch", size) for size in sizes]
    found = [line for line in lines if line is not None]
    fsdp = setup.placed.mesh.shape["fsdp"]
    if not found:
        found += [
            f"microbatch={size} does not divide over fsdp={fsdp} devices: use a multiple of {fsdp}"
            for size in sizes
            if size % fsdp
        ]
    others = found_by(OF_MICROBATCHES, setup, s=setup, m=setup.method)
    return found + [problem.text for problem in others]
