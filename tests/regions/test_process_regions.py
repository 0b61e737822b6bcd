"""A region of several processes ends with the bits of the same region in one."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from launched import killed_at_last
from regions.party import KINDS
from regions.process_job import Settings, trained
from regions.process_methods import METHODS
from regions.together import in_jobs

import lowcomm_jax as lc
from experiments.processes import free_port

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 14


def meshes_of(counts):
    """Of each region, devices of this process: as many as it has processes."""
    firsts = np.cumsum([0, *counts])
    return [
        lc.make_mesh(fsdp=n, devices=jax.devices()[first : first + n])
        for n, first in zip(counts, firsts)
    ]


def train(method, counts, exchange, folder):
    """What every process ends with, `[region][process]`; `counts`: processes of each region.

    Regions of one process are threads of this one.
    """
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    env["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", env["XLA_FLAGS"])
    jobs, here, outs = [], {}, {}
    for region, count in enumerate(counts):
        address = f"127.0.0.1:{free_port()}"
        outs[region] = [folder / f"{region}.{process}.npz" for process in range(count)]
        for process, out in enumerate(outs[region]):
            place = (region, len(counts), process, count, address)
            one = Settings(f"file://{folder}/meet", str(out), *place, method, STEPS, exchange)
            if count == 1:
                here[region] = one
                continue
            command = [
                sys.executable,
                "-m",
                "regions.process_job",
                json.dumps(dataclasses.asdict(one)),
            ]
            given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            jobs.append(subprocess.Popen(command, env=env, **given))
    meshes = meshes_of(counts)
    with ThreadPoolExecutor(len(counts)) as pool, killed_at_last(jobs):
        running = {r: pool.submit(trained, one, meshes[r]) for r, one in here.items()}
        for job in jobs:
            shown = job.communicate(timeout=600)[0]
            assert job.returncode == 0, shown
        found = {region: [one.result()] for region, one in running.items()}
    several = {r: [np.load(out) for out in outs[r]] for r in outs.keys() - here.keys()}
    return [(found | several)[region] for region in range(len(counts))]


def one_process_each(method, counts, kind, between):
    """What every region of one process with as many devices ends with."""
    make = between(len(counts), kind=kind)
    return in_jobs(make, METHODS[method](), len(counts), STEPS, None, meshes_of(counts))


CASES = [
    ("streaming_int8", (2, 1), "peers"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("diloco", (2, 1), "store"),
            ("cocodc", (1, 2), "store"),
            ("noloco", (2, 2), "store"),
            ("sparseloco", (2, 1, 1), "peers"),
            ("diloco", (1, 2, 1), "store"),
        ]
    ),
]


@pytest.mark.parametrize("method, counts, exchange", CASES)
def test_regions_of_several_processes(method, counts, exchange, tmp_path, between):
    kind = KINDS[exchange]
    ends = train(method, counts, exchange, tmp_path)
    expected = one_process_each(method, counts, kind, between)
    for processes, parts in zip(ends, expected):
        for at, (anchor, params) in enumerate(parts):
            for process in processes:
                for name, x in anchor.items():
                    np.testing.assert_array_equal(process[f"{at}/anchor/{name}"], x, name)
                for name, x in params.items():
                    np.testing.assert_array_equal(process[f"{at}/params/{name}"], x, name)
    if method != "noloco":
        for name in expected[0][0][0]:
            held = [process[f"0/anchor/{name}"] for region in ends for process in region]
            for one in held[1:]:
                np.testing.assert_array_equal(one, held[0])
