"""`bench pipeline`: what it measures, and what it refuses."""

import json

import jax
import pytest

from experiments.__main__ import main
from experiments.bench import pipeline
from experiments.cli import EXIT_REFUSED


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_1f1b_needs_less_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "LAYERS", 4)
    monkeypatch.setattr(pipeline, "WIDTH", 32)
    path = tmp_path / "rows.json"
    flags = ["--stages=2", "--microbatches=8", "--repeats=1", f"--json={path}"]
    assert main(["bench", "pipeline", *flags]) == 0
    rows = json.loads(path.read_text())["rows"]
    used = {(row["schedule"], row["remat"]): row["temporaries"] for row in rows}
    assert used["1f1b", "none"] < used["gpipe", "none"]
    assert used["1f1b", "full"] < used["gpipe", "full"]
    assert all(row["bubble"] == pytest.approx(1 / 9) and row["seconds"] > 0 for row in rows)
    assert "1.00 x" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(capsys):
    assert main(["bench", "pipeline", "--stages=9", "--microbatches=8,0"]) == EXIT_REFUSED
    error = capsys.readouterr().err
    assert "--stages=9: use 1 to 8" in error and "--microbatches=8,0" in error
