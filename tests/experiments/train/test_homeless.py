"""A run whose user has no home folder, or one that cannot be written, trains as any other."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from experiments.workdir import METRICS

# A user without an entry, as a container runs: it may read what this one may, and write nothing.
NOBODY = [
    *("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
]
ROOT = os.geteuid() == 0 and shutil.which("setpriv") is not None


@pytest.fixture
def open_folder():
    """A folder that every user can reach and write."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    "home, before",
    [
        ("/proc/none", []),
        ("/dev/null", []),
        pytest.param(None, NOBODY, marks=pytest.mark.skipif(not ROOT, reason="needs root")),
        pytest.param("/root", NOBODY, marks=pytest.mark.skipif(not ROOT, reason="needs root")),
    ],
)
def test_trains(open_folder, tiny, home, before):
    tiny.corpus(open_folder / "texts")
    away = {"HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "MPLCONFIGDIR"}
    env = {name: value for name, value in os.environ.items() if name not in away}
    env |= {} if home is None else {"HOME": home}
    env["TMPDIR"] = str(open_folder / "tmp")
    for folder in (open_folder, open_folder / "tmp", open_folder / "run"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    given = ["--config.steps=4", *tiny.arguments(open_folder), f"--workdir={open_folder / 'run'}"]
    given = [one for one in given if "cache" not in one]  # the usual ones
    command = [sys.executable, "-m", "experiments", "train", "--config=configs/diloco.py", *given]
    done = subprocess.run([*before, *command], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and (open_folder / "run" / METRICS).is_file()
    assert done.stderr.count("takes its place") == 1
    assert list((open_folder / "tmp").glob("lowcomm_jax-*/documents/*"))
