"""Methods learn: on generated text against stored intervals, on real text in order."""

import jax
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax.data import DataConfig, load
from lowcomm_jax.models import TransformerConfig, build

STEPS, BATCH, SEQ = 240, 4, 48
CONFIG = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp_width": 128}


def data(corpus, regions, cache):
    spec = DataConfig(corpus=corpus, seq_len=SEQ, regions=regions, cache_dir=str(cache), seed=0)
    return load(spec)


def train(method, regions, corpus, cache, seed=0, steps=STEPS):
    """Evaluation loss (nats per token) of the anchor after `steps` steps."""
    training, evaluation, tokenizer = data(corpus, regions, cache)
    model = build(TransformerConfig(vocab_size=tokenizer.vocab_size, max_seq_len=SEQ, **CONFIG))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, steps, 3e-4)
    engine = lc.Engine(
        model.loss_fn,
        optax.adamw(schedule),
        method,
        regions,
        mesh=lc.make_mesh(devices=jax.devices()[:1]),
    )
    state = engine.init(jax.jit(model.init)(jax.random.key(seed)))
    state, _ = engine.run(state, training.batches(0, BATCH, steps=steps))
    state = engine.finish(state)
    return evaluate(model, lc.global_params(state), evaluation)


def evaluate(model, params, evaluation):
    loss = jax.jit(lambda p, b: model.loss_fn(p, b, jax.random.key(0))[1]["ce"])
    batches = evaluation.batches(16, limit=64)
    keys = ("tokens", "mask")
    losses = [loss(params, {k: batches[k][i] for k in keys}) for i in range(len(batches["tokens"]))]
    return float(np.mean(losses))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("corpora")


# Mean +- 4 standard deviations over seeds 0, 1, 2 of one machine; chance level is ln 320 = 5.77.
STORED = {
    "diloco": (lambda: lc.methods.diloco(20, outer=lc.outer.nesterov(0.7, 0.5)), 0.79, 1.34),
    "streaming": (lambda: lc.methods.streaming_diloco(20, 3, 3, 0.5), 1.07, 1.22),
    "cocodc": (lambda: lc.methods.cocodc(20, 3, 3), 1.23, 1.45),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in STORED if name != "cocodc"]


@pytest.mark.parametrize("name", ["cocodc", *SLOW])
def test_reaches_the_stored_interval_on_generated_text(name, cache):
    make, low, high = STORED[name]
    assert low <= train(make(), 4, "synthetic:words", cache) <= high


def test_four_regions_beat_one_region_alone_on_real_text(cache):
    """Same steps, same inner optimizer; measured: 2.31 against 2.39, and 2.33 against 2.49."""
    method = lc.methods.diloco(20, outer=lc.outer.nesterov(0.7, 0.5))
    together = train(method, 4, "python", cache, steps=400)
    alone = train(lc.methods.local_sgd(10**6), 1, "python", cache, steps=400)
    assert together < alone
