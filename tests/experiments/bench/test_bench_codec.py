"""`bench codec`: errors are those of NumPy."""

import pytest

from experiments.bench import codec as bench_codec
from lowcomm_jax import compression

SIZE, RANK = 96, 5
FLAGS = [f"--size={SIZE}", f"--rank={RANK}", "--repeats=1"]


@pytest.fixture(scope="module")
def measured():
    rows = bench_codec.main([*FLAGS, "--codecs=int8,low_rank"])
    return {row["codec"]: row for row in rows}


def test_bytes_and_times_are_of_a_whole_round(measured):
    assert measured["low_rank"]["bytes_per_value"] == 4 * 2 * RANK / SIZE
    for row in measured.values():
        assert row["of_copy"] == pytest.approx(row["copy_s"] / (row["encode_s"] + row["decode_s"]))
    # Half a step of a block's largest value, at most.
    assert 0 < measured["int8"]["error_gaussian"] < 1 / 127


def test_a_codec_of_ones_own_is_measured():
    (row,) = bench_codec.main([*FLAGS, "--codecs=own_parts:SIGNS"])
    assert row["bytes_per_value"] == 1 + 4 / SIZE
    (low_rank,) = bench_codec.measure(["own_parts:FACTORS"], SIZE, 1, RANK)
    assert low_rank["bytes_per_value"] == 4 * 2 * RANK / SIZE


def shown(text):
    return {line.split()[0] for line in text.splitlines() if line.strip()}


def test_names_are_printed_whole(measured, capsys):
    names = compression.names()
    bench_codec._print([measured["int8"] | {"codec": name} for name in names], SIZE)
    assert set(names) <= shown(capsys.readouterr().out)


@pytest.mark.slow
def test_without_names_every_codec_has_a_row(capsys):
    rows = bench_codec.main(FLAGS)
    assert [row["codec"] for row in rows] == list(compression.names())
    assert set(compression.names()) <= shown(capsys.readouterr().out)
