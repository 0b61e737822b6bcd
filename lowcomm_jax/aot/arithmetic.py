"""Floating-point operations of a compiled program on one device: its matrix products.

Counted are `dot`, `convolution` (a product on a TPU), products by cuBLAS (of a GPU that is there),
and attention kernels, whose arithmetic follows from their shapes. Those in fusions and loops count
as often as they run. XLA's own cost analysis
counts the body of a loop once, and is missing for a GPU that is absent.
"""

from __future__ import annotations

import math
import re

from lowcomm_jax.aot.hlo import Instruction, Program

_TARGET = r'custom_call_target="([^"]*)"'


def matrix_flops(program: Program) -> float:
    """Operations of all matrix products; a multiply and an add are two."""
    return sum(
        times * instruction_flops(program, one, where)
        for one, where, times in program.instructions()
    )


def instruction_flops(program: Program, one: Instruction, computation: str) -> float:
    """Operations of one instruction itself; 0 where it is neither a product nor attention."""
    if one.opcode == "dot":
        return _product(program, one, computation, r"lhs_contracting_dims=\{([\d,]*)\}")
    if one.opcode == "convolution":
        return _convolution(program, one, computation)
    if one.opcode == "custom-call":
        if (one.attribute(_TARGET) or "").startswith(("__cublas$gemm", "__cublas$lt$matmul")):
            return _product(
                program, one, computation, r'"lhs_contracting_dimensions":\[([\d",]*)\]'
            )
        return _kernel(program, one, computation)
    return 0.0


def _product(program: Program, one: Instruction, computation: str, contracted: str) -> float:
    left = program.named(computation)[one.operands[0]].arrays[0].shape
    axes = re.findall(r"\d+", one.attribute(contracted) or "")
    return 2.0 * one.arrays[0].size * math.prod(left[int(i)] for i in axes)


def _convolution(program: Program, one: Instruction, computation: str) -> float:
    """2 x results x features x positions of the window that meet a value, not padding."""
    known = program.named(computation)
    left, right = (known[name].arrays[0].shape for name in one.operands[:2])
    lhs, rest = one.attribute(r"dim_labels=([\w>\-]+)").split("_")
    rhs, out = rest.split("->")
    sizes = _window(one, sum(letter.isdigit() for letter in lhs))
    result = one.arrays[0].shape
    met = 1.0
    for axis, (size, stride, low, spread, dilate) in enumerate(sizes):
        length = (left[lhs.index(str(axis))] - 1) * spread + 1
        count = result[out.index(str(axis))]
        places = (o * stride - low + w * dilate for o in range(count) for w in range(size))
        met *= sum(0 <= at < length and at % spread == 0 for at in places) / count
    features = right[rhs.index("i")]
    return 2.0 * one.arrays[0].size * features * met


def _window(one: Instruction, axes: int) -> list[tuple[int, int, int, int, int]]:
    """(size, stride, padding before, left dilation, right dilation) of each axis."""
    text = one.attribute(r"window=\{([^}]*)\}") or ""

    def field(name: str, default: str) -> list[str]:
        found = re.search(rf"\b{name}=(\S+)", text)
        return found[1].split("x") if found else [default] * axes

    rows = zip(
        field("size", "1"),
        field("stride", "1"),
        field("pad", "0_0"),
        field("lhs_dilate", "1"),
        field("rhs_dilate", "1"),
    )
    return [(int(s), int(t), int(p.split("_")[0]), int(a), int(b)) for s, t, p, a, b in rows]


def _kernel(program: Program, one: Instruction, computation: str) -> float:
    """Causal attention kernels: half of the products that all pairs of positions would need."""
    target = one.attribute(_TARGET) or ""
    known = program.named(computation)
    if target in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        # Queries [B, T, H, E] and keys [B, S, K, E].
        queries, keys = (known[name].arrays[0].shape for name in one.operands[:2])
        products = 2 if target == "__cudnn$fmhaSoftmax" else 5
        return products * 2.0 * math.prod(queries) * keys[1] / 2
    if target == "tpu_custom_call" and (products := _splash(one)):
        # Queries [..., H, T, E]; keys [..., S, E].
        queries, keys = _splash_shapes([known[name].arrays[0].shape for name in one.operands])
        return products * 2.0 * math.prod(queries) * keys[-2] / 2
    return 0.0


def _splash(one: Instruction) -> int:
    """Products a splash kernel makes of each pair of positions; 0 = it is another kernel."""
    name = one.op_name + one.name
    if "splash" not in name:
        return 0
    return 2 if "fwd" in name else 5 if "dkv" in name else 3


def _splash_shapes(shapes: list[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    wide = [shape for shape in shapes if len(shape) >= 4]
    return wide[0], wide[1]
