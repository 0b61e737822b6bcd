"""Pipeline stages and the two optimizers: every stage's outer state lives, and travels, alone.

The model is the toy of `staged_runs`; the transformer's own stages are in
tests/models/test_pipeline.py.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.collectives import collectives
from jax.sharding import PartitionSpec as P
from mesh.staged_runs import CODED, METHODS, SHAPE, SPECS, R, batches, engine_of, start

import lowcomm_jax as lc
from lowcomm_jax.compression import PerTensor, error_feedback, make, make_leaf, names
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.mesh import stages
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.params import fragments
from lowcomm_jax.params.fragments import partition
from lowcomm_jax.params.layout import make_layout
from lowcomm_jax.sync.round_functions import AnchorState, Contributions, Senders, Values

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


QUICK = ("dilocox",)  # the others compile for long


@pytest.fixture(scope="module")
def runs():
    """Two rounds of every method in two stages; dilocox's payload is still in flight."""

    @functools.cache
    def run(name, shape):
        engine = engine_of(METHODS[name](), shape)
        return engine, *engine.run(engine.init(start()), batches(5))

    return run


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in METHODS],
)
def test_every_method_trains_in_stages_as_without(runs, name):
    _, state, history = runs(name, SHAPE)
    _, expected, expected_history = runs(name, (1, 1, 1, 1))
    np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=2e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(close, state.anchor, expected.anchor)
    jax.tree.map(close, state.inner.params, expected.inner.params)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in ("cocodc", "noloco"))]
)
def test_every_leaf_of_the_state_lies_in_its_stage(runs, name):
    _, state, _ = runs(name, SHAPE)
    assert state.in_flight or name == "noloco"
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and leaf.size > 2 * R:  # else a counter, or a norm
            axis = stages.stage_axis(leaf.sharding.spec)
            assert axis is not None, (jax.tree_util.keystr(path), leaf.sharding)
            stage = leaf.sharding.shard_shape(leaf.shape)
            assert stage[axis] * 2 == leaf.shape[axis]


@pytest.mark.parametrize(
    "name",
    ["strided", *(pytest.param(n, marks=pytest.mark.slow) for n in CODED if n != "strided")],
)
def test_outer_programs_do_not_talk_between_stages(name):
    """Strided rows, residuals, factors: nothing but norms (scalars) leaves a stage."""
    engine = engine_of(CODED[name](), SHAPE)
    state = engine.init(start())
    loop = engine.sync_loop(state)
    programs, p = loop.programs, 0
    rows, weight = programs.fragments.rows(p), jnp.ones(R)
    anchor, params = (programs.fragments.leaves(t, p) for t in (state.anchor, state.inner.params))
    residuals, everyone = state.codec[p], np.ones(R, bool)
    send = programs.payload_program.lower(
        Values(params, {}), anchor, residuals, rows, Senders(everyone, weight), with_snapshot=True
    )
    sent = send.compile()
    payload = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        send.out_info["payload"],
        sent.output_shardings["payload"],
    )
    draw = Draw(loop.programs.groups.draw(1)) if name == "noloco" else None
    held, arrived = AnchorState(anchor, state.outer[p]), Contributions(payload, weight, draw=draw)
    move = programs.outer_program.lower(held, arrived, rows).compile()
    for what, program in {"send": sent, "move": move}.items():
        found = between_stages(program.as_text())
        assert not found, f"{what}:\n" + "\n".join(found)
    talks = collectives(move.as_text())
    assert any(crosses(groups, 2) for _, groups in talks), "regions must talk, or nothing is seen"


def between_stages(text):
    """Lines of collectives between stages that carry more than a number per region."""
    return [
        line.strip()[:160]
        for line in text.splitlines()
        if (found := collectives(line))
        and crosses(found[0][1], 1)
        and not all(n in ("", "1", str(R)) for n in result_shape(line))
    ]


def result_shape(line):
    return line.split("[", 1)[1].split("]", 1)[0].split(",")


def crosses(groups, stride):
    """Whether a group holds devices of two regions (stride 2) or of two stages (stride 1)."""
    return any(len({d // stride % 2 for d in group}) > 1 for group in groups)


def alone_on(mesh, codec, specs, tree):
    """(exchange of one region, its state at step 0)."""
    exchange = MeshExchange(Regions(1, mesh), codec, specs)
    state = exchange.whole(tree).init(tree)
    return exchange, jax.tree.map(lambda x: x[None], state)


def of_stage(x, spec, stage, lead=0):
    """A stage's part of a leaf with this many axes in front."""
    axis = stages.stage_axis(spec)
    return x if axis is None else np.split(np.asarray(x), 2, axis + lead)[stage]


def test_a_stage_codes_its_own_part_alone():
    inner = PerTensor(make_leaf("low_rank_int4", rank=2), stacked=("blocks",))
    blocks = {f"blocks/{k}": v for k, v in start()["blocks"].items()}
    tree = jax.tree.map(jnp.asarray, {**blocks, "head": start()["head"]})
    tree["norm"] = jnp.arange(5.0)  # whole in every stage
    specs, codec = {**SPECS, "norm": P()}, error_feedback(inner, 0.9)
    exchange, state = alone_on(lc.make_mesh(1, 2), codec, specs, tree)
    one = jax.tree.map(lambda x: x[None], tree)
    _, state = jax.jit(exchange.encode)(one, state)
    payload, state = jax.jit(exchange.encode)(one, state)
    decoded = jax.jit(lambda p: exchange.decode(p, tree))(payload)
    mean = jax.jit(lambda p, w: exchange.reduce(p, w, tree).mean)(payload, jnp.array([2.0]))
    assert exchange.nbytes(tree) == sum(x.nbytes for x in jax.tree.leaves(payload))
    for stage in range(2):
        own = {k: jnp.asarray(of_stage(x, specs[k], stage)) for k, x in tree.items()}
        encode = jax.jit(codec.encode)
        before = encode(own, codec.init(own))[1]
        expected_payload, expected_state = encode(own, before)
        expected = jax.jit(codec.decode)(expected_payload, own)
        for found, wanted in (
            (state.residual, expected_state.residual),
            (decoded, expected),
            (mean, expected),
        ):
            for name, x in wanted.items():
                part = of_stage(found[name], specs[name], stage, 1)[0]
                np.testing.assert_allclose(part, x, atol=1e-5, err_msg=name)


def test_a_payload_that_is_not_accepted_leaves_a_stages_state_alone():
    tree = {"w": jnp.arange(1.0, 9.0).reshape(4, 2)}
    codec = error_feedback(PerTensor(make_leaf("topk", k=1)), 0.9)
    exchange, state = alone_on(lc.make_mesh(1, 2), codec, {"w": P("stage")}, tree)
    encode, one = jax.jit(exchange.encode), {"w": tree["w"][None]}
    _, state = encode(one, state, jnp.array([True]))
    assert np.all(np.any(state.residual["w"].reshape(2, -1), axis=1))  # in both stages
    _, after = encode(one, state, jnp.array([False]))
    jax.tree.map(np.testing.assert_array_equal, after, state)
    _, after = encode(one, state, jnp.array([True]))
    assert np.any(after.residual["w"] != state.residual["w"])


def test_the_mean_rank_of_stages_is_the_mean_of_their_parts():
    inner = PerTensor(make_leaf("low_rank", rank=3))
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(64, rank)) @ rng.normal(size=(rank, 64)) for rank in (1, 3)]
    tree = {"w": jnp.asarray(np.concatenate(parts), jnp.float32)}
    exchange, state = alone_on(lc.make_mesh(1, 2), inner, {"w": P("stage")}, tree)
    encode, one = jax.jit(exchange.encode), {"w": tree["w"][None]}
    _, state = encode(one, state)
    payload, _ = encode(one, state)
    found = jax.jit(lambda p, w: exchange.reduce(p, w, tree, 0.999).rank)(payload, jnp.ones(1))
    own = []
    for part in parts:
        like = {"w": jnp.asarray(part, jnp.float32)}
        encode = jax.jit(inner.encode)
        sent, state = encode(like, inner.init(like))
        sent, _ = encode(like, state)
        sent_R = jax.tree.map(lambda x: x[None], sent)
        rank = jax.jit(lambda sent, w, like=like: inner.mean_rank(sent, w, like, 0.999))
        own.append(float(rank(sent_R, jnp.ones(1))))
    assert own[0] < own[1]
    np.testing.assert_allclose(found, np.mean(own), rtol=1e-4)


@pytest.mark.parametrize("codec", ["int8", "int4_ef"])
def test_a_stage_reduces_slices_of_its_own_part(codec):
    """Two-shot in two stages against each stage's part reduced on a mesh without stages."""
    made = make_leaf("int4") if codec == "int4_ef" else make_leaf("int8")
    inner = PerTensor(made, reduce="two_shot", stacked=("blocks",))
    inner = error_feedback(inner, 0.9) if codec == "int4_ef" else inner
    rng = np.random.default_rng(2)
    shapes = {"blocks/w": (4, 6, 6), "blocks/scale": (4, 6), "head": (6, 8), "norm": (5,)}
    specs = {**SPECS, "norm": P()}
    delta_R = {k: rng.standard_normal((R, *s)).astype(np.float32) for k, s in shapes.items()}
    weight_R = jnp.array([1.0, 3.0])

    def mean_of(mesh, delta_R, specs):
        regions = Regions(R, mesh)
        exchange = MeshExchange(regions, inner, specs, parts=R)
        like = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in delta_R.items()}
        state = jax.tree.map(lambda x: jnp.stack([x] * R), exchange.whole(like).init(like))

        def reduce(delta_R, state):
            for _ in range(2):  # the second round has residuals
                payload, state = exchange.encode(delta_R, state)
            return exchange.reduce(payload, weight_R, like).mean, payload

        place = {k: regions.sharding("region", *specs[k]) for k in delta_R}
        run = jax.jit(reduce).lower(jax.device_put(delta_R, place), state).compile()
        mean, payload = run(jax.device_put(delta_R, place), state)
        assert exchange.nbytes(like) * R == sum(x.nbytes for x in jax.tree.leaves(payload))
        return mean, run.as_text(), exchange.traffic(like, np.ones(R, bool))

    mean, text, traffic = mean_of(lc.make_mesh(*SHAPE), delta_R, specs)
    assert traffic.route == "two_shot" and not between_stages(text)
    for stage in range(2):
        part = {k: of_stage(x, specs[k], stage, 1) for k, x in delta_R.items()}
        alone, _, _ = mean_of(lc.make_mesh(2), part, {name: P() for name in part})
        for name, found in alone.items():
            own = of_stage(mean[name], specs[name], stage, 1)
            np.testing.assert_allclose(own, found, rtol=1e-5, atol=1e-6)


QUICK_STACKS = {("int8", 4), ("stat4", 4), ("random_k", 2)}
STACKS = {"layers/gain": (8, 768), "layers/few": (8, 3, 256), "layers/w": (8, 30, 70)}


def coded_in_stages(name, shapes, weight_R, count):
    """(mean, payload, state) after two rounds of two regions and so many stages, or one device."""
    codec = make(name, **({"rank": 2} if "low_rank" in name else {}), stacked=("layers",))
    codec, regions = error_feedback(codec, 0.9), len(weight_R)
    like = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}
    rng = np.random.default_rng(1)
    delta_R, weights_R = (
        {k: rng.standard_normal((regions, *s)).astype(np.float32) for k, s in shapes.items()}
        for _ in range(2)
    )
    shape = (2, count) if count > 1 else (1, 1)
    given = Regions(regions, lc.make_mesh(*shape)), codec, dict.fromkeys(shapes, P("stage"))
    parts = regions if codec.requantizable(like) else None
    exchange = whole = MeshExchange(*given, parts=parts)
    if parts is not None:  # before it is dealt out to slices
        whole = MeshExchange(*given, parts=parts, separate=True)

    @jax.jit
    def round_(state, delta_R, weights_R, weight_R):
        read = weights_R if codec.reads_params else None
        payload, state_of_whole = whole.encode(delta_R, state, params_A=read)
        sent, state = exchange.encode(delta_R, state, params_A=read)
        mean = exchange.reduce(sent, weight_R, like).mean
        return mean, payload, (state, state_of_whole)

    state = jax.tree.map(lambda x: np.stack([x] * regions), exchange.whole(like).init(like))
    given = delta_R, weights_R, np.array(weight_R, np.float32)
    # From the host both times: one program for two rounds.
    _, _, (state, _) = jax.tree.map(np.asarray, round_(state, *given))
    return jax.tree.map(np.asarray, round_(state, *given))


def assert_equal_stacks(name, shapes, weight_R, count):
    """All stages' layers side by side are those of one device, bit for bit."""
    alone = coded_in_stages(name, shapes, weight_R, 1)
    for path, x in jax.tree_util.tree_leaves_with_path(
        coded_in_stages(name, shapes, weight_R, count)
    ):
        y, where = functools.reduce(_inside, path, alone), jax.tree_util.keystr(path)
        if x.shape != y.shape and x.shape[1] * x.shape[2] == y.shape[1]:
            x = x.reshape(y.shape)  # [R, stages, layers of a stage, ...]
        elif x.shape != y.shape:
            y = np.stack([y] * count, 1)  # equal in all stages
        np.testing.assert_array_equal(x, y, err_msg=where)


def _inside(tree, key):
    return (
        getattr(tree, key.name)
        if hasattr(key, "name")
        else tree[getattr(key, "key", None) or key.idx]
    )


@pytest.mark.parametrize(
    "name, count",
    [
        case if case in QUICK_STACKS else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product((n for n in names() if not n.endswith("_ef")), (2, 4))
    ],
)
def test_what_a_codec_gives_for_stacked_layers_does_not_depend_on_stages(name, count):
    """Payloads, residuals, and the mean: of four slices where it is encoded again."""
    assert_equal_stacks(name, STACKS, (1.0, 2.0, 3.0, 4.0), count)


@pytest.mark.parametrize(
    "name",
    [
        "int8",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("int4", "int4_affine", "stat4", "e3m0")
        ),
    ],
)
def test_a_stage_of_one_layer_has_the_units_of_the_stack(name):
    """Two layers of 768 in two slices: of a stage's one layer alone, units of 256 do not divide."""
    assert_equal_stacks(name, {"layers/gain": (2, 768)}, (1.0, 2.0), 2)


def test_fragments_are_cut_inside_each_stage():
    shapes = {"blocks/w": jax.ShapeDtypeStruct((6, 2), np.float32)}
    cut = partition(shapes, 2, "strided", stacked=("blocks",), stages=2)
    assert [piece.rows for (piece,) in cut.parts] == [(0, 2, 3, 5), (1, 4)]
    np.testing.assert_array_equal(cut.rows(0)["blocks/w"], [[0, 2], [0, 2]])
    whole = {"blocks/w": jnp.arange(12.0).reshape(1, 6, 2)}
    taken = fragments.take(whole, cut.rows(0))
    np.testing.assert_array_equal(taken["blocks/w"][0], whole["blocks/w"][0, [0, 2, 3, 5]])
    again = fragments.put({"blocks/w": jnp.zeros((1, 6, 2))}, cut.rows(0), taken)
    np.testing.assert_array_equal(again["blocks/w"][0, [0, 2, 3, 5]], taken["blocks/w"][0])
    np.testing.assert_array_equal(again["blocks/w"][0, [1, 4]], 0)
    with pytest.raises(ValueError, match=r"only 3 units to deal .* of a stage"):
        partition(shapes, 4, "strided", stacked=("blocks",), stages=2)
    with pytest.raises(ValueError, match="6 rows for 4 stages"):
        partition(shapes, 2, "strided", stacked=("blocks",), stages=4)


def test_what_does_not_fit_stages_is_refused():
    method = lc.methods.diloco(2)
    engine = engine_of(method, SHAPE)
    with pytest.raises(ValueError, match="2 stages, but specs cut no leaf over them"):
        engine.programs_for(make_layout(start(), None), specs=None)
