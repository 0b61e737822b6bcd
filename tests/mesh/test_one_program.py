"""One program over several processes comes to what it comes to in one, on the same devices.

Compared are losses, metrics, events and their bytes, anchors, the regions' parameters, checkpoints
(every array's digest) and what follows a restored one: bit for bit. Sums inside a region have two
participants at most; with four, backends may add in another order.
"""

import collections
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from launched import killed_at_last
from mesh.one_program_cases import MESHES, cases
from mesh.one_program_job import Settings, result_of

from experiments.processes import free_port

ROOT = pathlib.Path(__file__).parents[2]
QUICK = "noloco, regions of two"
# `global_params` is a mean over the anchors of all regions: four participants.
PER_REGION = re.compile("noloco|eager|as coded|routed")


def train(folder, names, processes, devices, quick=True):
    """What every process has come to, by case; `quick`: see `one_program_job.Settings`."""
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    env["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", env["XLA_FLAGS"])
    address, jobs = f"127.0.0.1:{free_port()}", []
    for process in range(processes):
        one = Settings(str(folder), process, processes, address, devices, names, quick)
        command = [
            sys.executable,
            "-m",
            "mesh.one_program_job",
            json.dumps(dataclasses.asdict(one)),
        ]
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        jobs.append(subprocess.Popen(command, env=env, **given))
    with killed_at_last(jobs):
        for job in jobs:
            shown = job.communicate(timeout=1200)[0]
            assert job.returncode == 0, shown[-3000:]
    return [json.loads(result_of(folder, i).read_text()) for i in range(processes)]


def for_four_processes(kind):
    """Names of the cases of a kind; of a case with two meshes the first or the second, in turn."""
    meshes = collections.defaultdict(list)
    for name in cases():
        meshes[name.rpartition(", ")[0] if name.endswith(tuple(MESHES)) else name].append(name)
    chosen = [names[i % len(names)] for i, names in enumerate(meshes.values())]
    return [name for name in chosen if kind in name]


def flat(found):
    """What must be equal of a case, by name."""
    assert "error" not in found, found
    return {
        f"{part} {name}": value
        for part, of in found.items()
        if part != "compiled"
        for name, value in of.items()
    }


def assert_same(name, one, several):
    expected = flat(one[name])
    anchors = {key for key in expected if PER_REGION.search(name) and "anchor " in key}
    assert "later losses" in expected
    for process, found in enumerate(several):
        got = flat(found[name])
        differ = [k for k in expected if got.get(k) != expected[k] and k not in anchors]
        assert not differ, f"{name}: process {process}: {differ}"


@pytest.mark.slow
def test_parts_of_checkpoints_of_two_processes(tmp_path):
    """The quick set trains Streaming DiLoCo so (`test_one_program_run.py`)."""
    one = train(tmp_path / "one", [QUICK], 1, 4)[0]
    two = train(tmp_path / "two", [QUICK], 2, 2, quick=False)
    assert_same(QUICK, one, two)
    # Every process has written its part of the checkpoints.
    assert list(tmp_path.glob("two/*/*/part_1")) and not list(tmp_path.glob("one/*/*/part_1"))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["regions apart", "regions of two", "stages"])
def test_every_case(kind, processes, devices, tmp_path):
    """A process a device: every case, on one of its meshes where it has two. And every seventh with
    two devices a process."""
    names = for_four_processes(kind)
    if processes == 2:
        names = [name for name in cases() if kind in name][::7]
    one = train(tmp_path / "one", names, 1, 4)[0]
    several = train(tmp_path / "several", names, processes, devices)
    for name in names:
        assert_same(name, one, several)
