"""What the pages under docs/ state is there: methods, links, the network example."""

import re
from pathlib import Path

import pytest
import yaml
from contract import TESTS, matches, patterns

from experiments.cli import load_config
from experiments.workdir import of_regions
from lowcomm_jax import methods, outer
from lowcomm_jax.network import parse

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def test_the_pages_are_at_most_3000_lines_in_all():
    """Those written by hand under docs/; the reference of the API is made from docstrings."""
    assert sum(len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES) <= 3000


def test_every_method_and_outer_rule_has_its_row():
    text = (DOCS / "methods.md").read_text()
    for name in methods.NAMES:
        assert f"| `{name}` |" in text, name
    for name in outer.NAMES:
        assert re.search(rf"\| `{name}[`(]", text), name


def test_the_network_example_is_read():
    found = re.search(r"```yaml\n(.*?)```", (DOCS / "networks.md").read_text(), re.DOTALL)[1]
    network = parse(yaml.safe_load(found))
    assert network.regions == ("berlin", "oslo", "porto")
    assert network.bandwidth_RxR[0, 1] == 5 and network.bandwidth_RxR[0, 2] == 1
    assert network.compute_R.tolist() == [0.5, 0.5, 0.8]


def test_settings_in_which_jobs_may_differ_are_those_of_the_page():
    text = (DOCS / "regions.md").read_text()
    named = re.findall(r"`(\w+)`", re.search(r"may differ: where(.*?)\[list\]", text, re.DOTALL)[1])
    config = load_config("configs/diloco.py", [])[0].to_dict()
    equal = of_regions(config, "")
    assert len(named) > 5 and {*named} <= {*config} - {*equal}, named
    assert {"seed", "batch", "heal"} <= {*equal}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_pages_name_are_there(page):
    """Links: `test_prose.py`."""
    named = r"`((?:lowcomm_jax|tests|configs|experiments|examples)/[\w./]+)`"
    for target in re.findall(named, page.read_text()):
        assert (DOCS.parent / target).exists(), target


def test_contract_tests_are_there():
    """Every pattern of the page names a file, and no file is named twice."""
    files = [path for path in TESTS.rglob("test_*.py")]
    named = {pattern: [path for path in files if matches(pattern, path)] for pattern in patterns()}
    assert len(named) == len(patterns()) > 40 and all(named.values()), named
    every = [path for paths in named.values() for path in paths]
    assert len(every) == len(set(every)) < len(files)
