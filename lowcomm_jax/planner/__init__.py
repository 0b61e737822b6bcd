"""Plans a run before it is paid for: bytes, utilisation, hours, memory and expected loss.

In: a `Workload` (model, tokens, network) and methods. Out: `plan` gives one `PlanRow` a method;
`search` the best settings under a bound on the loss. Nothing is compiled or run.

- `dry_run`: events and bytes, from the engine's own loop on shapes;
- `methods`: rows, and how they are made;
- `shapes`: abstract models; `memory`: bytes a device;
- `dag`: the layer-level time model;
- `expected_loss`: scaling laws and published penalties;
- `goodput`: what failures cost, by a closed form and by `goodput_simulation`.
"""

from lowcomm_jax.planner.plan import PlanRow, Workload, plan

__all__ = ["PlanRow", "Workload", "plan"]
