"""Programs compiled ahead of time for accelerators that are not there, and read.

In: an engine on the mesh of a `Target`, and shapes. Out: `AheadOfTime`: memory, arithmetic,
traffic, collectives and expected times of every program.

- `targets`: the accelerators and their limits.
- `programs`: compiles the programs that a period of an engine calls.
- `hlo`: reads a compiled program's text; `collectives`, `arithmetic` and `kernels` count in it.
- `timeline`: when the device computes, and when it waits.
- `report`: combines the results.
"""

from lowcomm_jax.aot.report import AheadOfTime, ahead_of_time
from lowcomm_jax.aot.targets import ACCELERATORS, Target

__all__ = ["ACCELERATORS", "AheadOfTime", "Target", "ahead_of_time"]
