"""The smallest run that trains: one layer of width 16 on a few generated files."""

import os
import re
import types

import numpy as np
import pytest

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


def corpus(folder, files=24):
    """Write a few short texts; returns the corpus spec."""
    folder.mkdir()
    for i in range(files):
        draw = np.random.default_rng(i)
        (folder / f"{i}.txt").write_text(" ".join(draw.choice(WORDS, size=60 + 20 * (i % 4))))
    return f"text:{folder}"


def arguments(root, *more):
    """Command-line arguments of a tiny run over `corpus(root / "texts")`."""
    return [
        f"--config.data.corpus=text:{root / 'texts'}",
        f"--config.data.cache_dir={root / 'cache'}",
        "--config.data.val_fraction=0.3",
        "--config.data.seq_len=32",
        "--config.model.layers=1",
        "--config.model.width=16",
        "--config.model.heads=2",
        "--config.model.kv_heads=1",
        "--config.model.head_dim=8",
        "--config.model.mlp_width=24",
        "--config.regions=3",
        "--config.batch=2",
        "--config.mesh.region=1",
        "--config.mesh.fsdp=1",
        "--config.inner.warmup_steps=2",
        "--config.eval.sequences=20",
        "--config.eval.batch=8",
        "--compile_cache=off",  # the one of the tests is on
        *more,
    ]


@pytest.fixture(scope="session")
def tiny():
    """`corpus(folder)` and `arguments(root, ...)` of a tiny run."""
    return types.SimpleNamespace(corpus=corpus, arguments=arguments)


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny):
    """A folder for the runs of one file of tests, with the corpus that they read."""
    folder = tmp_path_factory.mktemp("runs")
    tiny.corpus(folder / "texts")
    return folder


@pytest.fixture
def one_device(monkeypatch):
    """For processes that are started: the suite cuts the processor into eight devices."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("XLA_FLAGS", flags)
