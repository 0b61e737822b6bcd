"""`bench codec`: errors are those of NumPy."""

import json
import time

import pytest
from rich.console import Console

from experiments.bench import codec as bench_codec
from experiments.bench.main import main, show
from experiments.cli import RefusedError
from lowcomm_jax import compression

SIZE, RANK = 96, 5


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs the command on a small matrix: the rows in its file."""
    file = tmp_path_factory.mktemp("bench") / "codec.json"

    def run(*flags):
        given = [f"--size={SIZE}", f"--rank={RANK}", "--repeats=1", f"--json={file}"]
        assert main(["codec", *given, *flags]) == 0
        found = json.loads(file.read_text())
        assert found["header"].items() >= {"size": SIZE, "rank": RANK, "repeats": 1}.items()
        assert not found["failed"]
        return found["rows"]

    return run


@pytest.fixture(scope="module")
def measured(command):
    return {row["codec"]: row for row in command("--codecs=int8,low_rank")}


def test_bytes_and_times_are_of_a_whole_round(measured):
    assert measured["low_rank"]["bytes_per_value"] == 4 * 2 * RANK / SIZE
    for row in measured.values():
        assert row["of_copy"] == pytest.approx(row["copy_s"] / (row["encode_s"] + row["decode_s"]))
    # Half a step of a block's largest value, at most.
    assert 0 < measured["int8"]["error_gaussian"] < 1 / 127


def test_a_codec_of_ones_own_is_measured(command):
    rows = command("--codecs=own_parts:SIGNS,own_parts:whole_codec")
    assert [row["bytes_per_value"] for row in rows] == [1 + 4 / SIZE] * 2
    low_rank = bench_codec.measure("own_parts:FACTORS", SIZE, 1, RANK)
    assert low_rank["bytes_per_value"] == 4 * 2 * RANK / SIZE


def test_an_unknown_codec_is_refused_before_any_is_timed():
    with pytest.raises(RefusedError, match=r"--codecs: .*did you mean int8"):
        main(["codec", "--codecs=int9"])


def test_what_an_earlier_call_has_found_stays_and_what_fails_is_said_once(
    tmp_path, monkeypatch, capsys
):
    file = tmp_path / "codec.json"
    file.write_text("found before")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_codec, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["codec", "--codecs=int8", f"--json={file}"])
    assert file.read_text() == "found before"
    with pytest.raises(KeyboardInterrupt):
        main(["codec", "--codecs=int8", f"--json={tmp_path}/new.json"])
    assert not (tmp_path / "new.json").exists()
    monkeypatch.setattr(bench_codec, "measure", lambda *_: 1 / 0)
    assert main(["codec", "--codecs=int8", f"--json={file}"]) == 1
    assert file.read_text() == "found before"
    capsys.readouterr()
    assert main(["codec", "--codecs=int8"]) == 1  # nor is a file needed
    said = capsys.readouterr().out
    assert said.count("codecs: int8: ZeroDivisionError: division by zero") == 1


def test_codecs_that_would_not_end_in_time_are_left_out(command, measured, monkeypatch):
    def slow(name, *_):
        time.sleep(0.6)  # of one second
        return measured["int8"] | {"codec": name}

    monkeypatch.setattr(bench_codec, "measure", slow)
    assert [row["codec"] for row in command("--seconds=1", "--codecs=int8,int4")] == ["int8"]


def shown(text):
    return {line.split()[0] for line in text.splitlines() if line.strip()}


def test_names_are_printed_whole(measured, capsys):
    names = compression.names()
    stage = bench_codec.BenchTable([], bench_codec.COLUMNS, lambda rows: "all")
    show(stage, [measured["int8"] | {"codec": name} for name in names], Console(width=80))
    assert set(names) <= shown(capsys.readouterr().out)


@pytest.mark.slow
def test_without_names_every_codec_has_a_row(command, capsys):
    rows = command()
    assert [row["codec"] for row in rows] == list(compression.names())
    assert set(compression.names()) <= shown(capsys.readouterr().out)
