"""What is handed over to be sent is a snapshot: nothing that happens later changes or ends it."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from regions.test_same_numbers import METHODS, RULE
from regions.together import batches, engine, rows

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.jobs.anchors_ahead import AnchorsAhead

R, REGION, STEPS = 3, 1, 14
CASES = {
    **{name: METHODS[name] for name in METHODS if name != "local_sgd"},
    "int8": lambda: lc.methods.diloco(4, RULE, codec="int8"),
}


class Slow:
    """An exchange that copies to the host only when the payload lands: as late as there is.

    Attributes:
      given: all arrays it was ever given by (key, name), each with its bytes as of then.
    """

    def __init__(self, loopback):
        self._loopback = loopback
        self._waiting, self._early = {}, {}
        self.given = {}

    def __getattr__(self, name):
        return getattr(self._loopback, name)

    def send_early(self, key, arrays, **options):
        self._early[key] = arrays, options
        self._note(key, arrays)

    def start(self, key, arrays, *, early=None, **options):
        self._waiting[key] = arrays, {**options, "early": early}
        self._note(key, arrays)

    def _note(self, key, arrays):
        for name, x in arrays.items():
            # A copy of a copy: a view of the array itself would keep it from being donated.
            then = np.array(jnp.copy(x)) if isinstance(x, jax.Array) else x.copy()
            self.given[key, name] = x, then

    def reachable(self):
        return True

    def agreed_terms(self, key):
        return None

    def ready(self, key):
        return key in self._waiting

    def arrives(self, keys, answers=None):
        return all(map(self.ready, keys))

    def finish(self, key):
        arrays, options = self._waiting.pop(key)
        if (early := options["early"]) is not None:
            sent, how = self._early.pop(early)
            self._loopback.send_early(early, {name: np.array(x) for name, x in sent.items()}, **how)
        self._loopback.start(key, {name: np.array(x) for name, x in arrays.items()}, **options)
        return self._loopback.finish(key)

    def check(self):
        """All of it is what it was."""
        for (key, name), (x, then) in self.given.items():
            np.testing.assert_array_equal(np.array(x), then, f"{name} of {key}", strict=True)


def places(*trees):
    """Where the buffers of device arrays lie."""
    leaves = (x for tree in trees for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return {x.unsafe_buffer_pointer(): x for x in leaves if x.size}


def donated(state):
    """What later steps and landings overwrite."""
    return places(state.inner, state.anchor, state.outer, state.codec, state.landing)


@pytest.mark.parametrize("name", CASES)
def test_nothing_sent_is_overwritten_and_nothing_that_is_overwritten_was_sent(name, tmp_path):
    own = exchange.store(f"file://{tmp_path}", REGION, R, "run")
    one = engine(CASES[name](), R, own)
    one.carrier.exchange = slow = Slow(one.carrier.alone().exchange)
    one.carrier.tells = False
    if one.carrier.anchors_ahead is not None:
        one.carrier.anchors_ahead = AnchorsAhead(slow)
    flown = set()
    with jax.numpy_dtype_promotion("standard"):
        state = one.init(oracle.make_params())
        for batch in batches(STEPS, R):
            state, _ = one.step(state, rows(batch, REGION))
            overwritten = donated(state)
            sent = places([x for x, _ in slow.given.values()])
            assert not sent.keys() & overwritten.keys()
            for key, flight in state.in_flight.items():
                flown.add(key)
                local = places(flight.payload, flight.snapshot, flight.kept, flight.weight)
                assert not local.keys() & overwritten.keys()
                assert not any(x.is_deleted() for x in local.values())
        slow.check()
        one.finish(state)
    slow.check()
    # Several, and such as were under way while others landed, or steps were made.
    assert len({key for key, _ in slow.given}) >= 3
    assert bool(flown) == bool(np.any(CASES[name]().schedule.delay))
    kinds = {n.partition("/")[0] for _, n in slow.given}
    assert {"payload", "weight", *(["anchor"] if name == "noloco" else [])} <= kinds


def test_a_donated_buffer_would_be_noticed():
    """This backend does donate, and what is given up can no longer be read."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    given = jnp.arange(8.0)
    old = given.unsafe_buffer_pointer()
    assert step(given).unsafe_buffer_pointer() == old
    with pytest.raises(RuntimeError, match="deleted"):
        np.array(given)
