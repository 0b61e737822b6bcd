"""A transformer on GPUs, and what changes there; without one it runs on the CPU.

What you change is below, in `ON_GPU`: bfloat16 arithmetic, a larger model, longer sequences. What
changes by itself: attention is cuDNN's, layers are one loop, payloads of a method with a delay
travel while inner steps run, and the regions spread over the GPUs there are. Regions that share a
GPU run one after the other. Takes about 20 s on the CPU of a laptop.

    pip install -e '.[cuda12]'
    python examples/gpu.py
"""

import time

import jax
import numpy as np
import optax

import lowcomm_jax as lc
from lowcomm_jax.models import build, preset
from lowcomm_jax.models.protocol import param_count

REGIONS, STEPS = 2, 20
ON_GPU = jax.default_backend() == "gpu"

if ON_GPU:
    config = preset("diloco_60m", compute_dtype="bfloat16", remat="full")
    batch, seq_len = 32, 1024
else:
    config = preset("nano", layers=1)
    batch, seq_len = 4, 64

model = build(config)  # resolves "auto" for the device: the attention kernel, the loop over layers
params = jax.jit(model.init)(jax.random.key(0))


def samples(step):
    """Counting upwards from random tokens: `[regions, batch, seq_len + 1]`."""
    first = np.random.default_rng(step).integers(256, size=(REGIONS, batch, 1))
    return {"tokens": ((first + np.arange(seq_len + 1)) % 256).astype(np.int32)}


# Several GPUs: `default_mesh` gives regions their own, and what is left over to FSDP inside them.
# `lc.make_mesh(region=2, fsdp=4)` says so explicitly.
method = lc.methods.streaming_diloco(period=10, fragments=2, overlap=3, alpha=0.5)
engine = lc.Engine(
    model.loss_fn,
    inner=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    method=method,
    regions=REGIONS,
)
state = engine.init(params)
state = engine.warm(state, samples(0))  # compiles the inner steps
began = time.perf_counter()
state, history = engine.run(state, (samples(step) for step in range(STEPS)))
loss = history["loss"]  # waits for the device
seconds = time.perf_counter() - began

print(f"device: {jax.devices()[0].device_kind}, mesh {dict(engine.regions.mesh.shape)}")
print(
    f"model: {param_count(model):,} parameters in {config.compute_dtype}, "
    f"attention {model.config.attention}, layers {model.config.layer_loop}"
)
print(f"payloads travel beside inner steps: {engine.setup.concurrent}")
print(f"loss of the first and the last step: {loss[0].mean():.2f} and {loss[-1].mean():.2f}")
print(
    f"{STEPS * REGIONS * batch * seq_len / seconds:,.0f} tokens/s, sends and landings compiled, too"
)
