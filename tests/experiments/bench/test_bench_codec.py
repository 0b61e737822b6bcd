"""`bench codec`: errors are those of NumPy, in both phases of codecs that share a basis."""

import jax
import numpy as np
import pytest

from experiments.bench import codec as bench_codec
from lowcomm_jax import compression

SIZE, RANK = 96, 5
FLAGS = [f"--size={SIZE}", f"--rank={RANK}", "--repeats=1"]


@pytest.fixture(scope="module")
def measured():
    rows = bench_codec.main([*FLAGS, "--codecs=int8,low_rank,low_rank_shared"])
    return {row["codec"]: row for row in rows}


def missed(x, v):
    """Relative error of a power step from V."""
    u = np.linalg.qr(x @ v)[0]
    return np.linalg.norm(x - u @ (u.T @ x)) / np.linalg.norm(x)


def test_factors_on_a_shared_basis_are_coded_on_what_is_agreed_on(measured):
    codec = compression.make("low_rank_shared", rank=RANK)
    held = codec.bases(jax.ShapeDtypeStruct((SIZE, SIZE), np.float32))[0]
    v, u = np.float64(held["v"][0]), np.float64(held["u"][0])
    for kind, make in (("gaussian", bench_codec._gaussian), ("heavy", bench_codec._heavy_tailed)):
        x, found = np.float64(make(SIZE)), measured["low_rank_shared"][f"error_{kind}"]
        assert found == pytest.approx(missed(x, v), abs=1e-5)
        # On the starting U it would be another.
        starting = np.linalg.norm(x - u @ (u.T @ x)) / np.linalg.norm(x)
        assert abs(found - starting) > 1e-3


def test_bytes_and_times_are_of_a_whole_round(measured):
    shared, own = measured["low_rank_shared"], measured["low_rank"]
    assert shared["bytes_per_value"] == own["bytes_per_value"] == 4 * 2 * RANK / SIZE
    for row in measured.values():
        assert row["of_copy"] == pytest.approx(row["copy_s"] / (row["encode_s"] + row["decode_s"]))
    # Half a step of a block's largest value, at most.
    assert 0 < measured["int8"]["error_gaussian"] < 1 / 127


def shown(text):
    return {line.split()[0] for line in text.splitlines() if line.strip()}


def test_names_are_printed_whole(measured, capsys):
    names = compression.names()
    bench_codec._print([measured["int8"] | {"codec": name} for name in names], bench_codec.Config())
    assert set(names) <= shown(capsys.readouterr().out)


@pytest.mark.slow
def test_without_names_every_codec_has_a_row(capsys):
    rows = bench_codec.main(FLAGS)
    assert [row["codec"] for row in rows] == list(compression.names())
    assert set(compression.names()) <= shown(capsys.readouterr().out)
