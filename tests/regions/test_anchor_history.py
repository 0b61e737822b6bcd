"""Digests of anchors: computed once for the same arrays, and anew for others."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.jobs import anchor_history
from lowcomm_jax.jobs.anchor_history import AnchorHistory
from lowcomm_jax.params.fragments import Fragments, Piece

SHAPES = {name: jnp.zeros(3) for name in "ab"}
FRAGMENTS = Fragments(SHAPES, tuple((Piece(name, None),) for name in SHAPES))


def anchor(a, b=2.0):
    return {"a": jnp.full((1, 3), a), "b": jnp.full((1, 3), b)}


def state(anchor, *sends):
    return SimpleNamespace(
        anchor=anchor, in_flight={}, counters=SimpleNamespace(sends=np.array(sends))
    )


@pytest.fixture
def combined(monkeypatch):
    """Notes how often digests of fragments are combined."""
    made, act = [], anchor_history.combined_digest

    def combine(digests):
        made.append(len(digests))
        return act(digests)

    monkeypatch.setattr(anchor_history, "combined_digest", combine)
    return made


def test_a_known_version_keeps_its_finished_digest(combined):
    """What is noted again and again between two landings is dispatched once."""
    history, here = AnchorHistory(True), anchor(1.0)
    for _ in range(3):
        history.note(state(here, 4, 3), FRAGMENTS)
    first = history.past["4.3"]["anchor"]
    history.note(state(here, 4, 3), FRAGMENTS)
    assert history.past["4.3"]["anchor"] is first and combined == [2]
    assert history.terms(here, FRAGMENTS)["anchor"] is first


def test_another_anchor_of_a_known_version_takes_its_place(combined):
    """As after another state was restored."""
    history = AnchorHistory(True)
    found = []
    for one in (anchor(1.0), anchor(1.5), {**anchor(1.5), "b": jnp.full((1, 3), 7.0)}):
        history.note(state(one, 4, 3), FRAGMENTS)
        found.append(np.asarray(history.past["4.3"]["anchor"]).tolist())
        alone = AnchorHistory(True).terms(one, FRAGMENTS)["anchor"]
        assert found[-1] == np.asarray(alone).tolist()
    assert len(set(map(tuple, found))) == 3 and list(history.past) == ["4.3"]
