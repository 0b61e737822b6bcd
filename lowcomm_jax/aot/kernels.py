"""Kernels of a compiled program on one device: what each computes, reads and writes.

A kernel is an instruction that a device launches: a fusion, a product, a library's call, a copy. A
fusion reads each operand once; of one that it only slices it reads the slices, and of one that it
updates in place nothing. It writes its results, of one updated in place the update. Bytes are those
of the device's main memory: values that a TPU keeps on the chip do not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from lowcomm_jax.aot.arithmetic import instruction_flops
from lowcomm_jax.aot.hlo import HloArray, Instruction, Program

PRODUCT, ATTENTION, OTHER = KINDS = "product", "attention", "other"
# Shares of the card's peaks that kernels reach: products and attention of its arithmetic, others of
# its memory. Measured in a profile of `diloco_150m`, 64 x 1,024, on one H100: products 0.73, others
# 0.81 (docs/accelerators.md, "On one H100"). There attention reached 0.26; no kernel of ours is it.
PRODUCTS_REACH, OTHERS_REACH = 0.75, 0.8

_NOTHING = (  # names, views and control flow: nothing is launched
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
    *("opt-barrier", "add-dependency", "partition-id", "replica-id", "while", "conditional"),
    *("call", "async-start", "async-update", "async-done", "send", "recv"),
)
_ATTENTION = ("fmha", "splash")
_LIBRARY = ("gemm", "cublas", "cudnn")
_SLICES = ("dynamic-slice", "gather", "slice")
_VIEWS = ("bitcast", "copy")
_UPDATE = "dynamic-update-slice"
_WORKSPACE = ("s8", "u8")  # of a library's product, its last result
_TARGET = r'custom_call_target="([^"]*)"'
_RESERVED = ("AllocateBuffer", "SliceId", "ConcatBitcast")  # on a TPU: names of memory


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
      kind: of `KINDS`. A fusion that holds a product is one.
      flops: of its products.
      nbytes: that it reads and writes.
      is_copy: whether it moves memory beside other kernels (`copy-start`).
    """

    kind: str
    flops: float
    nbytes: int
    is_copy: bool


def kernel_of(program: Program, one: Instruction, computation: str) -> Kernel | None:
    """The kernel that an instruction launches; None = none. Collectives are not to be asked for."""
    reserved = one.opcode == "custom-call" and one.attribute(_TARGET) in _RESERVED
    if one.opcode in _NOTHING or one.opcode.endswith("-done") or reserved:
        return None
    body = program.computations.get(one.called.get("calls", ""), ())
    inside = list(_inside(program, one, computation))
    kinds = {_kind(each) for each, _ in inside}
    known = program.named(computation)
    return Kernel(
        kind=next(kind for kind in (ATTENTION, PRODUCT, OTHER) if kind in kinds),
        flops=sum(instruction_flops(program, each, where) for each, where in inside),
        nbytes=_read(one, body, known) + _written(one, body, known),
        is_copy=one.opcode.endswith("-start"),
    )


def _inside(
    program: Program, one: Instruction, computation: str
) -> Iterator[tuple[Instruction, str]]:
    """An instruction, and those of a fusion, with their computations."""
    yield one, computation
    where = one.called.get("calls", "")
    for each in program.computations.get(where, ()):
        yield from _inside(program, each, where)


def _kind(one: Instruction) -> str:
    if one.opcode in ("dot", "convolution"):
        return PRODUCT
    if one.opcode != "custom-call":
        return OTHER
    target = (one.attribute(_TARGET) or "").lower()
    if any(word in target + one.op_name + one.name for word in _ATTENTION):
        return ATTENTION
    return PRODUCT if any(word in target for word in _LIBRARY) else OTHER


def _read(one: Instruction, body: Sequence[Instruction], known: dict[str, Instruction]) -> int:
    given = {int(x.attributes.split(")")[0]): x.name for x in body if x.opcode == "parameter"}
    total = 0
    for position, operand in enumerate(one.operands):
        nbytes = _in_memory(known[operand].arrays)
        name = given.get(position) if body else operand
        users = [x for x in body or (one,) if name in x.operands]
        if users and all(x.opcode in _SLICES for x in users):
            nbytes = min(nbytes, sum(x.nbytes for x in users))
        elif users and all(x.opcode == _UPDATE and x.operands[0] == name for x in users):
            nbytes = 0
        total += nbytes
    return total


def _written(one: Instruction, body: Sequence[Instruction], known: dict[str, Instruction]) -> int:
    if one.opcode.endswith("-start"):  # (operand, result, context)
        return _in_memory(one.arrays[1:2])
    outputs = one.arrays
    if one.opcode == "custom-call" and _kind(one) != OTHER and outputs[-1].dtype in _WORKSPACE:
        outputs = outputs[:-1]
    root = next((x for x in body if x.is_root), one)
    inner = {x.name: x for x in body} if body else known
    parts = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(parts) != len(outputs):  # one result of several arrays
        return _in_memory(outputs)
    updates = (_updated(part, inner, bool(body)) for part in parts)
    return sum(
        _in_memory([output]) and (update or output.nbytes)
        for output, update in zip(outputs, updates)
    )


def _updated(x: Instruction, inner: dict[str, Instruction], in_fusion: bool) -> int:
    """Bytes of the slice that a result updates in place; 0 = it is written anew."""
    while in_fusion and x.opcode in _VIEWS and x.operands[0] in inner:
        x = inner[x.operands[0]]
    return inner[x.operands[1]].nbytes if x.opcode == _UPDATE else 0


def _in_memory(arrays: Sequence[HloArray]) -> int:
    """Bytes in the device's main memory."""
    return sum(array.nbytes for array in arrays if array.space == 0)
