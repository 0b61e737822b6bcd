"""Bytes between regions: what leaves the senders arrives, and both are counted by hand."""

import dataclasses

import jax
import numpy as np
import pytest
from codec_cases import parts_of

import lowcomm_jax as lc
from lowcomm_jax.exchange import MeshExchange, all_gather, in_halves, two_shot
from lowcomm_jax.mesh.regions import Regions


@pytest.mark.parametrize("route", [two_shot, all_gather])
def test_what_is_sent_is_received(route):
    rng = np.random.default_rng(0)
    for _ in range(200):
        regions = int(rng.integers(1, 9))
        part = rng.random(regions) < 0.7
        nbytes = int(rng.integers(1, 5000))
        traffic = route(nbytes, part)
        assert traffic.sent.sum() == traffic.received.sum(), (regions, part, nbytes)
        assert (traffic.sent[~part] == 0).all()
        assert (traffic.sent >= 0).all() and (traffic.received >= 0).all()
        assert traffic.sent.dtype == traffic.received.dtype == np.int64
        if not part.any():
            assert traffic.received.sum() == 0


def test_two_shot_by_hand():
    # 3 regions of 120 bytes: a slice is 40; 2 slices go out and 2 finished ones go out.
    traffic = two_shot(120, [True] * 3)
    assert traffic.sent.tolist() == traffic.received.tolist() == [160] * 3
    # One absent: the two others exchange halves (60 + 60) and each sends its finished half on.
    traffic = two_shot(120, [True, False, True])
    assert traffic.sent.tolist() == [180, 0, 180]
    assert traffic.received.tolist() == [120, 120, 120]
    assert two_shot(120, [True]).sent.tolist() == [0]
    alone = two_shot(120, [False, True, False])
    assert alone.sent.tolist() == [0, 240, 0]
    assert alone.received.tolist() == [120, 0, 120]
    # Odd sizes are not lost to rounding: of three senders' slices the absent one gets 100 bytes.
    assert two_shot(100, [True, True, True, False]).received[3] == 100


def test_in_halves_by_hand():
    # 3 regions of 120 bytes: two slices of 40 go out, and one finished one to each of two.
    traffic = in_halves(120, [True] * 3)
    assert traffic.sent.tolist() == traffic.received.tolist() == [160] * 3
    assert traffic.route == "two_shot" and traffic.sent.dtype == np.int64
    # Who is absent sends no slices, and gets those that it is to reduce.
    traffic = in_halves(120, [True, False, True])
    assert traffic.sent.tolist() == [160, 80, 160]
    assert traffic.received.tolist() == [120, 160, 120]
    assert in_halves(120, [False] * 3).sent.tolist() == [0, 0, 0]


def test_all_gather_by_hand():
    traffic = all_gather(7, [True] * 4)
    assert traffic.sent.tolist() == traffic.received.tolist() == [21] * 4
    traffic = all_gather(7, [True, False, True, True])
    assert traffic.sent.tolist() == [21, 0, 21, 21]
    assert traffic.received.tolist() == [14, 21, 14, 14]


@pytest.mark.parametrize(
    ("codec", "route"),
    [
        (None, "two_shot"),
        ({"name": "int8", "reduce": "two_shot"}, "two_shot"),
        ("topk", "all_gather"),
        ("low_rank", "all_gather"),
    ],
)
def test_a_codec_books_the_collectives_that_run(codec, route):
    regions = Regions(3, lc.make_mesh(devices=jax.devices()[:1]), "map")
    like, part = {"w": jax.ShapeDtypeStruct((64, 48), np.float32)}, np.array([True, False, True])
    made = None if codec is None else lc.compression.make(codec)
    parts = made and parts_of(made, [like], 3)
    exchange = MeshExchange(regions, made, parts=parts)
    traffic = exchange.traffic(like, part, header=8)
    expected = {"two_shot": two_shot, "all_gather": all_gather}[route](
        exchange.nbytes(like) + 8, part
    )
    assert (traffic.route, traffic.nbytes) == (route, expected.nbytes)
    np.testing.assert_array_equal(traffic.sent, expected.sent)
    np.testing.assert_array_equal(traffic.received, expected.received)
    alone = dataclasses.replace(exchange, one_by_one=True).traffic(like, part, header=8)
    assert alone.route == "all_gather", "a rule that reads payloads one by one needs all of them"
    np.testing.assert_array_equal(alone.sent, all_gather(expected.nbytes, part).sent)


def test_groups_exchange_among_themselves():
    regions = Regions(4, lc.make_mesh(devices=jax.devices()[:1]), "map")
    like, part = {"w": jax.ShapeDtypeStruct((5,), np.float32)}, np.array([True, True, False, True])
    traffic = MeshExchange(regions).traffic(like, part, [(0, 3), (1, 2)], header=2)
    assert (traffic.route, traffic.nbytes) == ("pair", 22)
    assert traffic.sent.tolist() == [22, 22, 0, 22]
    assert traffic.received.tolist() == [22, 0, 22, 22]


def test_exchanges_add_up_under_the_first_ones_route():
    one, other = all_gather(7, [True] * 2), in_halves(12, [True] * 2)
    both = one.plus(other)
    assert (both.route, both.nbytes) == ("all_gather", 19)
    assert both.sent.tolist() == [7 + 12] * 2 == both.received.tolist()
