"""The outer step: which fragments are due, and what sends and landings do to the training state.

In: a method, and a state after inner steps. Out: the state after its sends and landings, and the
events that tell of them. What to open for what:

- When something is sent or lands, and in which order: `sync_loop`, on the host. Its other orders:
  `one_period_overlap` (DiLoCoX, eager), `gossip_loop` (NoLoCo), `finish` (the end of a run).
- What a send or landing computes, the pseudo-gradient included: `round_functions`.
- How that is compiled, with which shardings and donated buffers: `round_programs`.
- Gradients exchanged at every step (DDP, DeMo): `gradient_exchange`.
- What regions measure and send along (CoCoDC, DiLoCoX): `measurements`.
- The first state: `initial_state`. Settings that contradict each other: `checks`.
- Steps through stages of several regions (NoLoCo): `routed_steps`.
"""
