"""What `train` prints of its speed: with a known peak, its share, too."""

import dataclasses
import re

import jax
import pytest

from experiments.__main__ import main
from experiments.metrics import read_records
from lowcomm_jax.aot import ACCELERATORS


def test_of_a_known_device_the_share_of_its_peak_is_printed(tiny, tmp_path, monkeypatch, capsys):
    kind, peak = jax.devices()[0].device_kind, 1e9
    known = dataclasses.replace(ACCELERATORS["h100"], kind=kind, flops=peak)
    monkeypatch.setitem(ACCELERATORS, "this processor", known)
    tiny.corpus(tmp_path / "texts")
    settings = ("steps=4", "log.every=2", "eval.every=0")
    command = tiny.arguments(tmp_path, "--config=diloco", *(f"--config.{s}" for s in settings))
    with jax.numpy_dtype_promotion("standard"):
        assert main(["train", *command, f"--workdir={tmp_path / 'run'}"]) == 0
    header = read_records(tmp_path / "run" / "metrics.jsonl")[0]
    shown = re.findall(r"([\d,]+) tokens/s \(([\d.]+)% MFU\)", capsys.readouterr().out)
    assert len(shown) == 2
    for tokens, share in shown:
        flops = float(tokens.replace(",", "")) * header["flops_per_token"]
        assert float(share) == pytest.approx(100 * flops / peak, rel=0.02, abs=0.06)
