"""Bytes: counted from buffers, per link and fragment, equal to the closed form."""

import numpy as np
import pytest

from lowcomm_jax.network import ROUTES, Ledger, VirtualClock, payload_nbytes, uniform


def test_payload_bytes_are_the_bytes_of_the_buffers():
    payload = {
        "w": {"codes": np.zeros((3, 7), np.uint8), "scale": np.zeros(3, np.float32)},
        "rest": [np.zeros(5, np.int16), (np.zeros((), np.float32), None)],
    }
    assert payload_nbytes(payload) == 21 + 12 + 10 + 4
    assert payload_nbytes(np.zeros((3, 4), np.float32), copies=3) == 16
    with pytest.raises(ValueError, match="does not divide into 3 regions"):
        payload_nbytes(np.zeros(7, np.uint8), copies=3)


@pytest.mark.parametrize("route", ROUTES)
def test_counted_equals_analytic_within_one_percent(route):
    clock = VirtualClock(uniform(5, 1.0, control_bytes=40))
    groups = [(0, 3), (1, 4)] if route == "pair" else None
    for step in range(1, 4):
        for fragment, size in enumerate((1.0e6, 2.5e6)):
            clock.send(step, fragment, size + 64, route, groups=groups, announced=size)
            clock.land(step, fragment)
    ledger = clock.ledger
    assert 0 < ledger.discrepancy() < 0.01
    assert ledger.sent_R().sum() == pytest.approx(ledger.received_R().sum())
    assert ledger.sent_R(0).sum() == pytest.approx(ledger.fragments()[0][0])
    total = sum(counted for counted, _ in ledger.fragments().values())
    assert total == pytest.approx(ledger.sent_R().sum())
    peers = 1 if route == "pair" else 4
    assert ledger.control_R[0] == 3 * 2 * 40 * peers


def test_gather_of_unequal_payloads_is_counted_per_region():
    ledger = Ledger(("a", "b", "c"))
    ledger.book("f", "all_gather", [10, 20, 40], (0, 1, 2))
    assert ledger.links("f")[2, 1] == 40 and ledger.sent_R().tolist() == [20, 40, 80]
    assert ledger.received_R().tolist() == [60, 50, 30]
    assert ledger.discrepancy() == pytest.approx(0.0)
    assert ledger.links("other") == {}
    with pytest.raises(ValueError, match="equal payload sizes"):
        ledger.book("f", "ring", [10, 20, 40], (0, 1, 2))


def test_a_wrong_announcement_is_seen():
    ledger = Ledger(("a", "b"))
    ledger.book(0, "ring", [100, 100], (0, 1), announced=80)
    assert ledger.discrepancy() == pytest.approx(0.25)


def test_who_only_listens_is_booked_as_receiving():
    """Two members of 100 bytes and one listener: it gets both payloads, and sends nothing."""
    ledger = Ledger(("a", "b", "c"))
    ledger.book("p", "all_gather", [100, 100], [0, 2], control_bytes=8, listeners=[1])
    assert ledger.sent_R().tolist() == [200, 0, 200]
    assert ledger.received_R().tolist() == [100, 200, 100]
    assert ledger.control_R.tolist() == [16, 16, 16]
    assert ledger.discrepancy() == 0
    ledger.book("q", "two_shot", [120, 120], [0, 2], listeners=[1], times=2)
    assert ledger.received_R("q").tolist() == [240, 240, 240]
    assert ledger.sent_R("q").sum() == 720
