"""A transport of one's own: one file that implements `Transport`, handed to `exchange.store`."""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from regions.party import at_once

from lowcomm_jax import exchange
from lowcomm_jax.refused import Refused

FILE = Path(__file__).resolve().parents[2] / "examples" / "http_transport.py"
spec = importlib.util.spec_from_file_location("http_transport", FILE)
http_transport = importlib.util.module_from_spec(spec)
spec.loader.exec_module(http_transport)
REGIONS = 3


@pytest.fixture
def regions(tmp_path):
    made = [
        exchange.store(
            *(tmp_path.as_uri(), r, REGIONS, "run"), transport=http_transport.HttpTransport
        )
        for r in range(REGIONS)
    ]
    at_once(lambda x: x.join(20.0), made)
    yield made
    at_once(lambda x: x.close(linger_s=0.0), made)


def test_payloads_go_from_region_to_region(regions, tmp_path):
    sent = [{"x": np.full((1, 5), 10.0 + r, np.float32)} for r in range(REGIONS)]
    for r, one in enumerate(regions):
        one.start("k", sent[r])
    came = at_once(lambda x: x.finish("k"), regions)
    for one in came:
        assert one.participants.all()
        np.testing.assert_array_equal(one.arrays["x"], np.stack([x["x"][0] for x in sent]))
    assert not list(tmp_path.rglob("blob")), "nothing but records is in the store"
    assert all(one.counts()["received"] > 0 for one in regions)


def test_how_long_payloads_stay_follows_from_who_holds_them(tmp_path):
    """By what a transport says of itself, whatever its name is."""

    class Elsewhere(http_transport.HttpTransport):
        name, lingers = "elsewhere", False

    url, own = tmp_path.as_uri(), http_transport.HttpTransport
    made = [exchange.store(url, 0, 1, "run", transport=x) for x in (None, own, Elsewhere)]
    try:
        assert [(one.lingers, one._payload_gc.keep) for one in made] == [
            (False, 16),
            (True, 4),
            (False, 16),
        ]
    finally:
        for one in made:
            one.close()


def test_jobs_with_different_transports_are_refused(regions, tmp_path):
    other = exchange.store(tmp_path.as_uri(), 0, REGIONS, "run")
    with pytest.raises(ValueError, match="transport is 'http' there, 'store' here"):
        other.join(5.0)


def closed(context):
    """A transport that cannot be made."""
    raise OSError("the line is closed")


@pytest.mark.parametrize(
    ("transport", "line"),
    [
        (closed, "closed: the line is closed"),
        (functools.partial(closed), "closed: the line is closed"),
        (
            functools.partial(http_transport.HttpTransport, address="nonsense"),
            "HttpTransport: address='nonsense': give HOST:PORT, port 0 for a free one",
        ),
        (
            functools.partial(http_transport.HttpTransport, address="127.0.0.1:65536"),
            "HttpTransport: address='127.0.0.1:65536': give HOST:PORT, port 0 for a free one",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(tmp_path, transport, line):
    with pytest.raises(Refused) as caught:
        exchange.store(tmp_path.as_uri(), 0, REGIONS, "run", transport=transport)
    assert caught.value.lines == (line,)


def test_what_nobody_has_is_missing(regions):
    transport = regions[0]._context.transport
    with pytest.raises(exchange.Missing, match="no region that can be reached"):
        transport.get("0" * 64, 8, [1, 2])


def test_a_region_that_dies_within_an_answer_is_left_out(regions):
    """The exchange goes on; nobody else ends."""
    transport = regions[0]._context.transport
    held = {"whole": b"x" * 10, "cut": b"x" * 10}
    transport._held.update(held)
    handler = transport._server.RequestHandlerClass

    class Cut(handler):
        def send_header(self, name, value):
            more = 10 if self.path == "/cut" and name == "Content-Length" else 0
            super().send_header(name, str(int(value) + more) if more else value)

    transport._server.RequestHandlerClass = Cut
    other = regions[1]._context.transport
    assert other.get("whole", 10, [0]) == held["whole"]
    with pytest.raises(exchange.Missing):
        other.get("cut", 10, [0])


def test_it_is_small():
    assert len(FILE.read_text().splitlines()) < 100
