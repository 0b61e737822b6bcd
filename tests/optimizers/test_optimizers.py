"""Inner optimizers against rules written out in NumPy."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax.optimizers import InnerConfig, at_step, kind_of, learning_rate, make_optimizer

STEPS = 40


def params():
    draw = np.random.default_rng(3)

    def make(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    return {
        "embedding": {"table": make(7, 4)},
        "blocks": {0: {"norm": {"scale": make(4)}, "up": {"kernel": make(4, 6)}}},
        "head": {"kernel": make(4, 7)},
        "frozen": None,
    }


def updates(config, grads, count=1):
    rule, tree = make_optimizer(config, STEPS), params()
    state = rule.init(tree)
    for _ in range(count):
        out, state = rule.update(grads, state, tree)
    return out


def test_decay_reaches_matrices_only():
    zero = jax.tree.map(jnp.zeros_like, params())
    config = InnerConfig(weight_decay=0.3, warmup_steps=0, schedule="constant")
    out = updates(config, zero)
    kernel = params()["blocks"][0]["up"]["kernel"]
    np.testing.assert_allclose(out["blocks"][0]["up"]["kernel"], -1e-3 * 0.3 * kernel, rtol=1e-5)
    assert not out["embedding"]["table"].any()
    assert not out["blocks"][0]["norm"]["scale"].any()
    assert out["head"]["kernel"].any()
    with_tables = updates(dataclasses.replace(config, decay_embeddings=True), zero)
    assert with_tables["embedding"]["table"].any()
    assert out["frozen"] is None


def test_adamw_is_the_textbook_rule():
    config = InnerConfig(
        learning_rate=0.02, warmup_steps=3, weight_decay=0.2, clip_norm=0.7, schedule="constant"
    )
    grads = jax.tree.map(lambda x: 0.3 * x + 0.1, params())
    out = updates(config, grads, count=2)
    leaves = [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]
    clip = min(1.0, 0.7 / np.sqrt(sum((g**2).sum() for g in leaves)))
    g = clip * np.asarray(grads["head"]["kernel"], np.float64)
    m = (0.9 * 0.1 + 0.1) * g / (1 - 0.9**2)
    v = (0.95 * 0.05 + 0.05) * g**2 / (1 - 0.95**2)
    want = m / (np.sqrt(v) + 1e-8) + 0.2 * np.asarray(params()["head"]["kernel"], np.float64)
    np.testing.assert_allclose(out["head"]["kernel"], -0.02 * (2 / 3) * want, rtol=2e-5)


def test_adopt_divides_by_the_moment_of_gradients_before():
    """The first step only fills the second moment."""
    config = InnerConfig(
        optimizer="adopt", learning_rate=0.02, warmup_steps=0, weight_decay=0.2, clip_norm=None
    )
    config = dataclasses.replace(config, schedule="constant", b1=0.8, eps=1e-6)
    grads = jax.tree.map(lambda x: 0.3 * x + 0.1, params())
    head = np.asarray(params()["head"]["kernel"])
    first, second = (updates(config, grads, count)["head"]["kernel"] for count in (1, 2))
    np.testing.assert_allclose(first, -0.02 * 0.2 * head, rtol=1e-5)
    step = 0.2 * np.sign(np.asarray(grads["head"]["kernel"]))  # of g / |g|, after one average
    np.testing.assert_allclose(second, -0.02 * (step + 0.2 * head), rtol=1e-5)


def test_sgd_descends_and_decays_matrices():
    config = InnerConfig(
        optimizer="sgd", learning_rate=0.05, warmup_steps=0, weight_decay=0.3, schedule="constant"
    )
    tree, grads = params(), jax.tree.map(lambda x: jnp.sign(x) + 0.1, params())
    out = updates(dataclasses.replace(config, clip_norm=None), grads, count=2)
    for decay, path in ((0.3, ("head", "kernel")), (0.0, ("embedding", "table"))):
        w, g = (np.asarray(t[path[0]][path[1]]) for t in (tree, grads))
        np.testing.assert_allclose(out[path[0]][path[1]], -0.05 * (g + decay * w), rtol=1e-5)


def test_muon_moves_matrices_by_an_orthogonal_step():
    config = InnerConfig(
        optimizer="muon", learning_rate=0.05, warmup_steps=0, weight_decay=0.0, schedule="constant"
    )
    grads = jax.tree.map(lambda x: x - 0.2, params())
    out = updates(config, grads)
    moved = np.asarray(out["blocks"][0]["up"]["kernel"])
    singular = np.linalg.svd(moved, compute_uv=False) / (0.05 * 0.2 * np.sqrt(6))
    # Newton-Schulz with these coefficients brings singular values near 1, not to 1.
    assert (singular > 0.6).all() and (singular < 1.3).all()
    adamw = updates(dataclasses.replace(config, optimizer="adamw"), grads)
    for path in (("embedding", "table"), ("head", "kernel")):
        np.testing.assert_allclose(out[path[0]][path[1]], adamw[path[0]][path[1]], rtol=1e-6)


def test_muon_takes_stacked_layers_one_by_one():
    config = InnerConfig(optimizer="muon", warmup_steps=0, weight_decay=0.1, clip_norm=None)
    kernel = params()["blocks"][0]["up"]["kernel"]
    stack = {"blocks": {"up": {"kernel": jnp.stack([kernel, 2.0 * kernel[::-1]])}}}
    single = [{"blocks": {"up": {"kernel": k}}} for k in stack["blocks"]["up"]["kernel"]]
    rule = make_optimizer(config, STEPS, stacked=("blocks",))
    together, _ = rule.update(stack, rule.init(stack), stack)
    for i, one in enumerate(single):
        alone = make_optimizer(config, STEPS)
        want, _ = alone.update(one, alone.init(one), one)
        np.testing.assert_allclose(
            together["blocks"]["up"]["kernel"][i], want["blocks"]["up"]["kernel"], rtol=1e-4
        )


def test_muon_leaves_kernels_of_higher_rank_to_adamw():
    """[width, heads, head_dim] and a convolution: their last two axes alone are no matrix."""
    config = InnerConfig(optimizer="muon", warmup_steps=0)
    grads = {"query": {"kernel": jnp.ones((4, 2, 3))}, "conv": {"kernel": jnp.ones((3, 3, 2, 4))}}
    found, expected = (
        (rule := make_optimizer(one, STEPS)).update(grads, rule.init(grads), grads)[0]
        for one in (config, dataclasses.replace(config, optimizer="adamw"))
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "schedule,shares",
    [
        ("cosine", {0: 0.1, 9: 1.0, 25: 0.55 + 0.45 * np.cos(np.pi / 2), 40: 0.1}),
        ("wsd", {0: 0.1, 20: 1.0, 32: 1.0, 36: 0.55, 40: 0.1}),
        ("constant", {0: 0.1, 9: 1.0, 40: 1.0}),
    ],
)
def test_schedules(schedule, shares):
    config = InnerConfig(learning_rate=0.3, schedule=schedule, warmup_steps=10)
    rate = learning_rate(config, STEPS)
    got = np.asarray(rate(np.array(list(shares))))
    np.testing.assert_allclose(got, 0.3 * np.array(list(shares.values())), rtol=1e-5)


def test_the_last_step_is_a_step_above_the_final_fraction():
    """Schedules come to it after the last step; the first step of a decay still has the peak."""
    wsd = InnerConfig(learning_rate=1.0, schedule="wsd", warmup_steps=0, decay_fraction=0.25)
    got = np.asarray(learning_rate(wsd, STEPS)(np.array([30, 31, STEPS - 1, STEPS])))
    np.testing.assert_allclose(got, [1.0, 0.91, 0.1 + 0.9 / 10, 0.1], rtol=1e-5)
    cosine = InnerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=0)
    got = np.asarray(learning_rate(cosine, STEPS)(np.array([0, STEPS - 1, STEPS])))
    last = 0.1 + 0.45 * (1 - np.cos(np.pi / STEPS))
    np.testing.assert_allclose(got, [1.0, last, 0.1], rtol=1e-5)


def test_kinds():
    shape = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    assert kind_of("embedding/table", shape) == "embedding"
    assert kind_of("lm_head/kernel", shape) == "head"
    assert kind_of("blocks/0/attention/heads/kernel", shape) == "matrix"
    assert kind_of("blocks/norm/scale", shape, stacked=("blocks",)) == "vector"
    assert kind_of("multi_head_attention/query/w", shape) == "matrix"
    assert kind_of("output_head/kernel", shape) == kind_of("model.head.weight", shape) == "head"
    assert kind_of("attn/query/bias", shape) == kind_of("attn/query/bias/value", shape) == "vector"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            (name, "embedding")
            for name in ("emb", "tok_emb", "pos_emb/w", "model.emb.weight", "emb_0/table", "wte")
        ),
        *((name, "embedding") for name in ("embed_tokens/weight", "tok_embeddings/w", "Embed_0/e")),
        *((name, "matrix") for name in ("member/w", "embargo/w", "remb/w", "emblem", "ensemble/w")),
    ],
)
def test_embeddings_are_known_by_a_word_of_their_name(name, kind):
    assert kind_of(name, jax.ShapeDtypeStruct((3, 4), jnp.float32)) == kind


def test_all_violations_at_once():
    config = InnerConfig(
        optimizer="adam",
        schedule="linear",
        learning_rate=-1.0,
        b2=1.0,
        final_fraction=2.0,
        weight_decay=-0.1,
        clip_norm=0.0,
        warmup_steps=50,
        muon_steps=0,
    )
    with pytest.raises(ValueError) as error:
        make_optimizer(config, STEPS)
    for name in (
        "optimizer='adam'",
        "schedule='linear'",
        "learning_rate",
        "b2",
        "final_fraction",
        "weight_decay",
        "clip_norm",
        "warmup_steps=50",
        "muon_steps",
    ):
        assert name in str(error.value)


@pytest.mark.parametrize("optimizer", ["adamw", "adopt", "muon", "sgd"])
def test_trains_in_the_engine_with_a_frozen_leaf(optimizer):
    def loss_fn(p, batch, rng):
        del rng
        hidden = batch["x"] @ p["up"]["kernel"] * p["scale"][None] + p["shift"][None]
        return jnp.mean((hidden - batch["y"]) ** 2)

    draw = np.random.default_rng(0)
    tree = {
        "up": {"kernel": jnp.asarray(draw.normal(size=(5, 3)), jnp.float32)},
        "scale": jnp.ones(3),
        "shift": jnp.zeros(3),
    }
    engine = lc.Engine(
        loss_fn,
        make_optimizer(InnerConfig(optimizer=optimizer, learning_rate=0.1, warmup_steps=0), 30),
        lc.methods.local_sgd(5),
        regions=2,
        mesh=lc.make_mesh(devices=jax.devices()[:1]),
        roles=lambda name, leaf: "frozen" if name == "shift" else "train",
    )
    x = draw.normal(size=(2, 8, 5)).astype(np.float32)
    batch = {"x": x, "y": x @ draw.normal(size=(5, 3)).astype(np.float32)}
    state, history = engine.run(engine.init(tree), [batch] * 30)
    assert history["loss"][-1].mean() < 0.3 * history["loss"][0].mean()
    assert not np.asarray(lc.global_params(state)["shift"]).any()
    assert jax.tree.structure(optax.tree.zeros_like(tree)) == jax.tree.structure(
        lc.global_params(state)
    )


@pytest.mark.parametrize("inject", [False, True])
def test_who_comes_in_goes_on_with_the_schedule_of_the_run(inject):
    """Region 1 comes in at step 40; the moments of both stay as they are."""

    def rate(count):
        return 0.1 / (1 + count)

    make = optax.inject_hyperparams(optax.adam) if inject else optax.adam
    optimizer = make(learning_rate=rate)
    params = {"w": jnp.ones((2, 3))}
    opt = jax.vmap(optimizer.init)(params)
    for _ in range(3):
        _, opt = jax.vmap(optimizer.update)(params, opt, params)
    moved = at_step(opt, 40, np.array([False, True]))
    updates, _ = jax.vmap(optimizer.update)(params, moved, params)
    expected, _ = jax.vmap(optimizer.update)(params, opt, params)
    ratio = np.asarray(updates["w"] / expected["w"])
    np.testing.assert_allclose(ratio[0], 1.0)
    np.testing.assert_allclose(ratio[1], rate(40) / rate(3), rtol=1e-5)
