"""Flags of XLA by which programs of one region and of several round alike on a CPU."""

from __future__ import annotations

import importlib.metadata
import platform
import re

PASSES = "--xla_llvm_disable_expensive_passes=true"


def same_rounding() -> str:
    """The flags, for programs that also compile fast.

    Else products and sums are contracted inside a fusion, and what is fused differs. jaxlib dies of
    a flag that it does not know: until 0.11.0 its older fusions contract nothing, and compile in
    half the time; later ones contract where the processor is taken to have the instruction.
    """
    release = re.findall(r"\d+", importlib.metadata.version("jaxlib"))[:3]
    if [*map(int, release)] < [0, 11, 1]:
        return f"{PASSES} --xla_cpu_use_fusion_emitters=false"
    return PASSES + " --xla_cpu_max_isa=AVX" * (platform.machine() in ("x86_64", "AMD64"))
