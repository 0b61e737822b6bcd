"""The README is run: its example as a doctest, its commands against what CI runs."""

import doctest
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent


def test_the_example_runs():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert tried >= 10 and not failed


def test_ci_runs_the_commands_of_the_readme():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "pip install -r requirements.txt" in readme
    assert "-r requirements.txt" in ci
    for command in ("python -m experiments ", "python -m pytest"):
        assert command in readme and command.strip() in ci


def test_the_files_the_readme_names_exist():
    for name in (
        "docs/quick.png",
        "docs/metrics.md",
        "tests/oracle",
        "tests/engine/test_oracle.py",
    ):
        assert name in (ROOT / "README.md").read_text()
        assert (ROOT / name).exists()
