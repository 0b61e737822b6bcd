"""Count what XLA compiles, for tests that nothing recompiles."""

from collections.abc import Callable

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"


def compilations(run: Callable[[], object]) -> int:
    """How many programs were compiled while `run` ran."""
    counted = []

    def count(event, *_, **__):
        if event == COMPILED:
            counted.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        jax.block_until_ready(run())
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    return len(counted)
