"""A checkpoint whose parts several processes have written: sealed once, read whole."""

import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint.checkpoint_cases import assert_same

from lowcomm_jax.adloco.engine import AdaptiveEngine
from lowcomm_jax.checkpoint import Checkpoints, DamagedError, load, manager, store
from lowcomm_jax.engine import Engine
from lowcomm_jax.mesh.arrays import Box, fetch_boxes

DOCUMENT = {"step": 7, "regions": 2, "config": {"lr": 0.1}}


def arrays():
    rng = np.random.default_rng(0)
    return {
        "inner/params/a": rng.normal(size=(4, 3)).astype(np.float32),
        "inner/params/b": rng.normal(size=(2, 6)).astype(ml_dtypes.bfloat16),
        "anchor/empty": np.zeros((0, 3), np.float32),
        "counters/step": np.int64(7),
    }


def shapes(named):
    return {name: [np.dtype(x.dtype).name, list(np.shape(x))] for name, x in named.items()}


def boxes_of(process):
    """Process 0 has rows of `a` and what everybody has; `b` is cut along its second axis."""
    named = arrays()
    a, b = named["inner/params/a"], named["inner/params/b"]
    if process == 0:
        return {
            "inner/params/a": [Box((0, 0), a[:1]), Box((1, 0), a[1:2])],
            "inner/params/b": [Box((0, 0), b[:, :2])],
            "anchor/empty": [Box((0, 0), named["anchor/empty"])],
            "counters/step": [Box((), np.asarray(named["counters/step"]))],
        }
    return {"inner/params/a": [Box((2, 0), a[2:])], "inner/params/b": [Box((0, 2), b[:, 2:])]}


def write(path, processes=(0, 1)):
    store.begin(path)
    for process in processes:
        store.write_part(path, process, boxes_of(process))


@pytest.fixture
def path(tmp_path):
    return store.epath.Path(tmp_path / "7")


def sealed(path):
    write(path)
    store.seal(path, 2, shapes(arrays()), DOCUMENT)
    return path


def test_sealed_parts_read_as_the_arrays_they_came_from(path):
    document = store.read_document(sealed(path))
    assert document["config"] == {"lr": 0.1}
    assert {x.name for x in path.iterdir()} == {"part_0", "part_1", "document.json"}
    assert_same(store.read_arrays(path, document), arrays())
    found = store.saved_shapes(document)
    assert {n: (x.dtype.name, list(x.shape)) for n, x in found.items()} == {
        n: (dtype, shape) for n, (dtype, shape) in shapes(arrays()).items()
    }


def test_it_appears_under_its_name_when_it_is_sealed(path):
    write(path)
    assert store.steps(path.parent) == {}
    assert [step for step, _ in store.leftovers(path.parent)] == [7]
    assert store.has_part(path, 1) and not store.has_part(path, 2)
    store.seal(path, 2, shapes(arrays()), DOCUMENT)
    assert list(store.steps(path.parent)) == [7] and store.leftovers(path.parent) == []


def test_who_is_ended_just_before_the_new_one_appears_leaves_the_older(path, monkeypatch):
    sealed(path)
    write(path)
    rename = type(path).rename

    def killed(self, target):
        if self == store.unfinished(path):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            store.seal(path, 2, shapes(arrays()), {**DOCUMENT, "config": {"lr": 0.2}})
    (older,) = store.steps(path.parent).values()
    assert store.read_document(older)["config"] == {"lr": 0.1}
    assert_same(store.read_arrays(older, store.read_document(older)), arrays())


def test_a_missing_part_or_element_is_named_and_nothing_is_sealed(path):
    write(path, processes=[0])
    with pytest.raises(DamagedError, match=r"part_1\.json is missing"):
        store.seal(path, 2, shapes(arrays()), DOCUMENT)
    with pytest.raises(DamagedError, match="inner/params/a: 6 of 12 elements"):
        store.seal(path, 1, shapes(arrays()), DOCUMENT)
    assert store.steps(path.parent) == {}


@pytest.mark.parametrize("process", [0, 1])
def test_a_part_that_is_gone_or_altered_is_found(path, process):
    document = store.read_document(sealed(path))
    part = path / f"part_{process}"
    altered = {**document, "arrays": {k: list(v) for k, v in document["arrays"].items()}}
    name = "inner/params/a"
    dtype, shape, boxes = document["arrays"][name]
    other = [[*b[:-1], "0" * 32] if b[0] == process else b for b in boxes]
    altered["arrays"][name] = [dtype, shape, other]
    with pytest.raises(DamagedError, match=f"part_{process}: {name} at .* differs from its digest"):
        store.read_arrays(path, altered)
    shutil.rmtree(part)
    with pytest.raises(DamagedError, match=f"part_{process} is missing"):
        store.read_arrays(path, document)


def test_what_every_process_has_whole_is_the_leaders():
    """Cut arrays: `tests/mesh/test_one_program.py`, in real processes."""
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    named = {"host": x, "device": jax.device_put(x)}
    assert fetch_boxes(named, leads=False) == {"host": [], "device": []}
    for (box,) in fetch_boxes(named, leads=True).values():
        assert box.first == (0, 0)
        assert_same({"x": box.values}, {"x": x})


class Two:
    """The leader of two processes; the other one says what it is given to say."""

    count, index, leads = 2, 0, True

    def __init__(self, other):
        self.other = other

    def check(self):
        pass

    def broadcast_from_leader(self, what, act):
        return act()

    def everyones(self, what, value):
        return [value, self.other]


def test_a_process_that_could_not_write_its_part_is_named(path, monkeypatch):
    monkeypatch.setattr(manager, "leader", lambda: Two("OSError: No space left on device"))
    with pytest.raises(RuntimeError) as error, Checkpoints(path.parent) as checkpoints:
        checkpoints._shared = True
        store.begin(path)
        given = (path, 2, boxes_of(0), shapes(arrays()), {"step": 7})
        checkpoints._pending = checkpoints._worker.submit(checkpoints._write, *given)
    assert "- process 1: OSError: No space left on device" in str(error.value)
    assert store.steps(path.parent) == {}


def test_where_every_process_wrote_its_part_the_others_go_on_too(path, monkeypatch):
    second = Two(None)
    second.leads = False
    monkeypatch.setattr(manager, "leader", lambda: second)
    with Checkpoints(path.parent) as checkpoints:
        checkpoints._shared = True
        checkpoints._pending = checkpoints._worker.submit(lambda: None)
        checkpoints.wait()
        assert checkpoints._pending is None


def test_who_does_not_see_the_leaders_token_does_not_write(path, monkeypatch):
    for seen in (True, False):
        two = Two(seen)
        monkeypatch.setattr(manager, "leader", lambda two=two: two)
        with Checkpoints(path.parent) as checkpoints:
            assert checkpoints._all_reach() is seen
    assert list(path.parent.iterdir()) == []
    monkeypatch.setattr(manager, "leader", lambda: Two(True))
    with Checkpoints(path.parent / "made" / "here") as checkpoints:
        assert checkpoints._all_reach()


def test_what_is_neither_a_step_nor_half_of_one_is_left_alone(path):
    left = ("3.unfinished.deleted", "4.replaced.deleted", "8.deleted")
    for name in ("7", "8.replaced", "9.replaced", "notes", *left):
        (path.parent / name).mkdir()
    assert {n: p.name for n, p in store.steps(path.parent).items()} == {
        7: "7",
        8: "8.replaced",
        9: "9.replaced",
    }
    assert [p.name for _, p in store.leftovers(path.parent)] == [*left]


def test_parts_begin_in_a_folder_that_is_not_there_yet(path):
    store.begin(path.parent / "made" / "7")
    assert (path.parent / "made").exists() and not store.steps(path.parent / "made")


def test_parts_of_an_interrupted_save_are_not_those_of_the_next(path):
    store.begin(path)
    store.write_part(path, 1, boxes_of(1))
    store.begin(path)
    assert not store.has_part(path, 1)


def test_half_a_deletion_leaves_no_step(path, monkeypatch):
    path.mkdir(parents=True)

    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.remove(path)
    assert store.steps(path.parent) == {}
    assert [n for n, _ in store.leftovers(path.parent)] == [7]
    (_, left), *_ = store.leftovers(path.parent)
    store.remove(left)
    assert not store.leftovers(path.parent)


@pytest.mark.parametrize(
    "under_way, counts, change, refused",
    [
        ([], (3, 3), False, None),
        ([], (3, 4), True, None),
        ([], (3, 4), False, "change_regions=True"),
        ([{"key": "0@4"}], (3, 3), False, None),
        ([{"key": "0@4"}], (3, 4), True, "payloads in flight"),
    ],
)
def test_another_number_of_regions_is_refused_unless_it_is_asked_for(
    under_way, counts, change, refused
):
    found = load._region_problems({"": under_way}, counts, change)
    assert len(found) == (refused is not None) and all(refused in line for line in found)


@pytest.mark.parametrize(
    "document, kind, refused",
    [
        ({}, Engine, []),
        ({"trainers": {"live": {}}}, AdaptiveEngine, []),
        ({}, AdaptiveEngine, ["engine: Engine -> AdaptiveEngine"]),
        ({"trainers": {"live": {}}}, Engine, ["engine: AdaptiveEngine -> Engine"]),
    ],
)
def test_a_run_of_one_kind_of_engine_does_not_go_on_in_the_other(document, kind, refused):
    assert load.engine_problems(document, kind.__new__(kind)) == refused
