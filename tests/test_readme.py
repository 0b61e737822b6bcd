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
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    ci = [line.strip() for line in lines if not line.strip().startswith("#")]
    assert "pip install -r requirements.txt" in README
    assert 'install "$folder/readme" -r requirements.txt' in ci
    assert "python -m experiments " in README
    assert any(line.startswith("python -m experiments --workdir=") for line in ci)
    assert "python -m pytest" in README and ci[-1] == "FUZZ=300 python -m pytest"


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
