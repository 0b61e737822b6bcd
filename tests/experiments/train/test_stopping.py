"""When a signal stops a run that has the other regions to agree with."""

from types import SimpleNamespace

from experiments.train.stopping import Stopping
from lowcomm_jax.store.errors import StoreUnavailable


class Away:
    """An exchange whose store is away at the first question."""

    def __init__(self):
        self.asked, self.steps = [], lambda: {}

    def agree(self, name, proposal):
        self.asked.append((name, proposal))
        if len(self.asked) == 1:
            raise StoreUnavailable("away")
        return {"step": {"stop/0": 3, "stop/1": 12}[name]}


def stopping(exchange, requested=True, groups=None, **schedule):
    """Of a run that sends at every multiple of 4."""
    schedule = {"delay": 3, "period": 4, "land_after_send": False, "by_steps": True, **schedule}
    schedule = SimpleNamespace(next_send=lambda step, clock: (step // 4 + 1) * 4, **schedule)
    loop = SimpleNamespace(schedule=schedule, groups=lambda number: groups)
    engine = SimpleNamespace(sync_loop=lambda state: loop)
    run = SimpleNamespace(exchange=exchange, engine=engine, job=SimpleNamespace(by_rounds=False))
    return Stopping(run, SimpleNamespace(requested=requested, here=requested))


def saved(*given, **options):
    """`stopping`, once it was saved."""
    one = stopping(*given, **options)
    assert one.begins() and not one.begins()
    return one


def test_alone_a_run_stops_at_once():
    state = SimpleNamespace(counters=None)
    assert not stopping(None, requested=False).at(5, state)
    assert stopping(None).at(5, state)


def test_a_job_is_saved_before_it_agrees():
    """To agree may take long; waits for the others stop meanwhile."""
    exchange, state = Away(), SimpleNamespace(counters=None)
    one = stopping(exchange)
    assert not one.at(5, state) and one.unsaved and one.in_a_wait() and not exchange.asked
    assert one.begins() and not one.unsaved and not one.in_a_wait()
    one.at(5, state)
    assert exchange.asked
    quiet = stopping(exchange, requested=False)
    assert not quiet.at(5, state) and not quiet.unsaved and not quiet.in_a_wait()


def test_the_step_is_agreed_on_once_and_asked_for_again_when_the_store_was_away():
    """What was agreed on in an earlier stop, for step 3, is passed over."""
    exchange, state = Away(), SimpleNamespace(counters=None)
    one = saved(exchange)
    assert [one.at(step, state) for step in (5, 6, 11, 12)] == [False, False, False, True]
    assert exchange.asked == [(f"stop/{n}", {"step": 11}) for n in (0, 0, 1)]


def test_what_overlaps_a_whole_round_lands_with_the_send_after_it():
    exchange, state = Away(), SimpleNamespace(counters=None)
    exchange.asked = [None]
    assert not saved(exchange, land_after_send=True).at(5, state)
    assert exchange.asked[1] == ("stop/0", {"step": 12})


def test_who_was_cut_off_and_trained_on_is_not_left_alone():
    """Where what has landed decides what is sent, and has not landed here, it is a round later."""
    for by_steps, last in ((True, 19), (False, 13 + 6 + 1)):
        exchange, state = Away(), SimpleNamespace(counters=None)
        exchange.asked, exchange.steps = [None], lambda: {0: 5, 1: 13}
        assert not saved(exchange, by_steps=by_steps).at(5, state)
        assert exchange.asked[1] == ("stop/0", {"step": last})


def test_pairs_stop_past_the_furthest_of_all():
    exchange, state = Away(), SimpleNamespace(counters=None)
    exchange.asked, exchange.steps = [None], lambda: {0: 5, 1: 13}
    assert not saved(exchange, groups=((0, 1),)).at(5, state)
    assert exchange.asked[1] == ("stop/0", {"step": 24})
