"""The README is run: its example as a doctest, its commands against what CI runs."""

import doctest
import re
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert tried >= 10 and not failed


def test_ci_runs_the_commands_of_the_readme():
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install -r requirements.txt" in README
    assert "-r requirements.txt" in ci
    for command in ("python -m experiments ", "python -m pytest"):
        assert command in README and command.strip() in ci


def test_every_page_is_reached_from_the_readme():
    seen, to_read = set(), [ROOT / "README.md"]
    while to_read:
        page = to_read.pop()
        seen.add(page)
        found = re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text())
        to_read += {(page.parent / name).resolve() for name in found} - seen
    missing = sorted(set((ROOT / "docs").rglob("*.md")) - seen)
    assert not missing, f"no page leads to {missing}"


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1500
