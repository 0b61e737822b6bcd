"""One version: the package's, the installed one's, and that to cite."""

import importlib.metadata
import pathlib

import yaml

import lowcomm_jax as lc


def test_version_is_one():
    assert importlib.metadata.version("lowcomm_jax") == lc.__version__
    cited = yaml.safe_load((pathlib.Path(__file__).parents[1] / "CITATION.cff").read_text())
    assert cited["version"] == lc.__version__
