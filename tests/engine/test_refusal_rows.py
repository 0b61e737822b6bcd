"""Every row of the engine's table of refusals is met, and its line names what to change."""

import dataclasses

import jax
import optax
import pytest
from own_parts import Relative
from refused_lines import Others, loss_fn

import lowcomm_jax as lc
from lowcomm_jax import refusals
from lowcomm_jax.adloco.setup import AdaptiveSetup
from lowcomm_jax.channels import Channel
from lowcomm_jax.compression import CodecLevels, PerTensor, ef21, make
from lowcomm_jax.methods import Method
from lowcomm_jax.methods.base import LocalServers
from lowcomm_jax.network import uniform
from lowcomm_jax.rules.batching import Fixed
from lowcomm_jax.rules.trainers import Trainers
from lowcomm_jax.schedule import Admission, Never, Send, Staggered
from lowcomm_jax.schedule.base import Paced
from lowcomm_jax.setup import Setup

m, R, EQUAL = lc.methods, 3, (1.0, 1.0, 1.0)
ONE = lc.make_mesh(devices=jax.devices()[:1])
SUMMED = ef21(make("int8"))
TWO_SHOT = make("int4", reduce="two_shot")
JOBS = {"exchange": Others(R)}
SHARES = lc.roles.Shares("a")
PATHS = {"hops": lambda batch, keys: []}
SERVERS = LocalServers(lc.outer.average(), 0.5)


class Routed:
    """A model whose loss moves values between regions."""

    routed = True

    def loss_fn(self, params, batch, rng):
        """Never called."""


def halos(**changes):
    made = m.halos(4, EQUAL, ((0, 1), (2,)))
    return dataclasses.replace(made, servers=dataclasses.replace(made.servers, **changes))


def like(method, **changes):
    return dataclasses.replace(method, **changes)


def plain(**given):
    return Method(
        **{"name": "mine", "schedule": Staggered(4), "outer": lc.outer.average(), **given}
    )


@dataclasses.dataclass(frozen=True)
class OwnPace(Staggered):
    """A schedule of a user's own, whose regions stand still at times."""

    speeds = ()


class Misread(lc.merge.Isotropic):
    """A rule that names what there is not."""

    reads = "norm"


class Unread(lc.merge.Isotropic):
    """A rule that weighs, and is never asked."""

    def weigh(self, norm_R, state, weight_R, kind):
        return weight_R, state


D = m.diloco(4)
# (method, settings, part of the line).
MET = [
    (D, {"mesh": jax.make_mesh((1,), ("data",))}, "use lowcomm_jax.make_mesh"),
    (D, {"mesh": lc.make_mesh(region=2)}, "use a region axis of 1 (mesh.region=1)"),
    (D, {"network": "nowhere"}, "network: 'nowhere' is unknown"),
    (D, {"network": uniform(4, 1.0)}, "network has 4 regions, the engine 3: make them equal"),
    (m.cocodc(6, 3, 1, gamma=0.4), {}, "or measured=True, or a network"),
    (D, {"concurrent_exchange": True}, "concurrent_exchange: diloco has no delay"),
    (m.ddp(), {"offload": True}, "offload: ddp needs its anchor"),
    (halos(), {"offload": True}, "offload: the servers of halos stay on the devices"),
    (D, {"loss_fn": Routed().loss_fn}, "hops is missing"),
    (D, {**PATHS, **JOBS}, "hops: paths lead through one program"),
    (D, PATHS, "use a region axis of 3 (mesh.region=3)"),
    (m.ddp(), {**PATHS, "mesh": R}, "hops: the regions of ddp are equal"),
    (m.async_local_sgd(4, EQUAL), {**PATHS, "mesh": R}, "stand still at times"),
    (D, {"weights": [1.0]}, "weights=[1.0]: use 'equal', 'tokens' or 3 numbers"),
    (plain(codec=SUMMED), {"weights": "tokens"}, "keeps a running mean of equal regions"),
    (m.async_local_sgd(4, EQUAL), {"weights": "tokens"}, "or 0 for regions that do not count"),
    (m.sparta(), {"weights": "tokens"}, "channels average by fixed weights"),
    (m.heloco(4, EQUAL), {"outlier_factor": 2.0}, "no median is known"),
    (m.noloco(4), {"outlier_factor": 2.0}, "gossiping regions do not know the median"),
    (halos(), {"max_update_norm": 1.0}, "halos has no outer update that is clipped"),
    (m.streaming_diloco(4, 2, 1, 2.0), {}, "alpha=2.0 is outside [0, 1]"),
    (m.diloco(0), {}, "period=0: give a whole number of at least 1"),
    (like(D, rest="x"), {}, "rest='x': use own, dealt"),
    (like(D, pattern="x"), {}, "pattern='x': use "),
    (like(D, codec=4), {}, "codec=4: give a codec"),
    (like(D, codec=m.decoupled_momentum(4, "as_coded").codec), {}, "needs anchors='per_region'"),
    (
        like(D, codec=CodecLevels(m.decoupled_momentum(4, "as_coded").codec)),
        {},
        "which changes the mean by its own state: use that as it is",
    ),
    (like(D, codec=CodecLevels(Relative())), {}, "codec: what it wraps codes leaves, not trees"),
    (
        m.ddp(codec=PerTensor(Relative())),
        {},
        "codec relative compares what is sent with the weights",
    ),
    (m.eager_diloco(4, codec=SUMMED), {}, "which needs one anchor and one mean of all of them"),
    (
        plain(codec=ef21(make("topk", k=8, mean="senders"))),
        {},
        "give the codec in it mean='regions'",
    ),
    (m.eager_diloco(4, codec=TWO_SHOT), {}, "codec.reduce='two_shot': eager_diloco needs"),
    (plain(outer=(lc.outer.average(),) * 2), {}, "outer: 2 rules for 1 fragments"),
    (plain(outer="adam"), {}, "outer='adam': give an Optax transform"),
    (plain(outer=None), {}, "outer=None: with signal='progress'"),
    (like(m.eager_diloco(4), hands_out=lambda a, s: a), {}, "hands_out: needs anchors='shared'"),
    (
        plain(outer=(optax.identity(),), signal="gradient", schedule=Staggered(1)),
        {},
        "outer: with signal='gradient' there is one rule",
    ),
    (like(D, merge=5), {}, "merge=5: give a rule"),
    (like(D, merge=Misread()), {}, "merge: it reads 'norm': use reads = "),
    (like(D, merge=Unread()), {}, "merge: it reads mean: reads = 'norms' and `weigh` go together"),
    (m.heloco(4, EQUAL, enough=2.0), {}, "enough=2.0"),
    (m.isoloco(4, codec=SUMMED), {}, "merge: codec"),
    (
        like(
            m.dilocox(4, {"name": "low_rank_int4", "least": 1.0}, 2, adaptive={"window": 1}),
            merge=lc.merge.RadialDirectional(),
        ),
        {},
        "leave the schedule's energy (adaptive) or the rule out",
    ),
    (plain(servers=SERVERS), {}, "servers: two levels need schedule.TwoLevels"),
    (
        like(halos(), servers=LocalServers(lc.outer.average(), 0.5, "int9")),
        {},
        "global_codec: 'int9'",
    ),
    (halos(blend=2.0), {}, "blend=2.0: the weight of the global model"),
    (halos(codec=4), {}, "global_codec=4: give a codec"),
    (halos(codec=SUMMED), {}, "a server's update is applied by itself"),
    (halos(codec=TWO_SHOT), {}, "global_codec.reduce='two_shot': nothing is reduced"),
    (like(D, roles=5), {}, "roles=5: give roles of lowcomm_jax.roles"),
    (like(D, roles=lc.roles.Shares("a", axis=-1)), {}, "axis=-1: give the number of the axis"),
    (like(D, roles=SHARES, codec="int8"), {}, "need a dense payload (codec=None)"),
    (like(m.edit(4), roles=SHARES), {}, "need the mean (merge=None)"),
    (like(m.ddp(), roles=SHARES), {}, "need signal='progress'"),
    (like(m.noloco(4, codec=None), roles=SHARES), {}, "need anchors='shared', topology=None"),
    (like(m.heloco(4, EQUAL), roles=SHARES), {}, "need base='anchor'"),
    (
        like(m.decoupled_diloco(4, merge=None), roles=SHARES),
        {},
        "need a schedule whose regions copy no peer",
    ),
    (like(m.sparta(period=4), roles=SHARES), {}, "need no channels"),
    (like(m.sparta(), roles=SHARES), {}, "need a main exchange"),
    (like(m.adloco(4), roles=SHARES), {}, "need a fixed batch and one trainer"),
    (like(m.noloco(4), anchors="shared"), {}, "gossip needs anchors='per_region'"),
    (
        like(m.noloco(4), schedule=m.delayed_diloco(4).schedule),
        {},
        "gossip needs a schedule that lands first",
    ),
    (m.noloco(4, group_size=9), {}, "group_size=9: groups of 2 to 3"),
    (m.noloco(4, 4), {"regions": 512, "mesh": 8}, "use a mesh of one region slot"),
    (plain(schedule=Never(), outer=None), {}, "nothing is exchanged; add one"),
    (m.sparta(0.9), {}, "channel sparta: p=0.9"),
    (plain(channels=(Channel("a"), Channel("a", source="mu"))), {}, "name='a' stands in 2 of them"),
    (like(m.noloco(4), channels=(Channel("a"),)), {}, "channels: gossiping regions never meet all"),
    (like(m.sparta(), codec=make("int8")), {}, "codec: sparta has no main exchange"),
    (like(D, trainers=Trainers(0, None)), {}, "trainers=0: a whole number"),
    (m.adloco(4, inner_batching=Fixed(0)), {}, "start=0: a whole number"),
    (like(D, inner_batching="norm"), {}, "inner_batching='norm': give a policy"),
    (m.ddp(inner_batching=Fixed(4)), {}, "inner_batching, trainers: ddp exchanges a gradient"),
    (
        like(m.streaming_diloco(4, 2, 1, 0.5), trainers=Trainers(2, 1)),
        {},
        "trainers=2: payloads of streaming_diloco are in flight when they merge",
    ),
    (D, {"loss_fn": lambda params: 0.0}, "write loss_fn(params, batch, rng)"),
    (D, {"exchange": Others(4)}, "the exchange has 4 regions, the engine 3"),
    (
        D,
        {**JOBS, "mesh": lc.make_mesh(region=2)},
        "the mesh has 2 region slots, but this job is one",
    ),
    (m.async_local_sgd(4, EQUAL), {"exchange": Others(R, lingers=True)}, "use exchange.store"),
    (
        m.adloco(4),
        {"exchange": Others(R, heal="majority")},
        "every trainer has an anchor of its own",
    ),
    (
        m.async_local_sgd(4, EQUAL),
        {"exchange": Others(R, heal="majority")},
        "the record of an arrival has one region's anchor",
    ),
    (D, {**JOBS, "outlier_factor": 2.0}, "a job does not know the other regions' norms"),
    (m.ddp(), JOBS, "exchange: ddp exchanges at every step"),
    (like(m.adloco(4), schedule=Staggered(4, 2, 1)), JOBS, "use one fragment and no overlap"),
    (m.sparta(), JOBS, "exchange: in sparta channels exchange inside"),
    (m.decoupled_diloco(4, speeds=EQUAL), JOBS, "as they are; leave it out"),
    (m.decoupled_diloco(4, overlap=0), JOBS, "overlap=0: between jobs a round is written"),
    (halos(), JOBS, "exchange: local servers of halos are simulated only"),
    (plain(base="received"), JOBS, "give mine base='received' and schedule.Arrivals, or neither"),
    (plain(schedule=OwnPace(4)), JOBS, "regions at a pace of their own are simulated only"),
    (m.eager_diloco(4), JOBS, "exchange: eager_diloco applies a region's own part apart"),
    (plain(codec=SUMMED), JOBS, "keeps a running mean of all regions"),
    (m.streaming_diloco(4, 2, (1, 2, 1), 0.5), JOBS, "overlap=(1, 2, 1): between jobs all regions"),
    (m.adloco(4), {}, "use lowcomm_jax.AdaptiveEngine"),
    (
        m.adloco(4, inner_batching=Fixed(4)),
        {"largest_microbatch": 2},
        "largest_microbatch=2 is below start=4: start with 2, or give more",
    ),
    (D, {"largest_microbatch": 2}, "diloco has no batch policy: give inner_batching"),
    (
        like(D, trainers=Trainers(2, 3)),
        {"largest_microbatch": 2},
        "diloco has no batch policy: trainers need a batch policy, too: give inner_batching, as "
        "batching.Fixed(b)",
    ),
    (
        m.cocodc(4, 2, 1, gamma=0.5, inner_batching=Fixed(4)),
        {"largest_microbatch": 4},
        "draws T_c and T_s from a network or measures them",
    ),
    (m.adloco(4), {"scaling": "sqrt", "accumulate": 2}, "accumulate=2: the batch policy decides"),
]
ELSEWHERE = (  # they need several processes, slices of TPUs, or no processor
    "has none of {wrong}: use all devices",
    "offload: not with several processes",
    "a region of this mesh would span several",
    "add cpu to JAX_PLATFORMS",
)


def setup_of(method, given):
    given = {"mesh": ONE, **given}
    if isinstance(slots := given["mesh"], int):
        given["mesh"] = lc.make_mesh(region=slots, devices=jax.devices()[:slots])
    required = {"loss_fn": loss_fn, "inner": optax.sgd(0.1), "method": method, "regions": R}
    adaptive = not given.keys().isdisjoint(("largest_microbatch", "scaling"))
    return (AdaptiveSetup if adaptive else Setup)(**(required | given))


@pytest.mark.parametrize(("method", "given", "part"), MET)
def test_a_setup(method, given, part):
    lines = [line.text for line in refusals.problems(setup_of(method, given))]
    assert sum(part in line for line in lines) == 1, lines


def test_a_program_of_several_processes_has_no_offload(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    lines = [line.text for line in refusals.problems(setup_of(D, {"offload": True}))]
    assert "offload: not with several processes; leave it out" in lines


@dataclasses.dataclass(frozen=True)
class OwnRounds(Paced):
    """Rounds of a user's own, which derive from no schedule of ours."""

    period: int = 4
    fragments: int = 1
    delay: int = 1
    tired: tuple[int, ...] = ()
    admission = Admission()
    simulated = ("tired",)
    copies = True

    def due(self, step, counters):
        return (Send((0,)),) if step % self.period == 0 else ()

    def acts_by_rounds(self, step, view):
        return ()

    def opens(self, number):
        return number * self.period

    def rounds_by(self, step):
        return step // self.period

    def violations(self, regions):
        return []


def rounds(**settings):
    return plain(schedule=OwnRounds(**settings))


@pytest.mark.parametrize(
    ("method", "given", "parts"),
    [
        (rounds(), JOBS, []),
        (rounds(tired=(1,)), JOBS, ["tired=(1,): between jobs regions are as fast"]),
        (rounds(delay=0), JOBS, ["overlap=0: between jobs a round is written"]),
        (like(rounds(), roles=SHARES), {}, ["need a schedule whose regions copy no peer"]),
        (rounds(), {"exchange": Others(R, lingers=True)}, ["must outlive who wrote them"]),
    ],
)
def test_a_schedule_of_ones_own_answers_as_ours(method, given, parts):
    lines = [line.text for line in refusals.problems(setup_of(method, given))]
    assert len(lines) == len(parts), lines
    assert all(part in line for part, line in zip(parts, lines)), lines


def test_every_row_is_met(monkeypatch):
    met = set()

    def noting(row):
        def wrong(setup):
            if found := row.wrong(setup):
                met.add(row)
            return found

        return row._replace(wrong=wrong)

    rows = refusals.ROWS
    monkeypatch.setattr(refusals, "ROWS", tuple(map(noting, refusals.ROWS)))
    for method, given, _ in MET:
        refusals.problems(setup_of(method, given))
    unmet = [row for row in rows if row not in met and not any(x in row.text for x in ELSEWHERE)]
    assert not unmet, [f"{row.about}: {row.text}" for row in unmet]
