"""A damaged or unfinished checkpoint is named, and the previous good one is used."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint.checkpoint_cases import assert_same, bf16_params, make_engine, values

from lowcomm_jax.checkpoint import Checkpoints, DamagedError, store
from lowcomm_jax.mesh.arrays import Box

ENGINE = "local_sgd"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 3 and 5 of a run whose numbers differ; (engine, directory, values at each step)."""
    directory = tmp_path_factory.mktemp("damage") / "run"
    engine = make_engine(ENGINE)
    state = engine.init(bf16_params())
    seen = {}
    with Checkpoints(directory) as checkpoints:
        for step in (3, 5):
            counters = state.counters.copy()
            counters.step = np.int64(step)
            anchor = jax.tree.map(lambda x, step=step: x + 0.1 * step, state.anchor)
            state = state.replace(counters=counters, anchor=anchor)
            seen[step] = values(state)
            checkpoints.save(state, extra={"at": step}, config={"lr": 0.1})
    return engine, directory, seen


@pytest.fixture
def copied(saved, tmp_path):
    engine, directory, seen = saved
    shutil.copytree(directory, tmp_path / "run")
    return engine, tmp_path / "run", seen


def files(directory):
    return sorted(p for p in Path(directory).rglob("*") if p.is_file())


def data_files(directory):
    return [p for p in files(directory) if p.parent.name == "d"]


def flip_middle(path):
    flip(path, path.stat().st_size // 2)


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


DAMAGE = {
    "flipped bytes": lambda step: [flip_middle(p) for p in data_files(step / "part_0")],
    "truncated": lambda step: [os.truncate(p, 100) for p in data_files(step / "part_0")],
    "half a description": lambda step: os.truncate(step / "part_0" / "_METADATA", 100),
    "deleted file": lambda step: (step / "part_0" / "manifest.ocdbt").unlink(),
    "deleted part": lambda step: shutil.rmtree(step / "part_0"),
    "no document": lambda step: (step / "document.json").unlink(),
    "half a document": lambda step: os.truncate(step / "document.json", 100),
    "empty": lambda step: [shutil.rmtree(p) if p.is_dir() else p.unlink() for p in step.iterdir()],
}


DAMAGED = {
    "flipped bytes": "part_0: anchor/a cannot be read",
    "truncated": "part_0: anchor/a cannot be read",
    "half a description": "part_0: its arrays cannot be read",
    "deleted file": "part_0: anchor/a cannot be read",
    "deleted part": "part_0 is missing",
    "no document": "document.json is missing",
    "half a document": "document.json cannot be read",
    "empty": "document.json is missing",
}

READS = """
import logging, sys
from etils import epath
from lowcomm_jax.checkpoint import DamagedError, store
logging.basicConfig()
path = epath.Path(sys.argv[1])
try:
    store.read_arrays(path, store.read_document(path))
except DamagedError as error:
    print(error)
"""


def test_what_the_machine_said_is_told(copied, monkeypatch):
    """A file that may not be read is no damage; nobody should look for any."""
    _, directory, _ = copied
    read = store.type_handlers.NumpyHandler.deserialize

    async def denied(self, infos, args=None):
        if infos[0].name == "anchor/b@0":
            raise PermissionError(13, "Permission denied", "some/file")
        return await read(self, infos, args)

    document = store.read_document(directory / "5")
    monkeypatch.setattr(store.type_handlers.NumpyHandler, "deserialize", denied)
    with pytest.raises(DamagedError, match=r"anchor/b cannot be read \(PermissionError\)"):
        store.read_arrays(directory / "5", document)


@pytest.mark.parametrize("damage", ["deleted file", "flipped bytes"])
def test_a_damaged_file_is_one_line_on_the_terminal(copied, damage):
    """Without the filters of this file: no words of Orbax, asyncio or Python's warnings."""
    _, directory, _ = copied
    DAMAGE[damage](directory / "5")
    paths = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", READS, str(directory / "5")]
    ran = subprocess.run(command, env=paths, capture_output=True, text=True)
    assert ran.stdout == f"{directory / '5' / DAMAGED[damage]}\n"
    for word in ("never awaited", "Task exception", "Failed to load", "orbax"):
        assert word not in ran.stderr, ran.stderr


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_is_named_and_the_previous_one_used(copied, caplog, damage):
    engine, directory, seen = copied
    DAMAGE[damage](directory / "5")
    with caplog.at_level(logging.WARNING), Checkpoints(directory) as checkpoints:
        found = checkpoints.restore(engine, bf16_params(), config={"lr": 0.1})
        assert found.step == 3
        assert found.extra == {"at": 3}
        assert_same(values(found.state), seen[3])
        ((step, reason),) = found.skipped
        assert step == 5 and str(directory / "5") in reason
        (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert line == f"skipped checkpoint of step 5: {reason}; step 3 is used"
        assert len(reason) < len(str(directory)) + 100 and "Error" not in reason
        assert DAMAGED[damage] in reason
        assert "Task exception" not in caplog.text
        with pytest.raises(DamagedError, match="/5/"):
            checkpoints.restore(engine, bf16_params(), step=5)


def rewrite(path, arrays, document):
    """A checkpoint of these arrays, written as a job of one process does."""
    shapes = {name: [x.dtype.name, list(x.shape)] for name, x in arrays.items()}
    store.begin(path)
    store.write_part(path, 0, {name: [Box((0,) * x.ndim, x)] for name, x in arrays.items()})
    store.seal(path, 1, shapes, {key: document[key] for key in document if key != "arrays"})


def test_every_flipped_byte_is_found_or_harmless(saved, tmp_path):
    """One byte of every file, early, in the middle and late: never other numbers in silence."""
    _, directory, _ = saved
    step = tmp_path / "5"
    shutil.copytree(directory / "5", step)
    path = store.epath.Path(step)
    good = store.read_arrays(path, store.read_document(path))
    found = 0
    for file in [f for f in files(step) if f.stat().st_size]:
        original = file.read_bytes()
        for position in {int(share * (len(original) - 1)) for share in (0.1, 0.5, 0.9)}:
            flip(file, position)
            try:
                read = store.read_arrays(path, store.read_document(path))
            except DamagedError as error:
                found += 1
                assert str(step) in str(error)
            else:
                assert_same(read, good)
            file.write_bytes(original)
    assert found > 10


def test_altered_number_is_found_by_its_digest(saved, tmp_path):
    """Files that decode without complaint, but to something else than was saved."""
    _, directory, _ = saved
    path = store.epath.Path(directory / "5")
    document = store.read_document(path)
    arrays = store.read_arrays(path, document)
    arrays["inner/params/a"][1, 1, 2] += np.float32(1e-6)
    other = store.epath.Path(tmp_path / "5")
    rewrite(other, arrays, document)
    with pytest.raises(DamagedError, match=r"part_0: inner/params/a at .* differs from its digest"):
        store.read_arrays(other, document)
    file = other / "document.json"
    text = file.read_text()
    file.write_text(text.replace('"lr": 0.1', '"lr": 0.2'))
    assert json.loads(text) != json.loads(file.read_text())
    with pytest.raises(DamagedError, match=r"document\.json differs from its digest"):
        store.read_document(other)
    for foreign in (["content", "digest"], {"content": {}}):
        file.write_text(json.dumps(foreign))
        with pytest.raises(DamagedError, match=r"document\.json is not of a checkpoint"):
            store.read_document(other)


def test_a_checkpoint_under_another_steps_name_is_not_believed(copied, caplog):
    engine, directory, at = copied
    shutil.copytree(directory / "3", directory / "9")
    with Checkpoints(directory) as checkpoints:
        found = checkpoints.restore(engine, bf16_params())
        assert found.step == 5
        assert_same(values(found.state), at[5])
        ((step, reason),) = found.skipped
        assert step == 9 and "written at step 3, and renamed or copied" in reason
        with pytest.raises(DamagedError, match="/9: it was written at step 3"):
            checkpoints.restore(engine, bf16_params(), step=9)


def test_all_damaged_raises_naming_each(copied):
    engine, directory, _ = copied
    for step in ("3", "5"):
        (directory / step / "document.json").unlink()
    with Checkpoints(directory) as checkpoints, pytest.raises(DamagedError) as error:
        checkpoints.restore(engine, bf16_params())
    assert "step 5" in str(error.value) and "step 3" in str(error.value)


def test_damaged_steps_do_not_count_as_kept(copied):
    engine, directory, _ = copied
    (directory / "5" / "document.json").unlink()
    with Checkpoints(directory, keep_last=2) as checkpoints:
        state = checkpoints.restore(engine, bf16_params()).state
        for step, kept in ((4, [3, 4, 5]), (6, [4, 6])):
            state.counters.step = np.int64(step)
            checkpoints.save(state, extra={}, config={})
            checkpoints.wait()
            assert checkpoints.steps() == kept


# Dies when a file or folder of this name is about to get it.
KILLED = """
import os, sys
import numpy as np
from etils import epath
from lowcomm_jax.checkpoint import store
from lowcomm_jax.mesh.arrays import Box

def unless(act):
    def rename(old, new, *args, **kwargs):
        if os.path.basename(os.fspath(new)) == sys.argv[2]:
            os._exit(9)
        return act(old, new, *args, **kwargs)
    return rename

os.rename, os.replace = unless(os.rename), unless(os.replace)
path = epath.Path(sys.argv[1]) / "7"
store.begin(path)
store.write_part(path, 0, {"a": [Box((0,), np.arange(3))]})
store.seal(path, 1, {"a": ["int64", [3]]}, {})
"""


@pytest.mark.parametrize("name", ["part_0.json", "document.json", "7"])
def test_save_killed_half_way(copied, name):
    """What a killed save leaves behind is named, used for nothing, and removed by the next save."""
    engine, directory, seen = copied
    path = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", KILLED, str(directory), name]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode == 9
    (half,) = [p for p in directory.iterdir() if p.name not in ("3", "5")]
    with Checkpoints(directory) as checkpoints:
        assert checkpoints.steps() == [3, 5]
        found = checkpoints.restore(engine, bf16_params())
        assert found.step == 5
        assert found.skipped == [(7, f"{half}: the save was not finished")]
        assert_same(values(found.state), seen[5])
        found.state.counters.step = np.int64(6)
        checkpoints.save(found.state, extra={}, config={})
    assert sorted(p.name for p in directory.iterdir()) == ["3", "5", "6"]


def test_replacing_a_step_never_leaves_none(copied, monkeypatch):
    """If writing a step again fails, the older checkpoint of this step is still there."""
    engine, directory, seen = copied

    def fail(*args, **kwargs):
        raise OSError("disk full")

    checkpoints = Checkpoints(directory)
    state = checkpoints.restore(engine, bf16_params()).state
    with monkeypatch.context() as patch:
        patch.setattr(store.ocp.PyTreeCheckpointHandler, "save", fail)
        checkpoints.save(state, extra={}, config={})
        with pytest.raises(OSError, match="disk full"):
            checkpoints.wait()
    assert checkpoints.steps() == [3, 5]
    found = checkpoints.restore(engine, bf16_params())
    assert found.step == 5 and found.extra == {"at": 5}
    assert_same(values(found.state), seen[5])
    checkpoints.save(state, extra={"again": True}, config={})
    checkpoints.close()
    assert sorted(p.name for p in directory.iterdir()) == ["3", "5"]
    assert checkpoints.document(5)["extra"] == {"again": True}
