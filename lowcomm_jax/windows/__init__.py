"""How leaves that are sharded inside a region are dealt out in whole units, to be coded there."""

from lowcomm_jax.windows import columns, strips
from lowcomm_jax.windows.deal import Deal
from lowcomm_jax.windows.windows import Windows

__all__ = ["Deal", "Windows", "columns", "strips"]
