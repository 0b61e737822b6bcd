"""The outer step: which fragments are due, and what sends and landings do to the training state.

In: a method, and a state after inner steps. Out: the state after its sends and landings, and the
events that tell of them. `sync_loop` runs on the host; `round_functions` are the pure functions
that `round_programs` compiles.
"""
