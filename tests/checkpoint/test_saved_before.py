"""Checkpoints that version 0.1.0 wrote, payloads in flight, load and go on.

`saved/NAME.tar.xz` holds one checkpoint a method, half way through a run of `checkpoint_cases`,
and `saved/ends.npz` what that version ended with. Bits do not carry between processors, so the
ends are compared with a tolerance here; `tests/same_as.py` compares them bit for bit.
`saved/dilocox_shared.tar.xz` is of a codec that is gone.
`python tests/checkpoint/test_saved_before.py --write` writes the others anew: that gives up the
promise that older checkpoints load, so it belongs into the CHANGELOG.
"""

import sys
import tarfile
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1])] if __name__ == "__main__" else []

from checkpoint.checkpoint_cases import (  # noqa: E402
    HALF,
    LATER,
    METHODS,
    bf16_params,
    make_engine,
    train,
)

import lowcomm_jax as lc  # noqa: E402
from lowcomm_jax.checkpoint import Checkpoints  # noqa: E402
from lowcomm_jax.sync.round_functions import rounded  # noqa: E402

SAVED = Path(__file__).with_name("saved")
BEFORE = tuple(name for name in METHODS if name not in LATER)
# Between them: payloads in flight, one landed in part; residuals; two levels of a codec; an anchor
# a region; trainers that merge.
QUICK = ("streaming_partly", "dilocox", "noloco", "adloco")


def ends(name, state):
    """What a run ended with, by name."""
    trees = {"anchor": lc.global_params(state), "regions": lc.region_params(state)}
    return {
        f"{name}/{what}/{leaf}": np.asarray(x, np.float32)
        for what, tree in trees.items()
        for leaf, x in tree.items()
    }


def second_half(name, folder):
    engine = make_engine(name)
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(engine, bf16_params(name), config={"method": name})
    assert found is not None and found.step == HALF
    return train(engine, found.state, range(HALF + 1, 2 * HALF + 1))


def extract(name, folder):
    with tarfile.open(SAVED / f"{name}.tar.xz") as archive:
        # As an attribute: `extractall(filter=)` is unknown to Python 3.11.2.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def test_a_checkpoint_with_shared_bases_is_refused_in_one_line(tmp_path):
    extract("dilocox_shared", tmp_path)
    engine, params = make_engine("dilocox"), bf16_params("dilocox")
    with (
        Checkpoints(tmp_path / "dilocox_shared") as checkpoints,
        pytest.raises(ValueError, match="or start anew with low_rank") as refused,
    ):
        checkpoints.restore(engine, params)
    assert "its regions share the basis" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in BEFORE],
)
def test_a_checkpoint_of_0_1_0_goes_on(name, tmp_path):
    """Or is refused by name: where a landing rule needs what rounding took from a narrow leaf.

    That version took what rounding took from `c`, in bf16, for progress.
    """
    extract(name, tmp_path)
    if rounded(METHODS[name](), {"c": bf16_params(name)["c"]}):
        with pytest.raises(ValueError, match="inner/rounding/c: missing"):
            second_half(name, tmp_path / name)
        return
    then = np.load(SAVED / "ends.npz")
    for leaf, value in ends(name, second_half(name, tmp_path / name)).items():
        off = 1e-2 if leaf.endswith("/c") else 1e-3
        np.testing.assert_allclose(value, then[leaf], rtol=off, atol=off, err_msg=leaf)


def write() -> None:
    """Write `saved/` with the package as it is."""
    SAVED.mkdir(exist_ok=True)
    every = {}
    for name in BEFORE:
        with tempfile.TemporaryDirectory() as folder:
            engine = make_engine(name)
            state = train(engine, engine.init(bf16_params(name)), range(1, HALF + 1))
            with Checkpoints(Path(folder) / name) as checkpoints:
                checkpoints.save(state, extra={}, config={"method": name}, method=engine.method)
            with tarfile.open(SAVED / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(Path(folder) / name, name)
            every |= ends(name, second_half(name, Path(folder) / name))
    np.savez_compressed(SAVED / "ends.npz", **every)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    write()
