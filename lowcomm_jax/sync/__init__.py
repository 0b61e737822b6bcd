"""The outer step: which fragments are due, and what sends and landings do to the training state.

In: a method, and a state after inner steps. Out: the state after its sends and landings, and their
events. Which file holds what:

- What is done after a step: `sync_loop`, on the host, as the schedule says. Between whom:
  `carrier`. The end of a run: `finish`.
- What a send or landing computes, the pseudo-gradient included: `round_functions`; where groups
  exchange, `gossip_step`.
- How that is compiled, with which shardings and donated buffers: `round_programs`.
- Payloads exchanged beside inner steps (GPUs, TPUs): `concurrent_exchange`.
- Values that regions measure and send in headers (CoCoDC, DiLoCoX): `measurements`.
- The first state: `initial_state`. A region that comes back and copies a peer: `copies`.
- Methods with a loop of their own: `round_programs.Family`, which the room `loops` makes.
- Steps through stages of several regions (NoLoCo): `routed_steps`.
"""
