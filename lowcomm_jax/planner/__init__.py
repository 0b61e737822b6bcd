"""Plans a run before it is paid for: bytes, utilisation, hours, memory and expected loss.

In: a workload, methods, a network. Out: one row a method, the best settings under a bound, and our
figures beside the published ones. NumPy only.
"""

from lowcomm_jax.planner.plan import PlanRow, Workload, plan

__all__ = ["PlanRow", "Workload", "plan"]
