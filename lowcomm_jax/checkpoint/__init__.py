"""Checkpoints of the whole training state, on Orbax.

In: a `TrainState` (or several trainers' states) with whatever is in flight, the run's config and
method. Out: `Checkpoints` saves, keeps and restores them; a restored state goes on bit for bit, on
any mesh.

- `manager`: the directory of a run; `store`: one checkpoint on disk, verified when it is read;
- `load`: refuses another run's checkpoint, resumes with another number of regions;
- `target`: the state an engine expects.
"""

from lowcomm_jax.checkpoint.manager import Checkpoints, Restored
from lowcomm_jax.checkpoint.store import DamagedError

__all__ = ["Checkpoints", "DamagedError", "Restored"]
