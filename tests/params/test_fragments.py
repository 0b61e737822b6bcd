"""Fragments partition any tree exactly, and equal ones share their compiled programs."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations

import lowcomm_jax as lc
from lowcomm_jax.params.fragments import partition, put, take

PATTERNS = ("sequential", "strided", "balanced")
STACK = ("stack",)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def random_shapes(rng):
    """Numbered blocks, a scanned stack, single leaves and scalars; any of them may be missing."""
    shapes = {"emb": struct(int(rng.integers(1, 9)), 3)}
    for block in range(rng.integers(0, 5)):
        shapes[f"blocks/{block}/w"] = struct(int(rng.integers(1, 6)), 2)
        if rng.random() < 0.5:
            shapes[f"blocks/{block}/s"] = struct()
    layers = int(rng.integers(0, 6))
    if layers:
        shapes["stack/a"] = struct(layers, 2, 3)
        shapes["stack/b"] = struct(layers)
    shapes["norm"] = struct(int(rng.integers(1, 4)))
    shapes["scale"] = struct()
    return shapes


def unit_of(name, row):
    """The unit an element belongs to, said independently of the code under test."""
    if name.startswith("stack/"):
        return ("stack", row)
    found = re.match(r"blocks/(\d+)/", name)
    return ("block", int(found.group(1))) if found else ("leaf", name)


def units(shapes):
    """Bytes of every unit, by unit."""
    sizes = {}
    for name, leaf in shapes.items():
        rows = range(leaf.shape[0]) if name.startswith("stack/") else [None]
        for row in rows:
            share = 4 * int(np.prod(leaf.shape)) // len(rows)
            sizes[unit_of(name, row)] = sizes.get(unit_of(name, row), 0) + share
    return sizes


def values(shapes, lead, rng):
    return {k: rng.standard_normal((lead, *s.shape)).astype(np.float32) for k, s in shapes.items()}


def stack_of(shapes):
    """The stacked prefixes these shapes have; one that matches nothing would be refused."""
    return [s for s in STACK if any(name.startswith(s) for name in shapes)]


def cases(seed, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        shapes = random_shapes(rng)
        total = len(units(shapes))
        rest = str(rng.choice(["own", "dealt"]))
        outside = sum(u[0] == "leaf" for u in units(shapes))
        most = total if rest == "dealt" or outside == total else total - outside + 1
        yield shapes, int(rng.integers(1, most + 1)), rest


@pytest.mark.parametrize("pattern", PATTERNS)
def test_parts_cover_each_element_exactly_once(pattern):
    for shapes, count, rest in cases(1, 60):
        cut = partition(shapes, count, pattern, rest, stack_of(shapes))
        assert len(cut) == count
        covered = {k: np.zeros(s.shape, int) for k, s in shapes.items()}
        for p, part in enumerate(cut.parts):
            assert part, "a fragment is empty"
            for piece in part:
                covered[piece.name][... if piece.rows is None else list(piece.rows)] += 1
            assert cut.numel(p) == sum(int(np.prod(x.shape)) for x in cut.like(p).values())
        assert all((n == 1).all() for n in covered.values()), (pattern, count, rest)
        assert sum(map(cut.numel, range(count))) == sum(n.size for n in covered.values())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_unit_is_never_torn_apart(pattern):
    for shapes, count, rest in cases(2, 30):
        cut = partition(shapes, count, pattern, rest, stack_of(shapes))
        home = {}
        for p, part in enumerate(cut.parts):
            for piece in part:
                stacked = piece.name.startswith("stack/")
                every = range(shapes[piece.name].shape[0]) if stacked else [None]
                for row in every if piece.rows is None else piece.rows:
                    assert home.setdefault(unit_of(piece.name, row), p) == p


@pytest.mark.parametrize("pattern", PATTERNS)
def test_take_and_put_are_inverse(pattern):
    rng = np.random.default_rng(3)
    for shapes, count, rest in cases(3, 4):
        cut = partition(shapes, count, pattern, rest, stack_of(shapes))
        tree, rebuilt = (
            values(shapes, 2, rng),
            {k: jnp.zeros((2, *s.shape)) for k, s in shapes.items()},
        )
        for p in range(count):
            part = take(cut.leaves(tree, p), cut.rows(p))
            assert {k: x.shape[1:] for k, x in part.items()} == {
                k: s.shape for k, s in cut.like(p).items()
            }
            rebuilt |= put(cut.leaves(rebuilt, p), cut.rows(p), part)
            back = take(cut.leaves(rebuilt, p), cut.rows(p))
            jax.tree.map(np.testing.assert_array_equal, back, part)
        jax.tree.map(np.testing.assert_array_equal, rebuilt, tree)


def test_balanced_is_within_the_greedy_bound():
    for shapes, count, _ in cases(4, 60):
        cut = partition(shapes, count, "balanced", "dealt", stack_of(shapes))
        load = [4 * cut.numel(p) for p in range(count)]
        sizes = units(shapes).values()
        # Graham: the last unit put on the heaviest bin met a bin of at most the mean of the rest.
        assert max(load) <= sum(sizes) / count + (1 - 1 / count) * max(sizes)
        assert max(load) - min(load) <= max(sizes)


def names(cut):
    return [[piece.name for piece in part] for part in cut.parts]


SIX = {"emb": struct(9, 2), **{f"blocks/{i}": struct(2) for i in range(6)}, "head": struct(2, 9)}


def test_by_hand_on_six_blocks():
    def b(*numbers):
        return [f"blocks/{n}" for n in numbers]

    assert names(partition(SIX, 3, "strided", "dealt")) == [
        ["emb", *b(2, 5)],
        [*b(0, 3), "head"],
        b(1, 4),
    ]
    assert names(partition(SIX, 4, "strided", "own")) == [
        b(0, 3),
        b(1, 4),
        b(2, 5),
        ["emb", "head"],
    ]
    assert names(partition(SIX, 3, "sequential", "dealt")) == [
        ["emb", *b(0, 1)],
        b(2, 3, 4),
        [*b(5), "head"],
    ]
    assert names(partition(SIX, 4, "sequential", "own")) == [
        b(0, 1),
        b(2, 3),
        b(4, 5),
        ["emb", "head"],
    ]
    # 18-element leaves first, one bin each; six blocks of 2 go to the third.
    assert sorted(map(sorted, names(partition(SIX, 3, "balanced", "dealt")))) == sorted(
        [["emb"], ["head"], b(*range(6))]
    )


def test_scanned_rows_by_hand():
    cut = partition({"stack/w": struct(7, 2)}, 3, "strided", "dealt", STACK)
    assert [part[0].rows for part in cut.parts] == [(0, 3, 6), (1, 4), (2, 5)]
    cut = partition({"stack/w": struct(7, 2)}, 3, "sequential", "dealt", STACK)
    assert [part[0].rows for part in cut.parts] == [(0, 1, 2), (3, 4), (5, 6)]


@pytest.mark.parametrize("rest", ["own", "dealt"])
def test_blocks_are_dealt_in_numeric_order(rest):
    """Dictionaries with string keys sort 10 before 2; blocks must not."""
    tree = {"blocks": {str(i): np.zeros(2, np.float32) for i in range(12)}}
    if rest == "own":
        tree["emb"] = np.zeros(2, np.float32)
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    shapes = {jax.tree_util.keystr(k, simple=True, separator="/"): struct(2) for k, _ in paths}
    cut = partition(shapes, 3 if rest == "own" else 2, "sequential", rest)
    got = [{int(n.split("/")[1]) for n in part} for part in names(cut)[:2]]
    assert got == [set(range(6)), set(range(6, 12))]


def test_broken_regexes_are_named():
    with pytest.raises(ValueError) as error:
        partition(SIX, 2, ("(", "[a"))
    assert "regex '('" in str(error.value) and "regex '[a'" in str(error.value)


def test_regex_violations_are_listed_together():
    with pytest.raises(ValueError) as error:
        partition(SIX, 4, ["^emb", "blocks/[0-3]", "blocks/[3-4]$", "nothing", "none"])
    text = str(error.value)
    for part in ("5 regexes", "'head'", "'blocks/5'", "'blocks/3'", "'nothing'", "'none'"):
        assert part in text
    cut = partition(SIX, 2, ["emb|head", "blocks"])
    assert names(cut) == [["emb", "head"], [f"blocks/{i}" for i in range(6)]]


def test_more_fragments_than_units_are_refused():
    for pattern, rest in itertools.product(PATTERNS, ("own", "dealt")):
        with pytest.raises(ValueError, match="fragments=9"):
            partition(SIX, 9, pattern, rest)
    with pytest.raises(ValueError, match="fragments=8"):
        partition({"stack/w": struct(7, 2)}, 8, stacked=STACK)
    assert len(partition(SIX, 8)) == 8


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="'layers'"):
        partition(SIX, 2, stacked=("layers",))
    with pytest.raises(ValueError, match="'scale'"):
        partition({**SIX, "scale": struct()}, 2, stacked=("scale",))


def stack_loss(params, batch, rng):
    del rng
    return jnp.mean((batch["x"] @ params["stack"]["w"].sum(axis=0)) ** 2)


@pytest.mark.parametrize("count,shared", [(3, True), (4, False)])
def test_equal_fragments_share_one_executable(count, shared):
    """6 layers: three fragments of 2 rows are one program; four of 2, 2, 1, 1 rows are two."""
    method = lc.methods.streaming_diloco(12, count, 1, 0.3)
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    engine = lc.Engine(stack_loss, optax.sgd(0.1), method, 2, mesh=mesh, stacked=STACK)
    state = engine.init({"stack": {"w": np.ones((6, 2), np.float32)}})
    batch = {"x": np.ones((2, 1, 2), np.float32)}
    done = 0

    def until(step):
        nonlocal state, done
        while done < step:
            state, _ = engine.step(state, batch)
            done += 1

    until(12 // count + 1)  # fragment 0 was sent and has landed
    again = compilations(lambda: until(13))
    assert state.counters.sends.tolist() == [1] * count
    assert (again == 0) == shared
    assert compilations(lambda: until(25)) == 0


def test_fragments_are_balanced_by_bytes_not_by_elements():
    """Two bf16 values weigh as much as one fp32 value."""
    halves = {name: jax.ShapeDtypeStruct((8,), jnp.bfloat16) for name in "ab"}
    shapes = {**halves, "c": jax.ShapeDtypeStruct((8,), jnp.float32)}
    parts = partition(shapes, 2, "balanced").parts
    assert sorted(sorted(piece.name for piece in part) for part in parts) == [["a", "b"], ["c"]]


def test_a_unit_of_a_stack_in_stages_weighs_a_row_of_every_stage():
    """Two units of 32 bytes, a leaf of 40 and one of 8: 40 + 8 and 32 + 32, not 40 and 72."""
    shapes = {"a": struct(10), "b": struct(2), "stack/w": struct(4, 4)}
    parts = partition(shapes, 2, "balanced", stacked=STACK, stages=2).parts
    assert [[piece.name for piece in part] for part in parts] == [["a", "b"], ["stack/w"]]
