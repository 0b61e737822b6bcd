"""Tests of the evidence run on one CPU device, and read a corpus of their own."""

import os

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
WORDS = [
    "region",
    "anchor",
    "gradient",
    "outer",
    "inner",
    "send",
    "land",
    "fragment",
    "codec",
    "clock",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a few short texts, for runs of two steps."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "texts").mkdir()
    for i in range(24):
        words = np.random.default_rng(i).choice(WORDS, size=60 + 20 * (i % 4))
        (folder / "texts" / f"{i}.txt").write_text(" ".join(words))
    return folder
