"""EF21 in a run: the receivers' copies, their mean, and what the engine refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax.compression import PerTensor, ef21, integrate, make
from lowcomm_jax.compression.codecs.top_k import TopK

R, PERIOD, LR, OUTER = 3, 2, 0.1, 0.5
PULLS = np.array(
    [
        [2.03, -1.1, 0.57, 4.3, 0.01, 1.9],
        [1.2, 3.7, -2.6, 0.23, 5.1, -0.9],
        [-3.3, 1.4, 0.8, 2.2, -0.5, 6.7],
    ],
    "f4",
)
# Region 1 is absent in round 0, region 2 in round 3.
ABSENT = {(0, 1), (3, 2)}


def keeps(x, k):
    """x with all but its k largest magnitudes zeroed."""
    return np.where(np.abs(x) >= np.sort(np.abs(x))[-k], x, 0) if k else x


def by_hand(rounds, k):
    """Anchors after every round: the anchor descends along the mean of all regions' copies."""
    anchor, theta = np.zeros(6), np.zeros((R, 6))
    copies, anchors = np.zeros((R, 6)), []
    for t in range(rounds):
        theta -= PERIOD * LR * PULLS
        present = [r for r in range(R) if (t, r) not in ABSENT]
        for r in present:
            copies[r] += keeps(anchor - theta[r] - copies[r], k)
        anchor = anchor - OUTER * copies.mean(axis=0)
        theta[present] = anchor
        anchors.append(anchor)
    return anchors


def loss_fn(params, batch, rng):
    del rng
    return (params["w"] * batch["pull"][0]).sum()


def engine_of(method, **settings):
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    return lc.Engine(loss_fn, optax.sgd(LR), method, R, mesh=mesh, **settings)


@pytest.mark.parametrize("name,k", [("fp32", 0), ("topk", 2)])
def test_absent_regions_keep_their_share_of_the_mean(name, k):
    codec = ef21(make(name, **({"k": k} if k else {})))
    outer = optax.chain(integrate(), optax.sgd(OUTER))
    engine = engine_of(lc.methods.diloco(PERIOD, outer, codec=codec))
    state, batch = engine.init({"w": np.zeros(6, np.float32)}), {"pull": PULLS[:, None]}
    for t, want in enumerate(by_hand(6, k)):
        present = [(t, r) not in ABSENT for r in range(R)]
        for _ in range(PERIOD):
            state, _ = engine.step(state, batch, present)
        np.testing.assert_allclose(state.anchor["w"][0], want, atol=2e-5, err_msg=f"round {t}")


def test_the_error_of_an_increment_means_nothing_and_is_not_reported():
    method = lc.methods.diloco(1, optax.chain(integrate()), codec=ef21(make("topk", k=2)))
    engine = engine_of(method)
    _, metrics = engine.step(engine.init({"w": np.zeros(6, "f4")}), {"pull": PULLS[:, None]})
    [send] = [event for event in metrics["events"] if event.kind == "send"]
    assert "codec_error" not in send.values and "delta_norm" in send.values


@pytest.mark.parametrize(
    "method", [lc.methods.diloco(PERIOD), lc.methods.ddp()], ids=lambda method: method.name
)
def test_increments_that_nobody_sums_up_are_refused(method):
    engine = engine_of(dataclasses.replace(method, codec=ef21(make("topk"))))
    with pytest.raises(ValueError, match=r"nothing sums them up; use outer=optax\.chain"):
        engine.init({"w": np.zeros(6, np.float32)})


@dataclasses.dataclass(frozen=True)
class Sent(TopK):
    """Says by its summands alone who sent a value."""

    def summands(self, payload, unit):
        values, _ = super().summands(payload, unit)
        return values, (values != 0).astype(jnp.float32)


SENDERS = make("topk", mean="senders"), make("dct_topk"), PerTensor(Sent())


@pytest.mark.parametrize("codec", SENDERS)
def test_a_mean_over_senders_is_none_over_all_regions(codec):
    """Of [4, 1] and [1, 4] each sends one entry; the copies' mean moves by half of each."""
    with pytest.raises(ValueError, match=r"averages over senders.*mean='regions'"):
        engine_of(lc.methods.diloco(PERIOD, optax.chain(integrate()), codec=ef21(codec)))
    over_all = ef21(make("dct_topk", mean="regions"))
    engine_of(lc.methods.diloco(PERIOD, optax.chain(integrate()), codec=over_all))
