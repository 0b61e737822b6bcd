r"""Send the entries that would change the bf16 weight, the largest k of every chunk.

$$\text{an entry may travel} \iff \mathrm{bf16}(\theta - x) \ne \mathrm{bf16}(\theta)$$

| symbol | meaning |
| --- | --- |
| $\theta$ | the weight that the value would change: of a pseudo-gradient the anchor, at the send |
| $x$ | the value: a pseudo-gradient and the residual of `error_feedback` |

Payloads have a static size, that of `TopK`: chunks, indices and `values` are its own. Of more than
k such entries in a chunk the largest magnitudes travel; of fewer, the places left over carry zeros.
What does not travel is lost, unless error feedback keeps it.

Error: that of `values` for an entry that travels; the entry itself for one that does not, in a
chunk of at most k that do at most bf16's spacing at the weight, abs(theta) 2^-7.

Source: PULSELoCo, arXiv 2602.03839, of which only the abstract was read: the gate is our reading.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.codecs.top_k import TopK
from lowcomm_jax.compression.units import Matrix, Payload
from lowcomm_jax.refused import refuse


@dataclasses.dataclass(frozen=True)
class BF16Gate(TopK):
    """See the module; settings as in `TopK`.

    Attributes:
      k: places of a chunk. Of 64 x 64 values 256 are 6.25 %, in 0.34 bytes a value.
    """

    k: int = 256
    reads_params = True

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = "a place without an entry would count as a 0 sent: leave mean out"
        refuse("BF16Gate", [None if self.mean == "regions" else f"mean={self.mean!r}: {wrong}"])

    @property
    def name(self) -> str:
        return super().name.replace("topk", "bf16_gate")

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        # As bits: compilers may compare two bf16 values as the fp32 ones that they were made of.
        changes = _bf16_bits(params - x) != _bf16_bits(params)
        return super().encode(jnp.where(changes, x, 0.0), matrix)


def _bf16_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


NAMES = {"bf16_gate": BF16Gate()}
FEEDBACK = {"bf16_gate_ef": 1.0}
