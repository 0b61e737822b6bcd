"""Bytes: per link and fragment, equal to the closed form."""

import pytest
from oracle.routes import sent_bytes

from lowcomm_jax.network import ROUTES, Ledger, VirtualClock, uniform


@pytest.mark.parametrize("route", ROUTES)
def test_bytes_on_the_links_add_up_to_the_closed_form(route):
    clock = VirtualClock(uniform(5, 1.0))
    groups = [(0, 3), (1, 4)] if route == "pair" else None
    for step in range(1, 4):
        for fragment, size in enumerate((1.0e6, 2.5e6)):
            clock.send(step, fragment, size, route, groups=groups)
            clock.land(step, fragment)
    ledger = clock.ledger
    sent = 3 * (4 if groups else 5) * sent_bytes(route, 1.0e6, 2 if groups else 5)
    assert ledger.sent_R(0).sum() == pytest.approx(sent)
    assert ledger.sent_R().sum() == pytest.approx(ledger.received_R().sum())
    assert ledger.sent_R().sum() == pytest.approx(ledger.sent_R(0).sum() + ledger.sent_R(1).sum())


def test_gather_of_unequal_payloads_is_counted_per_region():
    ledger = Ledger(("a", "b", "c"))
    ledger.book("f", "all_gather", [10, 20, 40], (0, 1, 2))
    assert ledger.links("f")[2, 1] == 40 and ledger.sent_R().tolist() == [20, 40, 80]
    assert ledger.received_R().tolist() == [60, 50, 30]
    assert ledger.links("other") == {}
    with pytest.raises(ValueError, match="equal payload sizes"):
        ledger.book("f", "two_shot", [10, 20, 40], (0, 1, 2))


def test_who_only_listens_is_booked_as_receiving():
    """Two members of 100 bytes and one listener: it gets both payloads, and sends nothing."""
    ledger = Ledger(("a", "b", "c"))
    ledger.book("p", "all_gather", [100, 100], [0, 2], listeners=[1])
    assert ledger.sent_R().tolist() == [200, 0, 200]
    assert ledger.received_R().tolist() == [100, 200, 100]
    for _ in range(2):
        ledger.book("q", "two_shot", [120, 120], [0, 2], listeners=[1])
    assert ledger.received_R("q").tolist() == [240, 240, 240]
    assert ledger.sent_R("q").sum() == 720
