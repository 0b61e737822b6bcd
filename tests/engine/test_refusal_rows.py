"""Every row of the engine's table of refusals is met, and its line names what to change."""

import dataclasses
import re

import jax
import numpy as np
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
LEARNERS = {"quorum": 4, "grace": 1.5, "speeds": (1.0, 0.0), "outages": [(7, 3, 2)]}
WRONG_LEARNERS = ["quorum=4", "grace=1.5", "weights='steps'", "2 values for 3", "positive speed"]
WRONG_LEARNERS += ["region 7 of 3", "(7, 3, 2)"]
ADAPTIVE = "use lowcomm_jax.AdaptiveEngine"
# (method, settings, a part of every line).
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
    (
        plain(servers=SERVERS),
        {},
        "servers: two levels need schedule.TwoLevels",
        "servers: two levels need base='received'",
    ),
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
    (like(m.heloco(4, EQUAL), roles=SHARES), {}, "need base='anchor'", "need the mean"),
    (
        like(m.decoupled_diloco(4, merge=None), roles=SHARES),
        {},
        "need a schedule whose regions copy no peer",
    ),
    (like(m.sparta(period=4), roles=SHARES), {}, "need no channels"),
    (like(m.sparta(), roles=SHARES), {}, "need a main exchange", "need no channels"),
    (like(m.adloco(4), roles=SHARES), {}, "need a fixed batch and one trainer", ADAPTIVE),
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
    (like(D, trainers=Trainers(0, None)), {}, "trainers=0: a whole number", ADAPTIVE),
    (m.adloco(4, inner_batching=Fixed(0)), {}, "start=0: a whole number", ADAPTIVE),
    (like(D, inner_batching="norm"), {}, "inner_batching='norm': give a policy", ADAPTIVE),
    (
        m.ddp(inner_batching=Fixed(4)),
        {},
        "inner_batching, trainers: ddp exchanges a gradient",
        ADAPTIVE,
    ),
    (
        like(m.streaming_diloco(4, 2, 1, 0.5), trainers=Trainers(2, 1)),
        {},
        "trainers=2: payloads of streaming_diloco are in flight when they merge",
        ADAPTIVE,
    ),
    (D, {"loss_fn": lambda params: 0.0}, "write loss_fn(params, batch, rng)"),
    (D, {"exchange": Others(4)}, "the exchange has 4 regions, the engine 3"),
    (
        D,
        {**JOBS, "mesh": lc.make_mesh(region=2)},
        "regions=3 does not divide over 2 region slots",
        "the mesh has 2 region slots, but this job is one",
    ),
    (m.async_local_sgd(4, EQUAL), {"exchange": Others(R, lingers=True)}, "use exchange.store"),
    (
        m.adloco(4),
        {"exchange": Others(R, heal="majority")},
        "every trainer has an anchor of its own",
        ADAPTIVE,
    ),
    (
        m.async_local_sgd(4, EQUAL),
        {"exchange": Others(R, heal="majority")},
        "the record of an arrival has one region's anchor",
    ),
    (D, {**JOBS, "outlier_factor": 2.0}, "a job does not know the other regions' norms"),
    (m.ddp(), JOBS, "exchange: ddp exchanges at every step"),
    (
        like(m.adloco(4), schedule=Staggered(4, 2, 1)),
        JOBS,
        "use one fragment and no overlap",
        "trainers=4: payloads of adloco are in flight when they merge",
        ADAPTIVE,
    ),
    (m.sparta(), JOBS, "exchange: in sparta channels exchange inside"),
    (m.decoupled_diloco(4, speeds=EQUAL), JOBS, "as they are; leave it out"),
    (m.decoupled_diloco(4, overlap=0), JOBS, "overlap=0: between jobs a round is written"),
    (halos(), JOBS, "exchange: local servers of halos are simulated only"),
    (plain(base="received"), JOBS, "give mine base='received' and schedule.Arrivals, or neither"),
    (plain(schedule=OwnPace(4)), JOBS, "regions at a pace of their own are simulated only"),
    (m.eager_diloco(4), JOBS, "exchange: eager_diloco applies a region's own part apart"),
    (plain(codec=SUMMED), JOBS, "use error feedback in its place"),
    (m.streaming_diloco(4, 2, (1, 2, 1), 0.5), JOBS, "overlap=(1, 2, 1): between jobs all regions"),
    (m.adloco(4), {}, ADAPTIVE),
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
        "gamma without T_c and T_s",
    ),
    (m.adloco(4), {"scaling": "sqrt", "accumulate": 2}, "accumulate=2: the batch policy decides"),
    # What is wrong with the numbers of one part, all of it at once.
    (m.local_sgd(-2), {}, "period=-2"),
    (m.diloco(-5), {}, "period=-5"),
    (m.diloco(2.5), {}, "period=2.5"),
    (m.delayed_diloco(4, first_round="blockin"), {}, "'blockin'"),
    (m.streaming_diloco(-5, 1, 0, 0.5), {}, "period=-5"),
    (m.streaming_diloco(4, 0, 0, 0.3), {}, "fragments=0"),
    (m.streaming_diloco(4, 2, -1, 0.3), {}, "overlap=-1"),
    (m.streaming_diloco(4, 2, 4, 0.3), {}, "overlap=4 >= period=4"),
    (m.streaming_diloco(4, 2, 1.5, 0.3), {}, "overlap=1.5"),
    (m.streaming_diloco(4, 2, 1, -0.1), {}, "alpha=-0.1"),
    (m.streaming_diloco(4, 2, 1, np.nan), {}, "alpha=nan"),
    (m.streaming_diloco(4, 2, 1, 0.3, pattern="strideed"), {}, "'strideed'"),
    (m.streaming_diloco(4, 2, 1, 0.3, rest="onw"), {}, "'onw'"),
    (
        plain(schedule=Staggered(2, delay=3)),
        {},
        "use at most 1 (overlap is the schedule's `delay`)",
    ),
    (
        plain(schedule=Staggered(5, 3), outer=(lc.outer.sgd(0.5),) * 2, landing="blend", merge=0.5),
        {},
        "outer: 2 rules for 3 fragments",
        "landing='blend': give an Optax transform",
        "merge=0.5: give a rule of lowcomm_jax.merge",
    ),
    (
        plain(outer=None, merge=lc.merge.RadialDirectional(floor=2.0), anchors="per_region"),
        {},
        "outer=None",
        "floor=2.0",
        "merge: needs anchors='shared'",
    ),
    (
        plain(schedule=Staggered(1), outer=lc.outer.restarting(0.5, 0.8, 2), signal="gradient"),
        {},
        "outer: update(",
    ),
    (like(halos(), outer=lc.outer.restarting(0.5, 0.8, 2)), {}, "outer: update("),
    (m.diloco(4, codec=4), {}, "codec=4"),
    (m.diloco(4, codec="int5"), {}, "'int5' is unknown"),
    (
        m.snoo(0, learning_rate=-1.0, momentum=1.0),
        {},
        "period=0",
        "learning_rate=-1.0",
        "momentum=1.0",
    ),
    (m.restarted_diloco(0, every=0, momentum=1.0), {}, "period=0", "momentum=1.0", "every=0"),
    (m.restarted_diloco(4, every="x"), {}, "every='x': give a whole number"),
    (
        m.restarted_diloco(4, every=np.nan, momentum="0.7"),
        {},
        "every=nan: give a whole number",
        "momentum='0.7': give a number",
    ),
    (m.eager_diloco(0, "adam"), {}, "period=0", "outer='adam'"),
    (m.cocodc(6, 3, 6), {}, "overlap=6 >= period=6"),
    (m.cocodc(6, 3, 1, syncs_per_period=2), {}, "syncs_per_period=2"),
    (m.cocodc(6, 3, 1, syncs_per_period=7), {}, "syncs_per_period=7"),
    (m.cocodc(6, 3, 1, syncs_per_period=4.5), {}, "syncs_per_period=4.5"),
    (m.cocodc(6, 3, 1, syncs_per_period=4, gamma=0.4), {}, "gamma"),
    (m.cocodc(6, 3, 1, gamma=0.4, step_seconds=1.0), {}, "go together"),
    (
        m.cocodc(6, 3, 1, gamma=1.4, step_seconds=1.0, sync_seconds=0.0),
        {},
        "gamma=1.4",
        "sync_seconds=0.0: give a positive, finite number",
    ),
    (m.cocodc(6, 3, 1, gamma=0.4, step_seconds=1.0, sync_seconds=np.inf), {}, "finite"),
    (m.cocodc(6, 3, 1, measured=True), {}, "give it"),
    (m.cocodc(6, 3, 1, score="draft"), {}, "score='draft'"),
    (m.cocodc(6, 3, 1, taylor=None), {}, "taylor=None"),
    (
        m.cocodc(0, 3, 1, 5, taylor=-1.0),
        {},
        "period=0: give",
        "syncs_per_period=5",
        "taylor: strength=-1.0",
    ),
    (m.dilocox(-4), {}, "period=-4"),
    (m.dilocox(4, delay=2), {}, "delay=2"),
    (m.dilocox(4, rank=0), {}, "rank"),
    (m.dilocox(4, rank=True), {}, "rank=True"),
    (m.dilocox(4, codec=5), {}, "codec=5"),
    (m.dilocox(4, "low_rnk", rank=3), {}, "codec: 'low_rnk' is unknown"),
    (m.dilocox(4, "int4", rank=3), {}, "rank=3 is unused"),
    (m.dilocox(4, "int4", adaptive=True), {}, "adaptive needs a low-rank codec"),
    (m.dilocox(4, {"name": "low_rank", "rank": 2}), {}, "codec.rank is unused"),
    (m.dilocox(4, {"name": "low_rank", "basis": 9}), {}, "codec.basis is unused"),
    (m.dilocox(4, {"name": "low_rank", "reduce": "two_shot"}), {}, "codec.reduce='two_shot'"),
    (m.dilocox(4, delay=0, first_round="blocking"), {}, "first_round='blocking'"),
    (m.dilocox(4, step_seconds=1.0), {}, "go together"),
    (m.dilocox(4, step_seconds=1.0, sync_seconds=np.nan), {}, "finite"),
    (
        m.dilocox(4, delay=0, step_seconds=1.0, sync_seconds=9.0),
        {},
        "only rounds of delay 1",
    ),
    (
        m.dilocox(4, step_seconds=1.0, sync_seconds=4.5),
        {},
        "period=4: the payload travels for 5 inner steps",
    ),
    (
        m.dilocox(4, adaptive=False, step_seconds=1.0, sync_seconds=4.5),
        {},
        "period=4: the payload travels for 5 inner steps",
    ),
    (m.dilocox(4, adaptive="yes"), {}, "adaptive='yes'"),
    (m.dilocox(4, adaptive={"windw": 2}), {}, "adaptive.windw"),
    (m.dilocox(4, adaptive={"window": 0}), {}, "window=0"),
    (m.dilocox(4, adaptive={"window": 2.5}), {}, "window=2.5"),
    (m.dilocox(4, adaptive={"energy": 0.0}), {}, "adaptive.energy=0.0"),
    (m.dilocox(4, adaptive={"shortest": 2.5}), {}, "shortest=2.5"),
    (m.dilocox(4, adaptive={"shortest": 5}), {}, "shortest=5"),
    (m.dilocox(4, adaptive={"probe": 1}), {}, "probe=1"),
    (m.dilocox(4, adaptive={"probe": 2.5}), {}, "probe=2.5"),
    (m.dilocox(4, adaptive={"buckets": 2.5}), {}, "adaptive.buckets=2.5"),
    (m.dilocox(4, adaptive={"buckets": True}), {}, "adaptive.buckets=True"),
    (m.dilocox(4, adaptive={"floor": 2.5}), {}, "adaptive.floor=2.5"),
    (m.dilocox(4, rank=8, adaptive={"floor": 9}), {}, "adaptive.floor=9"),
    (m.noloco(4, gamma=9.0, seed=-1), {}, "gamma=9 lets 3 regions", "seed=-1"),
    # R = 4: k' = 1 * 4 / (2 * 3) = 2/3, and gamma < 2 (1 - 0.81) / (1.9 - 1.2) = 0.543.
    (m.noloco(4, alpha=0.9, gamma=0.54), {"regions": 4}),
    (m.noloco(4, alpha=0.9, gamma=0.55), {"regions": 4}, "gamma=0.55"),
    (m.gasloc(4, -1.0, 0.5, 1.0, codec="int9"), {}, "alpha=-1.0", "codec: 'int9' is unknown"),
    (
        m.gasloc(4, 0.0, 0.0, 1.0),
        {"regions": 4},
        "alpha=0 lets 4 regions in groups of 2 drift apart: with gamma=0",
    ),
    (
        m.gasloc((3, 0), -1.0, 1.0, 0.0, peers=0),
        {"regions": 2},
        "alpha=-1.0",
        "gamma=1.0",
        "rate=0.0",
        "peers=0",
        "period=(3, 0)",
    ),
    (m.gasloc((3, 2), 0.6, 0.3, 0.8), {}, "2 values for 3 regions"),
    (m.gasloc(3, 0.6, 0.3, 0.8, peers=3), {}, "group_size=4"),
    (m.gasloc(3, 2.0, 0.9, 1.0), {"regions": 8}, "alpha=2 lets 8 regions"),
    (
        m.gasloc((3, 2, 4), 0.6, 0.3, 0.8),
        JOBS,
        "a pace of their own are simulated only",
    ),
    (m.sparseloco(4, k=3, decay=0.5, codec="int4"), {}, "k=3, decay=0.5 would have no effect"),
    (m.sparseloco(4, codec="int4"), {}),
    (m.pulseloco(0, k=0), {}, "period=0", "k=0"),
    (m.pulseloco(4, decay=2.0), {}, "decay=2.0"),
    (m.pulseloco(4, k=8, codec="int8"), {}, "codec is given, so k=8 would have no effect"),
    (m.demo(block=65), {}, "block=65"),
    (m.demo(k=3, codec="int5"), {}, "'int5' is unknown", "so k=3 would have no effect"),
    (m.decoupled_momentum(4, "median"), {}, "variant='median'"),
    (m.decoupled_momentum(0, "as_coded", decay=2.0), {}, "period=0", "decay=2.0"),
    (
        m.eager_diloco(4, codec=m.decoupled_momentum(4, "as_coded").codec),
        {},
        "needs anchors='per_region'",
    ),
    (m.sparta(), {"max_update_norm": 1.0}, "sparta has no outer update that is clipped"),
    (m.sparta(2.0, codec="int9", delay=-1), {}, "codec: 'int9' is unknown", "p=2.0", "delay=-1"),
    (
        m.edit(0, 0.0, -1.0, 0.0, 1.0, 1.5),
        {},
        "period=0",
        "clip=0.0",
        "temperature=-1.0",
        "outlier=0.0",
        "decay=1.0",
        "warm_up=1.5",
    ),
    (m.edit(4), JOBS),
    (
        m.a_edit(0.1, 0.5, EQUAL),
        {},
        "seconds=0.1: no step of step_seconds=0.5 fits in",
    ),
    (m.a_edit(1.0, 0.5, (3.0, 0.0)), {}, "2 values for 3 regions", "positive speed"),
    (m.a_edit(1.0, 0.5, EQUAL), JOBS, "a pace of their own are simulated only"),
    (m.async_local_sgd(4, EQUAL, buffer="3", c="0"), {}, "buffer='3': give a whole number of at"),
    (
        m.async_local_sgd(0, EQUAL, -1.0, buffer=0),
        {},
        "period=0",
        "learning_rate=-1.0",
        "buffer=0",
    ),
    (
        m.heloco(4, EQUAL, weight="1", enough="1", removal="0"),
        {},
        "weight='1'",
        "enough='1'",
        "removal='0'",
    ),
    (
        m.heloco(0, EQUAL, momentum=1.0, weight=0.0, enough=2.0),
        {},
        "period=0",
        "momentum=1.0",
        "weight=0.0",
        "enough=2.0",
    ),
    (m.heloco(4, (1.0, 0.5), turn=-1.0), {}, "speeds: 2 values", "turn=-1.0"),
    (m.heloco(12.5, EQUAL), {}, "period=12.5: give a whole number of at least 1"),
    (m.halos(4, EQUAL, ((), (0, 1, 2))), {}, "in one group, none empty"),
    (m.halos(4, EQUAL, ((0, 1), (2,)), blend="0.5"), {}, "blend='0.5'"),
    (
        m.halos(0, EQUAL, ((0, 1), (2,)), blend=2.0, momentum=1.0, global_learning_rate=-1.0),
        {},
        "period=0",
        "momentum=1.0",
        "global_learning_rate=-1.0",
        "blend=2.0",
    ),
    (
        m.halos(4, (1.0, -1.0), [(0,), (0, 2)], 0, 1.5, travel=(1, 2, -3)),
        {},
        "2 values for 3",
        "positive speed",
        "in one group",
        "every=0",
        "blend=1.5",
        "3 values for 2 groups",
        "not negative",
    ),
    (
        m.halos(
            4,
            EQUAL,
            ((0, 1), (2,)),
            codec={"name": "int8", "reduce": "two_shot"},
            global_codec=3,
        ),
        {},
        "codec.reduce='two_shot'",
        "global_codec=3",
    ),
    (
        m.spes(0, "(", "[", -1, 1.5, 0, -2, 0),
        {},
        "period=0",
        "'(' is no regular",
        "compare='['",
        "axis=-1",
        "share=1.5",
        "merge_every=0",
        "until=-2",
        "donors=0",
    ),
    (m.spes(4, "^a$", "a"), JOBS),
    (m.partial_updates(4, None), {}, "roles=None: say what each region trains"),
    (m.partial_updates(4, SHARES), JOBS),
    (
        m.decoupled_diloco(4, 6, 5, weights="steps", **LEARNERS),
        {},
        "fragments=6 > period=4",
        "overlap=5 >= period=4",
        *WRONG_LEARNERS,
    ),
    (
        m.decoupled_diloco("4", 6, 1.5, weights="steps", **LEARNERS),
        {},
        "period='4': give a whole number of at least 1",
        "overlap=1.5: give whole",
        *WRONG_LEARNERS,
    ),
    (
        m.decoupled_diloco(0, 6, -1, weights="steps", **LEARNERS),
        {},
        "period=0: give a whole number of at least 1",
        "overlap=-1: give whole",
        *WRONG_LEARNERS,
    ),
    (
        m.decoupled_diloco(6, 3, 2, outages=[(0, 3, 5), (1, 4, 6)]),
        {"regions": 2},
        "nobody is up at tick 4",
    ),
    (m.decoupled_diloco(6, 3, merge=lc.merge.RadialDirectional(-1.0)), {}, "floor=-1.0"),
    # Values of another kind, each beside others.
    (m.heloco(0, "x", None), {}, "period=0", "speeds='x': every region", "learning_rate=None"),
    (
        m.async_local_sgd("4", (1.0, None, 1.0), c=[0.1], dynamic="no"),
        {},
        "period='4'",
        "speeds=(1.0, None, 1.0): every region needs a positive speed; give 3",
        "c=[0.1]: give a number in [0, 0.333333]",
        "dynamic='no': use True or False",
    ),
    (
        m.a_edit(None, [0.5], 3, clip=None, warm_up=True),
        {},
        "seconds=None: give a number in (0, inf)",
        "step_seconds=[0.5]: give a number",
        "speeds=3: every region needs a positive speed",
        "clip=None: give a number",
        "warm_up=True: give a whole number",
    ),
    (
        m.halos(4, None, 3, every="x", travel=(1, None), dynamic=1, global_momentum={}),
        {},
        "speeds=None: every region needs a positive speed",
        "groups=3: name each of the 3 regions",
        "every='x': give a whole number",
        "travel=(1, None): whole ticks",
        "dynamic=1: use True or False",
        "global_momentum={}: give a number in [0, 1)",
    ),
    (m.halos(4, EQUAL, ((0, 1), (2,)), travel=[]), {}, "travel: 0 values for 2 groups"),
    (m.halos(4, EQUAL, (0, 1, None)), {}, "groups=(0, 1, None): name each of the 3 regions"),
    (
        m.decoupled_diloco(None, overlap=[1, None], outages=3, speeds=2.5),
        {},
        "period=None: give a whole number",
        "overlap=[1, None]: give whole numbers",
        "overlap=[1, None]: one number for all learners is needed",
        "outages=3: give (region, first tick, last tick)",
        "speeds=2.5: every region needs a positive speed",
    ),
    (m.decoupled_diloco(4, outages=[(0, 1)]), {}, "outages=((0, 1),): give (region, first tick"),
    (
        m.decoupled_diloco(4, 2, overlap=range(1, 4)),
        {},
        "overlap=range(1, 4): one number for all learners is needed",
    ),
    (m.decoupled_diloco(4, 2, np.array(0)), JOBS, "read beside the training; use at least 1"),
    (m.streaming_diloco(4, 2, range(1, 4), 0.5), JOBS, "have the same; give one number"),
    (m.streaming_diloco(4, 2, 1, 0.5, pattern=(re.compile("w"), re.compile("b"))), {}),
    (
        m.streaming_diloco(4, 2, (1, None, 1), [0.5], pattern=3),
        {},
        "overlap=(1, None, 1): give whole numbers",
        "alpha=[0.5]: give a number in [0, 1]",
        "pattern=3: use ",
    ),
    (m.delayed_diloco([4]), {}, "period=[4]: give a whole number of at least 1"),
    (
        m.cocodc(None, "x", 1, gamma=0.5, step_seconds=1.0, sync_seconds=0.1),
        {},
        "period=None: give a whole number",
        "fragments='x': give a whole number",
    ),
    (m.cocodc(4, 2, 1, gamma=0.5, measured="no"), {}, "measured='no': use True or False"),
    (
        m.muloco(4, 3, None, stacked=3),
        {},
        "bits=3: choose one of 8, 4, 2",
        "codec: decay=None: give a number in [0, 1]",
        "codec: stacked=3: give path prefixes of leaves, as ('blocks',)",
    ),
    (m.sparseloco(4, bits=[2], mean=""), {}, "bits=[2]: choose one of 2, 4, 8, 32", "mean=''"),
    (m.demo(stacked=("a", None)), {}, "codec: stacked=('a', None): give path prefixes"),
    (m.decoupled_momentum(4, "as_coded", decay=None), {}, "decay=None: give a number in [0, 1)"),
    (
        m.noloco(4, alpha=[0.5], beta=None, gamma="x"),
        {},
        "alpha=[0.5]: give a number",
        "beta=None: give a number",
        "gamma='x': give a number",
    ),
    (
        m.gasloc(2.5, {}, None, True),
        {},
        "period=2.5: give a whole number of inner steps, or one for each region",
        "alpha={}: give a number",
        "gamma=None: give a number",
        "rate=True: give a number",
    ),
    (
        m.sparta(selection=["sampled"], landing={}),
        {},
        "selection=['sampled']: choose one of sampled, shuffled, partitioned",
        "landing={}: choose one of mean, replay",
    ),
    (
        m.des_loc(None, 0, "x"),
        {},
        "period=None: give a whole number",
        "first=0: give a whole number",
        "second='x': give a whole number",
    ),
    (
        m.snoo(4, {}, [0.9]),
        {},
        "learning_rate={}: give a number in [0, inf] or a function",
        "momentum=[0.9]: give a number in [0, 1)",
    ),
    (m.spes(4, "a", "a", share=None, until=[2]), {}, "share=None: give", "until=[2]: give"),
    (m.diloco(4, outer=[]), {}, "outer: 0 rules for 1 fragments"),
    # Settings of the engine.
    (D, {"regions": 0}, "regions=0"),
    (D, {"regions": 2.5}, "regions=2.5"),
    (D, {"regions": 30_000_000}, "regions=30000000: use at most 100,000"),
    (D, {"weights": "token"}, "weights='token'"),
    (D, {"weights": [0.0, 0.0, 0.0]}, "or 3 numbers >= 0, one of them positive"),
    (D, {"weights": [1.0, -1.0, 1.0]}, "weights="),
    (D, {"weights": [1.0, np.nan, 1.0]}, "weights="),
    (D, {"weights": [1.0, np.inf, 1.0]}, "weights="),
    (D, {"weights": 1.0}, "weights="),
    (D, {"accumulate": 1.5}, "accumulate=1.5"),
    (D, {"block": 10**9}, "block=1000000000: use at most 65,536"),
    (D, {"offload": np.int64(1)}, "offload=1: use True or False"),
    (
        D,
        {"offload": "no", "codec_error": "no", "skip_nonfinite": "no", "specs": 3},
        "offload='no': use True or False",
        "codec_error='no': use True or False",
        "skip_nonfinite='no': use True or False",
        "specs=3: give",
    ),
    (D, {"regions": True, "accumulate": True}, "regions=True: give", "accumulate=True: give"),
    (D, {"outlier_factor": np.nan}, "outlier_factor=nan"),
    (D, {"outlier_factor": 10**400}, "must exceed 1"),
    (
        D,
        {"outlier_factor": 1.0, "max_update_norm": 0.0},
        "outlier_factor=1.0",
        "max_update_norm=0.0",
    ),
    (D, {"outlier_factor": 1.5, "max_update_norm": 0.5}),
    (
        plain(codec=SUMMED),
        {"weights": np.arange(1.0, 4.0)},
        "keeps a running mean of equal regions",
    ),
    (plain(codec=SUMMED), {"weights": "equal"}),
    *(
        (
            method,
            {"weights": weights, "outlier_factor": 2.0},
            f"weights={weights!r}: {method.name} applies",
            f"outlier_factor=2.0: {method.name} applies",
        )
        for method in (m.async_local_sgd(4, EQUAL), m.heloco(4, EQUAL), halos())
        for weights in ("tokens", [1.0, 3.0, 1.0], np.arange(1.0, 4.0))
    ),
    (
        halos(),
        {"weights": [0.0, 1.0, 1.0], "max_update_norm": 1.0},
        "weights=[0.0, 1.0, 1.0]: halos",
        "max_update_norm=1.0: halos",
    ),
    (halos(), {"weights": [2.0, 2.0, 2.0]}),
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


@pytest.mark.parametrize("case", MET)
def test_all_lines_of_a_setup(case):
    """One bad value hides no other, and nothing is told twice."""
    method, given, *parts = case
    lines = [line.text for line in refusals.problems(setup_of(method, given))]
    assert len(lines) == len(parts), lines
    for part in parts:
        assert sum(part in line for line in lines) == 1, (part, lines)


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
    for method, given, *_ in MET:
        refusals.problems(setup_of(method, given))
    unmet = [row for row in rows if row not in met and not any(x in row.text for x in ELSEWHERE)]
    assert not unmet, [f"{row.about}: {row.text}" for row in unmet]
