"""Checkpoints of the whole training state, on Orbax."""

from lowcomm_jax.checkpoint.manager import Checkpoints, Restored
from lowcomm_jax.checkpoint.store import DamagedError

__all__ = ["Checkpoints", "DamagedError", "Restored"]
