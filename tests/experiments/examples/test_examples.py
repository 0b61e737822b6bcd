"""The examples of one program over many hosts: run as far as one machine can, or checked."""

import json
import os
import pathlib
import re
import stat
import subprocess
import sys
from unittest import mock

import jsonschema
import pytest
import yaml

from experiments.cli import load_config, split_config
from experiments.processes import free_port
from experiments.report.runlog import read_run
from lowcomm_jax.mesh.launchers import process_place

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
SCHEMAS = pathlib.Path(__file__).with_name("schemas")
SHORT = ["--config.steps=12", "--config.log.every=6", "--config.method.period=6"]
# In the place of Slurm: so many tasks on one node, as `srun` starts them.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
for task in 0 1; do
    SLURM_JOB_ID=$JOB SLURM_STEP_NODELIST=127.0.0.1 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2 \\
        SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
code=0
for _ in 0 1; do wait -n || code=$?; done
exit $code
"""
# As far as its CRD (v1alpha2) goes; the Jobs inside have Kubernetes' own schema.
JOBSET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["replicatedJobs"],
            "properties": {
                "network": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "enableDNSHostnames": {"type": "boolean"},
                        "publishNotReadyAddresses": {"type": "boolean"},
                        "subdomain": {"type": "string"},
                    },
                },
                "failurePolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"maxRestarts": {"type": "integer"}},
                },
                "replicatedJobs": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "template"],
                        "properties": {
                            "name": {"type": "string"},
                            "replicas": {"type": "integer"},
                            "template": {"type": "object"},
                        },
                    },
                },
            },
        },
    },
}

pytestmark = pytest.mark.usefixtures("one_device")


def arguments(tiny, root):
    return [a for a in tiny.arguments(root) if ".mesh." not in a and "regions" not in a] + SHORT


def run(command, **env):
    """Its exit code and what it printed."""
    path = [str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    path = [env.pop("BEFORE"), *path] if "BEFORE" in env else path
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": os.pathsep.join(path), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def schema(name):
    return json.loads((SCHEMAS / name).read_text())


def overrides_are_known(argv):
    path, overrides, rest = split_config(argv)
    problems = load_config(path, overrides)[1]
    assert not problems, problems
    return rest


def test_two_processes_on_a_laptop(tiny, root):
    workdir = root / "laptop"
    command = [EXAMPLES / "two_processes.sh", workdir, *arguments(tiny, root)]
    code, shown = run(command, PORT=str(free_port()))
    assert code == 0, shown
    assert "devices found / expected: 2 / 2" in shown
    assert len(read_run(workdir).steps) == 12


def test_the_slurm_script(tiny, root, tmp_path):
    """With a stand-in for `srun`; tried by hand with Slurm itself, on one node."""
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    more = [*arguments(tiny, root), "--config.mesh.fsdp=1", "--config.batch=2"]
    code, shown = run(
        ["bash", EXAMPLES / "one_program.slurm", *more],
        BEFORE=str(tmp_path),
        WORKDIR=str(root / "slurm"),
        JOB=str(free_port()),
    )
    assert code == 0, shown
    assert "devices found / expected: 2 / 2" in shown
    assert len(read_run(root / "slurm").steps) == 12


@pytest.mark.parametrize("script", sorted(p.name for p in EXAMPLES.glob("*.s[hl]*")))
def test_scripts_parse(script):
    assert run(["bash", "-n", EXAMPLES / script])[0] == 0


@pytest.mark.parametrize("script", ["one_program.slurm", "tpu_slices.sh", "two_processes.sh"])
def test_the_options_that_scripts_give_are_known(script):
    text = (EXAMPLES / script).read_text()
    found = re.findall(r"(--config\S*=\S+)", re.sub(r"^#.*$", "", text, flags=re.MULTILINE))
    assert found and overrides_are_known(found) == []


def placed(env):
    with mock.patch.dict(os.environ, env, clear=True):
        return process_place()


def test_the_jobset_is_one():
    """And its pods are the processes of one program, with the address of the first of them."""
    manifest = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    jsonschema.validate(manifest, JOBSET)
    job = manifest["spec"]["replicatedJobs"][0]
    template = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    jsonschema.validate({**template, **job["template"]}, schema("kubernetes_job.json"))
    spec = job["template"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    fixed = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    name = manifest["metadata"]["name"]
    assert fixed["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-{job['name']}-0-0.{name}:")
    pods = [
        placed(
            {
                **fixed,
                "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                "JOB_INDEX": str(index),
                "JOB_COMPLETION_INDEX": str(pod),
            }
        )
        for index in range(job["replicas"])
        for pod in range(spec["completions"])
    ]
    assert spec["completionMode"] == "Indexed"
    assert [pod.process for pod in pods] == list(range(pods[0].processes))
    assert overrides_are_known(container["args"]) == ["--workdir=/runs/one_program"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"completionMode": 1},
        {"completions": "four"},
        {"parallel": 4},
    ],
)
def test_the_schema_of_jobs_sees_what_is_wrong(wrong):
    manifest = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"] | wrong
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, schema("kubernetes_job.json"))


def test_the_kubernetes_job_of_a_region():
    job = yaml.safe_load((EXAMPLES / "regions.yaml").read_text())
    jsonschema.validate(job, schema("kubernetes_job.json"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (region,) = [e["value"] for e in container["env"] if e["name"] == "REGION"]
    given = [argument.replace("$(REGION)", region) for argument in container["args"]]
    assert overrides_are_known(given) == ["--workdir=/runs/region0"]


def test_the_task_of_a_region_on_two_clouds():
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    jsonschema.validate(task, schema("skypilot_task.json"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**task, "number_of_nodes": 2}, schema("skypilot_task.json"))
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0
    assert set(task["envs"]) | set(task["secrets"]) == {"REGION", "RENDEZVOUS", "LOWCOMM_SECRET"}
