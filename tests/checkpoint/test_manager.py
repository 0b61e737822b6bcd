"""What is saved when, what is kept, and what is refused."""

import errno
import itertools
import os
import re
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import optax
import pytest
from checkpoint.checkpoint_cases import (
    REGIONS,
    assert_same,
    bf16_params,
    loss_on_floats,
    make_engine,
    one_device,
    train,
    values,
)

import lowcomm_jax as lc
from lowcomm_jax.checkpoint import Checkpoints, load, store
from lowcomm_jax.state import leaves
from lowcomm_jax.state.train_state import TrainState

CONFIG = {"steps": 100, "optimizer": {"lr": 0.3, "betas": [0.9, 0.95]}, "data": {"seed": 1}}


@pytest.fixture(scope="module")
def engine():
    return make_engine("local_sgd")


@pytest.fixture(scope="module")
def start(engine):
    return engine.init(bf16_params())


def at(state, step):
    counters = state.counters.copy()
    counters.step = np.int64(step)
    return state.replace(counters=counters)


def save_all(checkpoints, state, metrics):
    for step, metric in metrics.items():
        checkpoints.save(at(state, step), extra={}, config={}, metrics=metric)
    checkpoints.wait()


def test_every_field_of_the_state_has_a_place():
    fields = set(TrainState.__dataclass_fields__) - {"layout"}
    assert fields == {leaves.field_of(name) for name in leaves.REGION_AXIS}


def test_nothing_to_restore(engine, tmp_path):
    with Checkpoints(tmp_path / "none") as checkpoints:
        assert checkpoints.restore(engine, bf16_params()) is None
        assert checkpoints.steps() == []
        assert checkpoints.latest() is None
        with pytest.raises(ValueError, match="no checkpoint of step 7"):
            checkpoints.restore(engine, bf16_params(), step=7)
    assert not (tmp_path / "none").exists()


def test_bad_settings(tmp_path):
    with pytest.raises(ValueError, match="keep_last=0: keep at least 1"):
        Checkpoints(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="backslash as a slash; choose another folder"):
        Checkpoints(tmp_path / "a\\b")


def test_layout_on_disk(start, tmp_path):
    with Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(at(start, 4), extra={"n": [1]}, config=CONFIG, metrics={"loss": 2.5})
        document = checkpoints.document()
    assert {p.name for p in (tmp_path / "4").iterdir()} == {"document.json", "part_0"}
    arrays = document["arrays"]
    assert arrays["anchor/a"][:2] == ["float32", [1, 3, 5]]
    assert arrays["frozen/table"][:2] == ["int32", [5]]
    assert arrays["inner/params/c"][:2] == ["bfloat16", [3, 2, 3, 2]]
    assert arrays["counters/last_landed"][:2] == ["int64", [1, 3]]
    ((process, number, first, *kind, digest),) = arrays["anchor/a"][2]
    assert (process, number, first, kind) == (0, 0, [0, 0, 0], ["float32", [1, 3, 5]])
    assert digest == store.digest(np.asarray(start.anchor["a"]))
    assert {k: document[k] for k in ("config", "extra", "metrics", "step", "regions")} == {
        "config": CONFIG,
        "extra": {"n": [1]},
        "metrics": {"loss": 2.5},
        "step": 4,
        "regions": 3,
    }
    assert set(document["packages"]) >= {"jax", "optax", "orbax-checkpoint"}


@pytest.mark.parametrize("told, kept", [({"keep_last": 2}, [5, 9]), ({}, [2, 5, 9])])
def test_the_last_ones_are_kept_and_three_unless_told(told, kept, start, tmp_path):
    with Checkpoints(tmp_path, **told) as checkpoints:
        save_all(checkpoints, start, dict.fromkeys((1, 2, 5, 9)))
        assert checkpoints.steps() == kept
        assert checkpoints.latest() == 9


def test_an_empty_section_is_a_value():
    """Else a section that was emptied, or filled, would be no difference."""
    assert load.dotted({"a": {}, "b": {"c": 1}, "d": [2]}) == {"a": {}, "b.c": 1, "d": [2]}


def test_keep_best_beside_the_last(start, tmp_path):
    metrics = {
        1: {"eval": 3.0},
        2: {"eval": 1.5, "other": 9.0},
        3: {"eval": float("nan")},
        4: {"other": 0.1},
        5: {"eval": 1.7},
        6: {"eval": 2.0},
    }
    with Checkpoints(tmp_path, keep_last=2, keep_best="eval") as checkpoints:
        save_all(checkpoints, start, metrics)
        assert checkpoints.steps() == [2, 5, 6]
        assert checkpoints.best() == 2
        save_all(checkpoints, start, {7: {"eval": 1.4}})
        assert checkpoints.steps() == [6, 7]
        assert checkpoints.best() == 7


def test_a_checkpoint_without_metrics_is_never_the_best(start, tmp_path):
    with Checkpoints(tmp_path / "made" / "here", keep_best="eval") as checkpoints:
        save_all(checkpoints, start, {1: None, 2: {"eval": 2.0}, 3: None})
        assert checkpoints.best() == 2
        assert checkpoints.document(3)["metrics"] == {}


def test_the_later_of_equally_good_checkpoints_is_the_best(start, tmp_path):
    with Checkpoints(tmp_path, keep_last=1, keep_best="eval") as checkpoints:
        save_all(checkpoints, start, {2: {"eval": 1.5}, 3: {"eval": 1.5}, 4: {"eval": 2.0}})
        assert checkpoints.best() == 3
        assert checkpoints.steps() == [3, 4]


def test_metrics_added_later_count_as_those_of_a_save(start, tmp_path):
    with Checkpoints(tmp_path, keep_last=1, keep_best="eval") as checkpoints:
        save_all(checkpoints, start, {1: {"eval": 2.0}, 2: None})
        assert checkpoints.best() == 1
        checkpoints.add_metrics(2, {"eval": 1.5, "other": 1.0})
        assert checkpoints.best() == 2
        assert checkpoints.steps() == [2]  # the first one is neither the best nor the last
        checkpoints.add_metrics(2, {"eval": float("nan")})
        assert checkpoints.best() is None  # measured, and worth nothing
        checkpoints.add_metrics(2, {"eval": 1.7})
        assert checkpoints.document(2)["metrics"] == {"eval": 1.7, "other": 1.0}
        save_all(checkpoints, start, {3: {"eval": 1.9}})
        assert checkpoints.steps() == [2, 3]
        with pytest.raises(ValueError, match="no checkpoint of step 4"):
            checkpoints.add_metrics(4, {"eval": 1.0})
        save_all(checkpoints, start, {3: None})  # replaced, with what was added
        assert checkpoints.document(3)["metrics"] == {}


@pytest.mark.parametrize("left", [{}, {"metrics.json.new": '{"ev'}, {"metrics.json": '{"ev'}])
def test_a_kill_before_the_metrics_leaves_a_whole_checkpoint(left, engine, start, tmp_path):
    """Before they are begun, and halfway; or their file alone was damaged later."""
    with Checkpoints(tmp_path, keep_last=1, keep_best="eval") as checkpoints:
        save_all(checkpoints, start, {1: {"eval": 2.0}, 2: None})
        for name, text in left.items():
            (tmp_path / "2" / name).write_text(text)
        assert checkpoints.best() == 1
        restored = checkpoints.restore(engine, bf16_params())
        assert restored.step == 2 and restored.skipped == []
        checkpoints.add_metrics(2, {"eval": 1.5})
        assert checkpoints.best() == 2


def test_a_damaged_checkpoint_is_not_counted_among_the_last(start, tmp_path):
    """Else a run that goes on from an older one would delete what it came from."""
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        save_all(checkpoints, start, dict.fromkeys((2, 4, 6)))
        checkpoints._damaged.add(6)
        checkpoints._clean(6)
        assert checkpoints.steps() == [4, 6]
        checkpoints._clean(4)  # what is later than the newest stays: it may be under way
        assert checkpoints.steps() == [4, 6]
        save_all(checkpoints, start, {7: None})
        assert checkpoints.steps() == [4, 7]


def test_an_older_step_is_not_saved_beside_later_ones(start, tmp_path):
    """A damaged step that is saved anew is as good as any."""
    with Checkpoints(tmp_path) as checkpoints:
        save_all(checkpoints, start, dict.fromkeys((3, 6)))
        checkpoints._damaged.add(6)
        save_all(checkpoints, start, {6: None})
        with pytest.raises(ValueError, match=r"step 5 cannot be saved.*later steps \[6\]"):
            checkpoints.save(at(start, 5), extra={}, config={})


def test_save_returns_before_it_is_written_and_survives_donation(tmp_path, monkeypatch):
    engine = make_engine("diloco")
    state = train(engine, engine.init(bf16_params()), range(1, 4))
    before = values(state)
    gate, write = threading.Event(), store.write_part

    def slow(*args):
        assert gate.wait(60)
        write(*args)

    monkeypatch.setattr(store, "write_part", slow)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, extra={}, config={})
        old = state.inner.params["a"]
        train(engine, state, range(4, 6))
        # From 0.11.2 on jax copies on a CPU what a view of NumPy's shares, in place of donating it.
        assert old.is_deleted() or jax.__version_info__ >= (0, 11, 2)
        assert checkpoints.steps() == []
        gate.set()
        found = checkpoints.restore(engine, bf16_params())
    assert_same(values(found.state), before)
    assert jax.tree.structure(found.state) == jax.tree.structure(state)


def test_a_failed_save_is_raised_by_the_next_call(start, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_part", lambda *args: 1 / 0)
        checkpoints.save(at(start, 1), extra={}, config={})
        with pytest.raises(ZeroDivisionError):
            checkpoints.save(at(start, 2), extra={}, config={})
    checkpoints.save(at(start, 2), extra={}, config={})
    checkpoints.close()
    assert checkpoints.steps() == [2]


def test_extra_must_be_json(start, tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(TypeError, match="JSON"):
        checkpoints.save(start, extra={"rng": np.arange(3)}, config={})


def test_a_given_step_is_restored_and_parameters_may_be_abstract(engine, start, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save_all(checkpoints, start, dict.fromkeys((3, 6)))
        found = checkpoints.restore(engine, jax.eval_shape(bf16_params), step=3)
    assert found.step == 3
    assert_same(values(found.state), values(at(start, 3)))


def test_no_fresh_state_is_made_for_a_restore(start, tmp_path, monkeypatch):
    """It would take as long as that of a first start."""
    other = make_engine("local_sgd")
    monkeypatch.setattr(other, "init", None)
    with Checkpoints(tmp_path) as checkpoints:
        save_all(checkpoints, start, {3: None})
        found = checkpoints.restore(other, bf16_params())
    assert_same(values(found.state), values(at(start, 3)))


def test_a_restore_takes_parameters_as_an_engine_does(engine, start, tmp_path):
    """NumPy's integers have 64 bits, and are 32 on devices."""
    given = jax.tree.map(
        lambda x: np.asarray(x, np.int64) if x.dtype == np.int32 else x, bf16_params()
    )
    assert any(x.dtype == np.int64 for x in jax.tree.leaves(given))
    with Checkpoints(tmp_path) as checkpoints:
        save_all(checkpoints, start, {3: None})
        found = checkpoints.restore(engine, given)
    assert_same(values(found.state), values(at(start, 3)))


def test_leaf_names_must_differ():
    with pytest.raises(ValueError, match="two leaves are called 'x/a/b'"):
        leaves.named_leaves("x", {"a/b": 1, "a": {"b": 2}})


# -- refusals ---------------------------------------------------------------------------------


def refusal(checkpoints, engine, params=None, **kwargs):
    with pytest.raises(ValueError) as error:
        checkpoints.restore(engine, bf16_params() if params is None else params, **kwargs)
    return str(error.value).splitlines()


def test_another_config_is_refused_field_by_field(engine, start, tmp_path):
    other = {"steps": 200, "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "data": {"name": "x"}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(start, 5), extra={}, config=CONFIG)
        lines = refusal(checkpoints, engine, config=other)
        assert lines == [
            f"{tmp_path / '5'} is not of this run (saved -> now):",
            '- data.name: missing -> "x"',
            "- data.seed: 1 -> missing",
            "- optimizer.lr: 0.3 -> 0.1",
            "- steps: 100 -> 200",
        ]
        assert refusal(checkpoints, engine, config=other, ignore=("data", "steps"))[1:] == [
            "- optimizer.lr: 0.3 -> 0.1"
        ]
        ignore = ("data", "steps", "optimizer.lr")
        assert checkpoints.restore(engine, bf16_params(), config=other, ignore=ignore).step == 5
        # Tuples are lists in JSON; an equal config is equal.
        same = {**CONFIG, "optimizer": {"lr": 0.3, "betas": (0.9, 0.95)}}
        assert checkpoints.restore(engine, bf16_params(), config=same).step == 5


def other_engine(method, optimizer=None):
    optimizer = optimizer or optax.adamw(optax.linear_schedule(0.02, 0.01, 30))
    return lc.Engine(loss_on_floats, optimizer, method, REGIONS, mesh=one_device())


def test_another_method_is_refused(engine, start, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(start, extra={}, config={}, method=engine.method)
        lines = refusal(checkpoints, other_engine(lc.methods.local_sgd(6)))
        assert lines[1:] == ["- method.schedule.period: 4 -> 6"]
        lines = refusal(checkpoints, other_engine(lc.methods.diloco(4)))
        assert '- method.name: "local_sgd" -> "diloco"' in lines
        assert "- outer/0/0/trace/a: missing -> float32[3, 5]" in lines
        lines = refusal(checkpoints, other_engine(lc.methods.eager_diloco(4)))
        assert "- anchor/a: float32[3, 5] in 1 anchors -> float32[3, 5] in 3 anchors" in lines


def test_other_parameters_and_optimizers_are_refused(engine, start, tmp_path):
    params = {**bf16_params(), "a": np.zeros((3, 6), np.float32)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(start, extra={}, config={})
        lines = refusal(checkpoints, engine, params)
        assert "- inner/params/a: float32[3, 5] -> float32[3, 6]" in lines
        lines = refusal(checkpoints, other_engine(lc.methods.local_sgd(4), optax.sgd(0.1)))
        assert "- inner/opt/0/mu/a: float32[3, 5] -> missing" in lines
        assert not any("anchor" in line for line in lines)


def test_many_differing_arrays_are_cut_short():
    one = {f"inner/params/{i}": jax.ShapeDtypeStruct((3, 2), np.float32) for i in range(50)}
    lines = load.differing_leaves(one, {}, (3, 3))
    assert len(lines) == load.SHOWN + 1
    assert lines[-1] == "... and 30 more arrays"


def test_other_packages_are_named(engine, start, tmp_path, monkeypatch, caplog):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(start, extra={}, config={})
        checkpoints.wait()
        now = {**load.package_versions(), "optax": "9.9"}
        monkeypatch.setattr(load, "package_versions", lambda: now)
        assert checkpoints.restore(engine, bf16_params()) is not None
    assert 'optax: "' in caplog.text and '-> "9.9"' in caplog.text


@pytest.mark.parametrize("which", [1, 2])
def test_a_folder_that_cannot_be_made_is_told_at_once(which, start, tmp_path, monkeypatch):
    """As on a read-only disk, or one without inodes: no thread waits for it, and none prints."""
    makes, made = os.mkdir, itertools.count(1)

    def refuses(path, *more, **others):
        if store.UNFINISHED in str(path) and next(made) == which:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return makes(path, *more, **others)

    before = set(threading.enumerate())
    with Checkpoints(tmp_path) as checkpoints:
        save_all(checkpoints, start, {2: {}})
        began = time.monotonic()
        monkeypatch.setattr(os, "mkdir", refuses)
        with pytest.raises(OSError, match="Read-only file system"):
            checkpoints.save(at(start, 4), extra={}, config={})
            checkpoints.wait()
        monkeypatch.undo()
        assert checkpoints.steps() == [2]
        save_all(checkpoints, start, {4: {}})
        assert checkpoints.steps() == [2, 4]
    # Python waits for such threads before it ends.
    left = [t for t in set(threading.enumerate()) - before if not t.daemon]
    while left and time.monotonic() - began < 100:  # Orbax's own would wait for 300 s
        left = [thread for thread in left if thread.is_alive()]
    assert not left


FULL = """
import resource, signal, sys
import numpy as np
from etils import epath
from lowcomm_jax.checkpoint import store
from lowcomm_jax.mesh.arrays import Box
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
path = epath.Path(sys.argv[1]) / "2"
try:
    store.begin(path)
    store.write_part(path, 0, {f"a/{i}": [Box((0,), np.arange(500.0))] for i in range(40)})
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 900])
def test_of_a_save_that_fails_on_its_way_nothing_else_is_printed(size, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path, str(size)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=100,
        check=True,
    )
    assert "File too large" in done.stdout
    # JAX's plug-in for CUDA (extra `aot`) remarks that there is no driver.
    told = [x for x in done.stderr.splitlines() if not re.search("InitializeLog|cudart_stub", x)]
    assert not told
