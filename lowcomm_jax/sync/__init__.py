"""The outer step: which fragments are due, and what sends and landings do to the training state.

In: a method, and a state after inner steps. Out: the state after its sends and landings, and their
events. Which file holds what:

- When a fragment is sent or lands, and in which order: `sync_loop`, on the host. Its other orders:
  `one_period_overlap` (DiLoCoX, eager), `gossip_loop` (NoLoCo), `learner_loop` (Decoupled DiLoCo),
  `two_level_loop` (HALoS), `finish` (the end of a run).
- What a send or landing computes, the pseudo-gradient included: `round_functions`.
- How that is compiled, with which shardings and donated buffers: `round_programs`.
- Payloads exchanged beside inner steps (GPUs, TPUs): `concurrent_exchange`.
- Gradients exchanged at every step (DDP, DeMo): `gradient_exchange`.
- Channels (SPARTA, DES-LOC): `channel_exchange`, `channel_loop`.
- Values that regions measure and send in headers (CoCoDC, DiLoCoX): `measurements`.
- The first state: `initial_state`. Settings that contradict each other: `checks`.
- Steps through stages of several regions (NoLoCo): `routed_steps`.
"""
