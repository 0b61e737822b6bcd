"""A tiny comparison of two variants, and how it is run."""

import json
import os

from rich.console import Console

from experiments.compare.config import comparison, panel, variant
from experiments.compare.main import compare

STEPS = 12


def tiny(root):
    """Settings of a tiny run on the texts of a folder."""
    return {
        "steps": STEPS,
        "batch": 2,
        "model": {
            "layers": 1,
            "width": 16,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 8,
            "mlp_width": 24,
        },
        "data": {
            "corpus": f"text:{root / 'texts'}",
            "cache_dir": str(root / "cache"),
            "val_fraction": 0.3,
            "seq_len": 32,
        },
        "mesh": {"region": 1, "fsdp": 1},
        "inner": {"warmup_steps": 2},
        "eval": {"every": 4, "sequences": 20, "batch": 8},
        "checkpoint": {"every": 0},
    }


def config(root, **changes):
    variants = {
        "often": variant("diloco", method={"period": 3}),
        "seldom": variant("diloco", method={"period": 6}),
    }
    panels = {"one": panel("both", ("seldom", "often"), equal_bytes=True)}
    fields = {
        "seeds": (0, 7),
        "common": {**tiny(root), "regions": 3},
        "panels": panels,
        "networks": ("aws:Oregon,Virginia,Tokyo",),
        "step_seconds": 0.05,
        "compile_cache": "off",
    }
    return comparison(variants, "often", **{**fields, **changes})


def recording():
    return Console(width=200, record=True, file=open(os.devnull, "w"))


def compared(root, workdir, **changes):
    console = recording()
    code = compare(config(root, **changes), workdir, console)
    file = workdir / "compare.json"
    return code, json.loads(file.read_text()) if file.is_file() else None, console.export_text()
