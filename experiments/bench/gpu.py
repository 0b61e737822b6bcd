"""What training reaches on the GPU at hand, and what each choice of its program brings.

    python -m experiments bench gpu [--seconds=600] [--json=gpu.json] [--stages=speed,profile]
        [--codecs=int4,my_module:MINE]

Ten minutes on one H100, the most important first:

- `speed`: tokens a second, model FLOPs utilisation and memory of 150M and 1.3B parameters;
- `regions`: four regions on the card beside one, a token;
- `profile`: time by kind of kernel, and its share of the peak;
- `levers`: one choice of the program changed at a time;
- `codecs`: gigabytes a second of fp32 values, in and out;
- `attention`: how far its kernel's gradients are from plain products;
- `exchange`: how much of it runs beside inner steps, with two devices.

Each figure is in the file as soon as it is known. What would not end in time is left out and named,
and so is what failed: the exit code is then 1. On a CPU all of it runs with a small model, without
peak rates. The benchmark takes 92 % of the memory, unless XLA_CLIENT_MEM_FRACTION says how much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from experiments.bench import codec
from experiments.bench.gpu_stages import RATED, Bench, Case, Lever, Plan, smi
from experiments.bench.main import BenchTable, Row, flags, run
from experiments.cli import listed
from experiments.progress import known
from experiments.refusals import checked_flags
from experiments.train.devices import MEMORY, take_memory
from lowcomm_jax.aot.kernels import OTHER
from lowcomm_jax.compat import is_gpu


def _remat(*names: str) -> tuple[Lever, ...]:
    return tuple(Lever(f"remat={name}", model=(("remat", name),)) for name in names)


def _xla(name: str, option: str, value: Any, small: bool = False) -> Lever:
    return Lever(name, options=((option, value),), small=small)


_150M = Case("diloco_150m", 64, 1024, changes=(("remat", "none"),))
ON_CARDS = Plan(
    speed=(_150M, Case("scaling_1_3b", 16, 2048, changes=(("remat", "light"),))),
    regions=(_150M, dataclasses.replace(_150M, batch=16)),
    levers=(
        *_remat("light", "full"),
        Lever("a loop over layers", model=(("unroll", False),)),
        Lever("leaves by layer", model=(("layer_loop", "unrolled"),)),
        _xla("products by Triton", "xla_gpu_enable_triton_gemm", True),
        _xla("products by cuDNN, too", "xla_gpu_cudnn_gemm_fusion_level", 2),
        _xla("small, merged products", "xla_gpu_dot_merger_threshold_mb", 64, small=True),
        _xla("no latency hiding", "xla_gpu_enable_latency_hiding_scheduler", False),
        _xla("kernels not in graphs", "xla_gpu_graph_min_graph_size", 10**6),
        Lever("loss in 8 parts", model=(("loss_tiles", 8),)),
        Lever("batch=32", case=(("batch", 32),)),
        Lever("batch=128, light", case=(("batch", 128),), model=(("remat", "light"),)),
    ),
    # One of each kind, not all names: the later stages are to be reached within --seconds, too.
    # `bench codec` has all; `--codecs` names others here.
    codecs=("bf16", "int8", "int4", "stat4", "topk", "random_k", "dct_topk", "sign", "low_rank"),
    codec_size=16_384,
    exchange=dataclasses.replace(_150M, batch=16),
)
ON_PROCESSORS = Plan(
    speed=(Case("nano", 8, 64),),
    regions=(Case("nano", 8, 64), Case("nano", 2, 64)),
    levers=(
        *_remat("full"),
        _xla("small, few passes", "xla_llvm_disable_expensive_passes", True, small=True),
        Lever("batch=4", case=(("batch", 4),)),
    ),
    codecs=("int8", "topk"),
    codec_size=1024,
    exchange=Case("nano", 2, 64),
)


# -- what is shown -----------------------------------------------------------------------------


def header() -> Row:
    """What decides the figures, beside the machine and its versions."""
    device = jax.local_devices()[0]
    on_gpu = is_gpu(device)
    fractions = [os.environ[name] for name in MEMORY if name in os.environ]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "device": device.device_kind,
        "devices": jax.local_device_count(),
        "jax": jax.__version__,
        "cudnn": _cudnn() if on_gpu else None,
        "memory_fraction": fractions[0] if fractions and on_gpu else None,
        "memory_limit": limit,
        "card": smi(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _cudnn() -> str | None:
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _ms(seconds: float | None) -> str:
    return known(seconds, lambda s: f"{s * 1e3:.4g} ms")


def _gb(count: float | None) -> str:
    return known(count, lambda count: f"{count / 1e9:.2f} GB")


def _work(row: Row) -> str:
    if row["kind"] == OTHER:
        return _gb(row["bytes"])
    return known(row["flops"], lambda flops: f"{flops / 1e12:.4g} TFLOP")


_SHARE, _RATIO = "{:.1%}".format, "{:.3f}".format
_BATCH = ("sequences", lambda row: f"{row['batch']} x {row['length']:,}")
_MODEL = ("model", lambda row: row["model"])
_SPEED = (
    _MODEL,
    _BATCH,
    ("regions", lambda row: str(row["regions"])),
    ("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
    ("step", lambda row: _ms(row["step_seconds"])),
    ("MFU", lambda row: known(row["mfu"], _SHARE)),
)
# Headings and cells of each stage's table.
STAGES: Mapping[str, tuple[tuple[str, Callable[[Row], str]], ...]] = {
    "speed": (
        *_SPEED,
        ("at least", lambda row: _ms(row["bound_seconds"])),
        ("memory asked", lambda row: _gb(row["memory_foretold"])),
        ("used", lambda row: _gb(row["memory_used"])),
        ("clock", lambda row: row["card"].get("clocks.sm", "-")),
    ),
    "regions": (*_SPEED, ("of one region", lambda row: known(row["of_one_region"], _RATIO))),
    "profile": (
        _MODEL,
        ("kind", lambda row: row["kind"]),
        ("time", lambda row: _ms(row["seconds"])),
        ("foretold", lambda row: _ms(row["foretold_seconds"])),
        ("of step", lambda row: known(row["seconds"] / row["step_seconds"], _SHARE)),
        ("of peak", lambda row: known(row["of_peak"], _SHARE)),
        ("work", _work),
        ("launches", lambda row: f"{row['launches']:,.0f}"),
    ),
    "levers": (
        ("lever", lambda row: row["lever"]),
        ("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
        ("of as it is", lambda row: known(row["of_as_it_is"], _RATIO)),
        ("TFLOP", lambda row: f"{row['flops'] / 1e12:.4g}"),
        ("others move", lambda row: _gb(row["other_bytes"])),
        ("in launches", lambda row: f"{row['other_launches']:,.0f}"),
        ("temporaries", lambda row: _gb(row["temporaries"])),
    ),
    "codecs": (
        *codec.COLUMNS[:2],
        *((f"{k} GB/s", lambda row, k=k: f"{row[f'{k}_rate'] / 1e9:.4g}") for k in RATED),
    ),
    "attention": (
        ("kernel", lambda row: row["kernel"]),
        ("gradients off by", lambda row: known(row["gradient_error"], _SHARE)),
    ),
    "exchange": (
        _MODEL,
        _BATCH,
        ("exchange", lambda row: _ms(row["exchange_seconds"])),
        ("beside work", lambda row: _ms(row["beside_work_seconds"])),
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module's docstring for the flags."""
    options = flags(repeats=3, seconds=600, json="gpu.json")
    options.text("stages", ",".join(STAGES), "what to measure, in this order")
    options.text("codecs", "", "names, separated by commas (default: some of each kind)")
    values = options.values
    checked_flags("bench gpu", argv, values, __doc__, known=list(STAGES))
    take_memory()
    plan = ON_PROCESSORS if jax.default_backend() == "cpu" else ON_CARDS
    if codecs := listed(values.codecs):
        plan = dataclasses.replace(plan, codecs=codecs)
    bench = Bench(plan, values.repeats)
    tables = {
        stage: BenchTable(bench.items(stage), STAGES[stage], lambda rows, stage=stage: stage)
        for stage in listed(values.stages)
    }
    return run("bench gpu", tables, values, **header())
