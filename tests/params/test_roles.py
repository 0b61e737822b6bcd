"""Which leaves are trained, which travel, and what happens to the others; any pytree of leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from params.tiny_runs import LR, R, X, engine, train

import lowcomm_jax as lc
from lowcomm_jax.params.layout import make_layout

# -- frozen leaves, masks -------------------------------------------------------------------------


def lora_loss(params, batch, rng):
    del rng
    weight = params["w"] + params["lora"]["a"] * params["lora"]["b"]
    return 0.5 * jnp.mean((batch["x"] * weight.sum() - 1.0) ** 2)


LORA = {
    "w": np.array([0.3, -0.2], np.float32),
    "lora": {"a": np.array([0.5, 0.1], np.float32), "b": np.array([0.2, 0.7], np.float32)},
    "table": np.arange(5, dtype=np.int32),
}
LORA_MASK = {"w": "frozen", "lora": {"a": "train", "b": "train"}, "table": "frozen"}


@pytest.mark.parametrize(
    "roles",
    [LORA_MASK, lambda name, leaf: "train" if name.startswith("lora") else "frozen"],
    ids=["pytree", "function"],
)
def test_frozen_leaves_do_not_move_and_do_not_travel(roles):
    one = engine(lora_loss, lc.methods.diloco(2), roles=roles)
    state = train(one, LORA, X)
    final = lc.global_params(state)
    np.testing.assert_array_equal(final["w"], LORA["w"])
    np.testing.assert_array_equal(final["table"], LORA["table"])
    assert np.abs(np.asarray(final["lora"]["a"]) - LORA["lora"]["a"]).min() > 1e-4
    assert sorted(state.anchor) == ["lora/a", "lora/b"]
    assert sorted(state.frozen) == ["table", "w"]
    # 16 bytes of LoRA, two rounds, two-shot: 2 (R - 1) / R of them.
    assert state.counters.bytes_sent.tolist() == [2 * round(2 * 16 * 2 / 3)] * R
    assert jax.tree.map(np.shape, lc.region_params(state))["table"] == (R, 5)


@pytest.mark.parametrize("array", [np.full, jnp.full])
def test_frozen_leaves_are_copies(array):
    """JAX takes a large NumPy array as it is, and an array of the user's may be donated."""
    given = {"w": np.float32(1.0), "table": array((1 << 16,), 2.0, np.float32)}
    roles = {"w": "train", "table": "frozen"}
    state = engine(lora_loss, lc.methods.diloco(2), roles=roles).init(given)
    if isinstance(given["table"], np.ndarray):
        given["table"][:] = 100.0
    else:
        given["table"].delete()
    np.testing.assert_array_equal(lc.global_params(state)["table"], np.full(1 << 16, 2.0))


def test_integer_leaves_are_frozen_without_being_told():
    one = engine(lora_loss, lc.methods.ddp())
    state = train(one, LORA, X)
    assert sorted(state.frozen) == ["table"]
    assert lc.global_params(state)["table"].dtype == jnp.int32


def test_violations_are_listed_together():
    roles = {"w": "fixed", "lora": {"a": "frozen", "b": "frozen"}, "table": "train"}
    with pytest.raises(ValueError) as error:
        engine(lora_loss, lc.methods.diloco(2), roles=roles).init(LORA)
    assert "'w': role 'fixed'" in str(error.value)
    assert "'table': dtype int32 cannot have role train" in str(error.value)
    with pytest.raises(ValueError, match="no leaf is trained"):
        make_layout(LORA, lambda name, leaf: "frozen")


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match="a/b"):
        make_layout({"a/b": np.ones(2, np.float32), "a": {"b": np.ones(3, np.float32)}})


# -- non-trainable state --------------------------------------------------------------------------


def norm_loss(params, batch, rng):
    del rng
    updates = {
        "mean": 0.7 * params["mean"] + 0.3 * jnp.mean(batch["x"]),
        "seen": params["seen"] + 1,
    }
    return 0.5 * jnp.mean((params["w"] * batch["x"] - 1.0) ** 2), {"updates": updates}


NORM = {"w": np.float32(0.4), "mean": np.float32(0.2), "seen": np.int32(3)}


def norm_roles(kind):
    return {"w": "train", "mean": kind, "seen": "local"}


def means_by_hand(kind, period, absent=()):
    mean = np.full(R, 0.2)
    for t, batch in enumerate(X, 1):
        mean = 0.7 * mean + 0.3 * batch["x"][:, 0]
        if kind == "average" and t % period == 0:
            inside = [r for r in range(R) if (t, r) not in absent]
            mean[inside] = mean[inside].mean()
    return mean


@pytest.mark.parametrize("kind", ["local", "average"])
@pytest.mark.parametrize("absent", [(), ((4, 1),)], ids=["all", "skip"])
def test_batch_norm_like_state(kind, absent):
    one = engine(norm_loss, lc.methods.diloco(2), roles=norm_roles(kind))
    state = train(one, NORM, X, lambda t: [(t, r) not in absent for r in range(R)])
    expected = means_by_hand(kind, 2, absent)
    np.testing.assert_allclose(state.inner.buffers["mean"], expected, rtol=1e-6)
    assert state.inner.buffers["seen"].tolist() == [8] * R
    assert state.inner.buffers["seen"].dtype == jnp.int32
    np.testing.assert_allclose(lc.region_params(state)["mean"], expected, rtol=1e-6)


def test_global_params_have_the_mean_of_what_regions_gathered_since_the_last_round():
    one = engine(norm_loss, lc.methods.diloco(2), roles=norm_roles("average"))
    state = train(one, NORM, X[:3])  # one step behind the round of step 2
    gathered = np.asarray(state.inner.buffers["mean"])
    assert np.ptp(gathered) > 0.5
    model = lc.global_params(state)
    np.testing.assert_allclose(model["mean"], gathered.mean(), rtol=1e-6)
    assert model["seen"] == 6
    # A region that diverged does not count, unless all did.
    for factors, expected in (([np.nan, 1, 1], gathered[1:].mean()), ([np.nan] * 3, np.nan)):
        buffers = {**state.inner.buffers, "mean": gathered * np.float32(factors)}
        inner = dataclasses.replace(state.inner, buffers=buffers)
        found = lc.global_params(state.replace(inner=inner))["mean"]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    state = one.finish(state)
    everywhere = state.inner.buffers["mean"]
    np.testing.assert_array_equal(everywhere, np.full(R, lc.global_params(state)["mean"]))


def test_state_is_averaged_at_every_step_of_ddp():
    state = train(engine(norm_loss, lc.methods.ddp(), roles=norm_roles("average")), NORM, X)
    expected = means_by_hand("average", 1)
    np.testing.assert_allclose(state.inner.buffers["mean"], expected, rtol=1e-6)


@pytest.mark.parametrize("speeds", [(1.0, 0.5, 1.0)])
def test_regions_that_send_one_by_one_have_no_mean_of_all(speeds):
    method = lc.methods.async_local_sgd(2, speeds)
    one = engine(norm_loss, method, roles=norm_roles("average"))
    with pytest.raises(ValueError, match=r"role 'average' need a mean of all.*role 'local'"):
        train(one, NORM, X[:2])


def test_averaged_state_is_counted_in_the_bytes():
    def sent(kind):
        one = engine(norm_loss, lc.methods.diloco(2), roles=norm_roles(kind))
        return train(one, NORM, X[:2]).counters.bytes_sent.sum()

    assert sent("average") > sent("local")


def test_unknown_update_names_are_refused():
    def loss(params, batch, rng):
        return norm_loss(params, batch, rng)[0], {"updates": {"w": params["w"]}}

    one = engine(loss, lc.methods.diloco(2), roles=norm_roles("local"))
    with pytest.raises(ValueError, match=r"\['w'\].*'local' or 'average'.*\['mean', 'seen'\]"):
        train(one, NORM, X[:1])


def test_statistics_that_no_step_replaces_are_told_once():
    def loss(params, batch, rng):
        return norm_loss(params, batch, rng)[0]

    for method in (lc.methods.diloco(2), lc.methods.ddp()):
        one = engine(loss, method, roles=norm_roles("average"))
        with pytest.warns(UserWarning) as told:
            train(one, NORM, X)
        (line,) = [str(x.message) for x in told]
        assert line.startswith("loss_fn returns no aux['updates'], so that these leaves of role ")
        assert "never change: 'mean'; return " in line
        assert "(loss, {'updates': {'mean': new value, ...}})" in line and "'frozen'" in line


def test_a_counter_that_no_step_replaces_is_not_told():
    def loss(params, batch, rng):
        return norm_loss(params, batch, rng)[0]

    roles = {"w": "train", "mean": "frozen", "seen": "local"}
    train(engine(loss, lc.methods.diloco(2), roles=roles), NORM, X[:1])


# -- inner optimizers on the user's tree ----------------------------------------------------------

LABELS = {"w": "slow", "lora": {"a": "fast", "b": "slow"}, "table": "slow"}


def labelled(rates):
    return optax.multi_transform({k: optax.sgd(v, momentum=0.3) for k, v in rates.items()}, LABELS)


@pytest.mark.parametrize(
    "method,roles", [("ddp", None), ("diloco", LORA_MASK)], ids=["default", "lora"]
)
def test_multi_transform_on_the_users_tree(method, roles):
    made = {"diloco": lc.methods.diloco(2), "ddp": lc.methods.ddp()}[method]
    one = engine(lora_loss, made, labelled({"slow": 0.0, "fast": LR}), roles=roles)
    final = lc.global_params(train(one, LORA, X))
    np.testing.assert_array_equal(final["lora"]["b"], LORA["lora"]["b"])
    assert np.abs(np.asarray(final["lora"]["a"]) - LORA["lora"]["a"]).min() > 1e-4


def test_masked_on_the_users_tree():
    mask = {"w": True, "lora": {"a": False, "b": True}, "table": False}
    inner = optax.chain(optax.masked(optax.trace(0.3), mask), optax.scale(-LR))
    plain = optax.sgd(LR)
    one = engine(lora_loss, lc.methods.diloco(2), inner, roles=LORA_MASK)
    two = engine(lora_loss, lc.methods.diloco(2), plain, roles=LORA_MASK)
    momentum, none = (lc.region_params(train(e, LORA, X[:1])) for e in (one, two))
    np.testing.assert_allclose(momentum["lora"]["a"], none["lora"]["a"], rtol=1e-6)
    momentum, none = (lc.region_params(train(e, LORA, X[:3])) for e in (one, two))
    assert np.abs(np.asarray(momentum["lora"]["b"] - none["lora"]["b"])).max() > 1e-5


@pytest.mark.parametrize(
    "inner",
    [optax.contrib.muon(0.1), optax.adafactor(0.1, min_dim_size_to_factor=2)],
    ids=["muon", "adafactor"],
)
def test_optimizers_whose_state_is_not_shaped_like_the_parameters(inner):
    def loss(params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"] + params["b"][None]) ** 2)

    params = {"w": np.ones((4, 6), np.float32), "b": np.zeros(6, np.float32)}
    one = lc.Engine(loss, inner, lc.methods.diloco(2), R, mesh=lc.make_mesh(fsdp=2))
    state = train(one, params, [{"x": np.ones((R, 2, 4), np.float32)}])
    assert (np.asarray(lc.region_params(state)["w"]) < 1).all()


def test_a_constant_update_of_state_is_accepted():
    def loss(params, batch, rng):
        updates = {"mean": jnp.zeros(()), "seen": jnp.zeros((), jnp.int32)}
        return jnp.mean((params["w"] * batch["x"]) ** 2), {"updates": updates, "tokens": 5.0}

    one = engine(loss, lc.methods.diloco(2), roles=norm_roles("local"))
    state = train(one, NORM, X[:1])
    assert state.inner.buffers["seen"].tolist() == [0] * R
    assert state.inner.tokens.tolist() == [[5.0]] * R


# -- what Flax keeps apart ------------------------------------------------------------------------


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5, name="norm")(x)
        return linen.Dense(1, name="head")(x)


def linen_loss(params, batch, rng):
    del rng
    x = jnp.stack([batch["x"], -2 * batch["x"]], axis=1)
    out, moved = Normed().apply(params, x, True, mutable=["batch_stats"])
    new = {
        f"batch_stats/norm/{name}": value for name, value in moved["batch_stats"]["norm"].items()
    }
    return jnp.mean((out - 1.0) ** 2), {"updates": new}


def test_linens_batch_statistics_are_averaged_not_trained():
    with jax.numpy_rank_promotion("allow"):
        params = Normed().init(jax.random.key(0), jnp.ones((3, 2)), True)
        state = train(engine(linen_loss, lc.methods.diloco(2)), params, X)
    layout = make_layout(params)
    roles = dict(zip(layout.names, layout.roles))
    assert roles == {
        "batch_stats/norm/mean": "average",
        "batch_stats/norm/var": "average",
        "params/norm/scale": "train",
        "params/norm/bias": "train",
        "params/head/kernel": "train",
        "params/head/bias": "train",
    }
    assert not any("batch_stats" in name for name in state.anchor)
    moved = lc.region_params(state)["batch_stats"]["norm"]["mean"]
    assert np.abs(np.asarray(moved)).max() > 0


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.head = nnx.Linear(2, 1, rngs=rngs)


def test_nnx_batch_statistics_are_averaged():
    layout = make_layout(nnx.state(Layers(nnx.Rngs(0))))
    roles = dict(zip(layout.names, layout.roles))
    assert {name for name, role in roles.items() if role == "average"} == {
        "norm/mean/value",
        "norm/var/value",
    }
    assert {name for name, role in roles.items() if role == "train"} == {
        "norm/scale/value",
        "norm/bias/value",
        "head/kernel/value",
        "head/bias/value",
    }


class Steps(nnx.Variable):
    """Of a kind of the user's own."""


def test_kinds_that_only_the_user_knows_are_refused_with_the_fix():
    with pytest.raises(ValueError, match="'spectral/u': the role of spectral is not known; give"):
        make_layout({"params": {"w": np.ones(2)}, "spectral": {"u": np.ones(2)}})
    tree = nnx.State({"w": nnx.Param(jnp.ones(2)), "u": Steps(jnp.ones(2))})
    with pytest.raises(ValueError, match="'u/value': the role of Steps is not known"):
        make_layout(tree)
    chosen = make_layout(tree, lambda name, leaf: "local" if name.startswith("u") else "train")
    assert chosen.roles == ("local", "train")


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(1, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(x))


def dropped_loss(graph):
    def loss(params, batch, rng):
        del rng
        return jnp.mean((nnx.merge(graph, params)(batch["x"][:, None]) - 1.0) ** 2)

    return loss


def test_random_streams_of_nnx_are_refused_unless_their_role_is_given():
    """Frozen without a word, they gave one mask at all steps and in all regions."""
    graph, whole = nnx.split(Dropped(nnx.Rngs(0)))
    with pytest.raises(ValueError) as error:
        engine(dropped_loss(graph), lc.methods.diloco(2)).init(whole)
    (line,) = str(error.value).splitlines()[1:]
    assert line.startswith("- 'dropout/rngs/count/value', 'dropout/rngs/key/value': frozen NNX")
    assert "nnx.split(model, nnx.Param, ...)" in line and "rngs=nnx.Rngs(dropout=rng)" in line

    def roles(name, leaf):
        return "frozen" if "rngs" in name else "train"

    with jax.numpy_rank_promotion("allow"):
        state = train(engine(dropped_loss(graph), lc.methods.diloco(2), roles=roles), whole, X[:2])
    assert sorted(state.frozen) == ["dropout/rngs/count/value", "dropout/rngs/key/value"]


class Adapted(nnx.Module):
    def __init__(self, rngs, name="lora"):
        self.body = nnx.LoRALinear(3, 4, lora_rank=2, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)
        if name != "lora":  # the adapter's end is that of another parameter, too
            self.extra = nnx.LoRAParam(jnp.ones((4, 1)))
            self.head.extra = nnx.Param(jnp.ones(1))


@pytest.mark.parametrize("name, count", [("lora", 2), ("like another", 3)])
def test_an_adapter_beside_its_model_asks_what_is_trained(name, count):
    """All was trained and sent without a word. Both ways out of the message run."""
    _, params = nnx.split(Adapted(nnx.Rngs(0), name), nnx.Param)
    with pytest.raises(ValueError, match=f"{count} leaves are nnx.LoRAParam, and") as error:
        make_layout(params)
    (line,) = str(error.value).splitlines()[1:]
    adapter, everything = [part.partition(";")[0] for part in line.split("roles=")[1:]]
    kinds = make_layout(params, eval(adapter))
    trained = {n for n, role in zip(kinds.names, kinds.roles) if role == "train"}
    lora = {"body/lora/lora_a/value", "body/lora/lora_b/value"}
    assert trained == lora | ({"extra/value"} if name != "lora" else set())
    assert set(make_layout(params, eval(everything)).roles) == {"train"}


def test_an_adapter_alone_is_trained():
    _, params, _ = nnx.split(Adapted(nnx.Rngs(0)), nnx.LoRAParam, ...)
    assert make_layout(params).roles == ("train", "train")


def test_complex_leaves_need_a_role():
    """They were frozen without a word."""
    tree = {"w": np.ones(2, np.float32), "z": np.ones(2, np.complex64)}
    with pytest.raises(ValueError, match=r"'z': the role of dtype complex64 is not known; train"):
        make_layout(tree)
    assert make_layout(tree, {"w": "train", "z": "frozen"}).roles == ("train", "frozen")
    with pytest.raises(ValueError, match="'z': dtype complex64 cannot have role train"):
        make_layout(tree, lambda name, leaf: "train")


def test_float64_is_not_rounded_without_a_word():
    with jax.enable_x64(True):
        tree = {
            "w": jnp.ones(2, jnp.float64),
            "v": jnp.ones(2, jnp.float64),
            "b": jnp.ones(2, "f4"),
        }
        with pytest.raises(ValueError) as error:
            make_layout(tree)
        lines = str(error.value).splitlines()[1:]
        assert [line.split(":")[0] for line in lines] == ["- 'v'", "- 'w'"]
        assert "dtype float64 would be rounded" in lines[0] and "astype(jnp.float32)" in lines[0]
        roles = {"w": "frozen", "v": "local", "b": "train"}
        assert make_layout(tree, roles).roles == ("train", "local", "frozen")
        halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
        assert make_layout(halves).roles == ("train",) * 3


def test_parameters_called_like_a_field_of_a_rule():
    """HeLoCo reads the outer rule's `momentum`, Taylor's correction has a `correction_ratio`."""
    names = ("momentum", "correction_ratio")

    def loss(params, batch, rng):
        del rng
        return 0.5 * jnp.mean((batch["x"] * sum(params.values()).sum() - 1.0) ** 2)

    def both(make):
        for one, other in (names, ("a", "b")):
            params = {one: np.float32([0.3, -0.2]), other: np.float32([0.5, 0.1])}
            yield list(lc.global_params(train(engine(loss, make()), params, X)).values())

    def heloco():
        return lc.methods.heloco(2, (1.0, 0.5, 0.8))

    def cocodc():
        pattern = [".*"]
        return lc.methods.cocodc(2, 1, 1, syncs_per_period=1, taylor=0.5, pattern=pattern)

    for make in (heloco, cocodc):
        named, plain = both(make)
        np.testing.assert_allclose(sorted(map(tuple, named)), sorted(map(tuple, plain)), rtol=1e-6)
