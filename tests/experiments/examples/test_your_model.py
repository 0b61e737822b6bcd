"""The examples of a model of one's own: run as a user does, and what they print is right."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import matplotlib
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from safetensors.numpy import load_file

from experiments.report.runlog import read_run

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "first_figure.ipynb"
# Scripts by arguments; a folder in place of FOLDER.
SCRIPTS = {
    "plain_function.py": [],
    "flax_nnx.py": [],
    "linen_batch_norm.py": [],
    "nnx_batch_norm.py": [],
    "equinox_module.py": [],
    "own_loop.py": ["FOLDER"],
    "gpu.py": [],
    "hugging_face.py": ["FOLDER"],
}


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch):
    """One device, and models that broadcast: the suite itself has eight, and none that does."""
    monkeypatch.setattr("lowcomm_jax.mesh.regions.all_devices", lambda: jax.devices()[:1])
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script in this process; returns what it printed."""

    def script(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return script


def numbers(line):
    """The numbers of a line, thousands separated by commas."""
    return [float(n.replace(",", "")) for n in re.findall(r"-?\d[\d,]*\.?\d*", line)]


def test_a_plain_function(run):
    before, after, sent = run("plain_function.py").splitlines()
    assert numbers(after)[0] < 0.3 * numbers(before)[0]
    nbytes, rounds = numbers(sent)
    assert rounds == 20
    assert nbytes == rounds * 2 * 3 / 4 * 4 * (64 + 64 + 64)  # two-shot, fp32


@pytest.mark.slow
def test_a_module_of_nnx_with_dropout(run):
    training, anchor = run("flax_nnx.py").splitlines()
    first, last = numbers(training)[1:]
    assert first < 75 < last
    assert numbers(anchor)[0] > 90


@pytest.mark.parametrize("name", ["linen_batch_norm.py", "nnx_batch_norm.py"])
def test_a_module_with_batch_norm(run, name):
    losses, error, means = run(name).splitlines()
    first, last = numbers(losses)
    assert last < 0.2 * first
    assert numbers(error)[0] < 0.2 * first
    *found, expected = numbers(means)
    np.testing.assert_allclose(found, expected, atol=1)  # of all regions: one alone is 50 or 53


def test_a_module_of_equinox(run):
    losses, saddle = run("equinox_module.py").splitlines()
    first, last = numbers(losses)
    assert last < 0.1 * first
    assert abs(numbers(saddle)[-1] + 0.25) < 0.1


def test_a_loop_of_ones_own_goes_on_bit_for_bit(run, tmp_path):
    whole = run("own_loop.py", tmp_path / "whole", "--steps=48")
    first = run("own_loop.py", tmp_path / "parts", "--steps=24")
    assert "step 24: " in first and first.splitlines()[1].endswith("1 payloads in flight")
    second = run("own_loop.py", tmp_path / "parts", "--steps=48")
    assert second.startswith("goes on at step 24")
    assert second.splitlines()[-1] == whole.splitlines()[-1]
    assert whole.splitlines()[-1] != first.splitlines()[-1]


@pytest.mark.slow
def test_what_a_gpu_would_change_is_told_on_a_cpu_too(run):
    device, model, concurrent, losses, speed = run("gpu.py").splitlines()
    assert device.startswith("device: cpu")
    assert "float32, attention xla, layers unrolled" in model
    assert concurrent.endswith("False")
    first, last = numbers(losses)
    assert last < 0.8 * first
    assert speed.endswith("tokens/s, sends and landings compiled, too")


@pytest.mark.slow
def test_hugging_face_weights_in_and_out(run, tmp_path):
    losses, written, same = run("hugging_face.py", tmp_path).splitlines()
    first, last = numbers(losses)
    assert last < 0.8 * first
    assert same.endswith("True")
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("in", "out"))
    assert {k: x.shape for k, x in before.items()} == {k: x.shape for k, x in after.items()}
    assert numbers(written)[0] == len(after)
    assert all((before[name] != after[name]).any() for name in before)


def cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
def test_the_notebooks_cells(monkeypatch, tmp_path, capsys):
    """In this process, and a tenth as long."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(cell.source for cell in cells(nbformat.read(NOTEBOOK, 4)))
    assert "STEPS, EVERY = 240, 24" in code
    matplotlib.use("Agg")
    space = {}
    exec(code.replace("STEPS, EVERY = 240, 24", "STEPS, EVERY = 24, 12"), space)
    assert (tmp_path / "first_figure.png").stat().st_size > 10_000
    seconds = {name: curve[-1, 1] for name, (curve, _) in space["curves"].items()}
    assert seconds["Streaming DiLoCo"] < seconds["DiLoCo"] < seconds["AllReduce at every step"]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in cells(notebook))


def test_every_example_says_what_it_shows_and_stands_in_the_index():
    index = (ROOT / "docs" / "examples.md").read_text()
    for path in sorted(EXAMPLES.iterdir()):
        if path.is_file():
            assert f"(../examples/{path.name})" in index, path.name
    for name in SCRIPTS:
        text = (EXAMPLES / name).read_text()
        assert re.search(r"Takes about \d+ s", text.split('"""')[1]), name
        assert f"python examples/{name}" in text


# -- as a user starts them -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(tmp_path):
    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    kinds = {output.output_type for cell in cells(notebook) for output in cell.outputs}
    assert "display_data" in kinds and "error" not in kinds
    assert (tmp_path / "first_figure.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_started(one_device, tmp_path, name):
    arguments = [str(tmp_path) if a == "FOLDER" else a for a in SCRIPTS[name]]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # JAX's plug-in for CUDA (extra `aot`) remarks that there is no driver.
    told = [x for x in done.stderr.splitlines() if not re.search("InitializeLog|cudart_stub", x)]
    assert done.stdout and not any(told)


@pytest.mark.slow
def test_two_sites(one_device, tiny, root, monkeypatch):
    """Two jobs that share a folder alone, their report, and the exported model."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    tiny_run = [a for a in tiny.arguments(root) if "regions" not in a]
    workdir = root / "two%20sites #1"
    done = subprocess.run(
        [EXAMPLES / "two_sites.sh", workdir, *tiny_run, "--config.steps=24"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for region in (0, 1):
        assert len(read_run(workdir / f"region{region}").steps) == 24
    assert re.search(r"step 24 written to .* in float32\n", done.stdout)
    assert (workdir / "secret").stat().st_mode & 0o077 == 0
    assert load_file(workdir / "model" / "model.safetensors")
    assert (workdir / "report.html").stat().st_size > 10_000
