"""`bench gpu` on this machine's processor: all of it runs, and says what it cannot know."""

import json

import pytest

from experiments.bench import gpu, main
from experiments.cli import RefusedError


def test_a_small_case_is_measured_and_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "ON_PROCESSORS", (gpu.Case("nano", 2, 16, 2),))
    file = tmp_path / "gpu.json"
    assert main.main(["gpu", "--repeats=1", f"--json={file}"]) == 0
    assert "no kernel here" in capsys.readouterr().out
    found = json.loads(file.read_text())
    (row,) = found["rows"]
    assert row["tokens_per_step"] == 2 * 2 * 16 and row["tokens_per_second"] > 0
    # Parameters, two moments and an anchor at least, fp32.
    assert row["memory_foretold"] > 4 * 4 * 900_000
    assert row["mfu"] is None and row["bound_seconds"] is None


def test_no_repeats_are_refused():
    with pytest.raises(RefusedError, match="at least 1 is needed"):
        main.main(["gpu", "--repeats=0"])
