"""All bytes that go through the store are counted."""

import pytest

from lowcomm_jax.store.errors import StoreUnavailable
from lowcomm_jax.store.kv import MetricsCounter, Store


@pytest.fixture
def store(tmp_path):
    """Of a run whose record has ten bytes; nothing is counted yet."""
    made = Store(tmp_path.as_uri(), "run", MetricsCounter())
    made.create("run.0", b"0123456789")
    made.anchor("run.0")
    made.counter = MetricsCounter()
    return made


@pytest.mark.parametrize(
    ("act", "read", "written"),
    [
        (lambda store: store.read("run.0"), 10, 0),
        (lambda store: store.read("nothing"), 10, 0),  # is the run's record there?
        (lambda store: store.list("nothing"), 10, 0),
        (lambda store: store.create("k", b"1234"), 10, 4),
        (lambda store: store.create("run.0", b"1234"), 10, 0),
        (lambda store: store.write("k", b"1234"), 10, 4),
    ],
)
def test_reads_of_the_runs_record_are_counted_too(store, act, read, written):
    act(store)
    found = store.counter.read()
    assert (found.get("store_read", 0), found.get("store_written", 0)) == (read, written)


def test_what_is_read_beside_the_run_is_counted(store, tmp_path):
    Store(tmp_path.as_uri(), "other", MetricsCounter()).create("run.0", b"1234567")
    assert store.beside("run.0") == {"other": b"1234567"}
    assert store.counter.read()["store_read"] == 7


def test_a_folder_without_the_runs_record_counts_as_away(store, tmp_path):
    (tmp_path / "run" / "run.0").unlink()
    with pytest.raises(StoreUnavailable, match=r"record 'run\.0' is not there"):
        store.read("nothing")
    assert store.counter.read().get("store_read", 0) == 0
