"""Speed and memory of the engine, as ratios taken side by side in one run.

    python -m experiments bench engine [--size=small|reference] [--repeats=9] [--torch]

Prints a table with each ratio, its target and whether it was met, and the machine it ran on.
`--torch` adds PyTorch loops of the same work (needs `pip install torch`): a plain one, and its
strongest form, compiled with a fused optimizer (needs a C++ compiler). Matrix products alone are
timed, too, to tell how much of a step they are with either library.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm_jax as lc
from experiments.bench.main import BenchTable, Row, flags, run
from experiments.bench.work import (
    NEVER,
    SIZES,
    BenchWork,
    engine_loop,
    exchange_loop,
    held_bytes,
    inner_arguments,
    interleave,
    make_work,
    median,
    one_device_engine,
    plain_loop,
    ratio,
)
from experiments.refusals import checked_flags
from experiments.train.header import machine

_COMPARED = {">=": operator.ge, "<=": operator.le, "<": operator.lt}


def figure(name: str, value: float, unit: str, target: tuple[str, float] | None = None) -> Row:
    """A row of what was measured; `target`: ("<=", 1.0), None when there is none."""
    met = None if target is None else _COMPARED[target[0]](value, target[1])
    return {"name": name, "value": value, "unit": unit, "target": target, "met": met}


def throughput(size: str, repeats: int, with_torch: bool) -> list[Row]:
    """tokens/s of one region against a plain loop, and of four regions against one."""
    work = make_work(size, steps=8)
    never = lc.methods.diloco(NEVER)
    variants = {
        "plain": plain_loop(work),
        "one": engine_loop(work, never, 1),
        "four map": engine_loop(work, never, 4),
        "four vmap": engine_loop(work, never, 4, "vmap"),
    }
    if with_torch:
        variants["torch"] = torch_loop(work)
        variants["compiled"] = torch_loop(work, compiled=True)
        variants["products"], variants["torch products"] = product_loops(work)
    seconds = interleave(variants, repeats)
    one = ratio(seconds["plain"], seconds["one"])
    four_map = 4 * ratio(seconds["one"], seconds["four map"])
    four_vmap = 4 * ratio(seconds["one"], seconds["four vmap"])
    best = max(four_map, four_vmap)
    rows = [
        figure("plain jit + Optax loop", work.tokens / median(seconds["plain"]), "tokens/s"),
        figure("diloco R=1 / plain loop", one, "x", (">=", 0.97)),
        figure("per token, R=4 map / R=1", four_map, "x"),
        figure("per token, R=4 vmap / R=1", four_vmap, "x"),
        figure("per token, R=4 (better one) / R=1", best, "x", (">=", 0.97)),
    ]
    if with_torch:
        four = "four map" if four_map >= four_vmap else "four vmap"
        for name, loop in {"PyTorch": "torch", "compiled PyTorch": "compiled"}.items():
            ones, fours = ratio(seconds[loop], seconds["one"]), ratio(seconds[loop], seconds[four])
            rows += [
                figure(f"{name} loop", work.tokens / median(seconds[loop]), "tokens/s"),
                figure(f"R=1 / {name}", ones, "x", (">=", 1.25)),
                figure(f"R=4 / {name}", 4 * fours, "x", (">=", 1.25)),
            ]
        share = ratio(seconds["products"], seconds["one"])
        rows += [
            figure("matrix products alone, share of an R=1 step", 100 * share, "%"),
            figure(
                "the same products, speed of JAX / PyTorch",
                ratio(seconds["torch products"], seconds["products"]),
                "x",
            ),
        ]
    return rows


def memory(size: str) -> list[Row]:
    """Live bytes per added region, against parameters + optimizer state + one anchor."""
    work = make_work(size, steps=2)
    one_model = sum(x.nbytes for x in jax.tree.leaves(work.params))
    allowed = one_model * (1 + 2 + 1)
    peak = {}
    for regions in (1, 8):
        engine = one_device_engine(work.model, lc.methods.diloco(2), regions)
        state = engine.init(work.params)
        state, _ = engine.run(state, work.batches(regions))
        jax.block_until_ready(state.anchor)
        block = engine.sync_loop(state).programs.inner_program
        given = inner_arguments(engine, state, work.batches(regions))
        analysis = block.lower(*given).compile().memory_analysis()
        peak[regions] = held_bytes(state) + analysis.temp_size_in_bytes
        del state
    growth = (peak[8] - peak[1]) / 7 / allowed
    return [
        figure("memory at R=1 / (parameters + Adam + anchor)", peak[1] / allowed, "x"),
        figure("growth per region / (parameters + Adam + anchor)", growth, "x", ("<=", 1.0)),
    ]


def events(work: BenchWork, repeats: int) -> list[Row]:
    """Cost of sends and landings, and host time of a step without either."""
    sync, fragment, step = _event_seconds(work, repeats)
    share = sync / (100 * step + sync)
    part = fragment / sync
    quiet = _quiet_step_ratio(work, repeats)
    per_step, per_run_step = _host_overhead(repeats)
    return [
        figure("outer step, share of time at H=100", 100 * share, "%", ("<", 1.0)),
        figure("send + land of 1 of 4 fragments / whole sync", part, "x", ("<=", 0.375)),
        figure("step without event, streaming / diloco speed", quiet, "x", (">=", 0.99)),
        figure("host overhead of engine.step", per_step, "us", ("<", 100.0)),
        figure(
            "host overhead of engine.run, per step",
            per_run_step,
            "us",
            ("<", per_step),
        ),
        *_asking(repeats),
    ]


def _event_seconds(work: BenchWork, repeats: int) -> tuple[float, float, float]:
    """Seconds of a whole-model sync, of one of four fragments, and of an inner step (R = 4)."""

    def sync(method):
        engine = one_device_engine(work.model, method, 4)
        return exchange_loop(engine, [engine.init(work.params)])

    far = lc.methods.diloco(NEVER)
    variants = {
        "whole": sync(far),
        "fragment": sync(lc.methods.streaming_diloco(NEVER, 4, 0, 0.0, pattern="balanced")),
        "steps": engine_loop(work._replace(steps=4), far, 4),
    }
    seconds = interleave(variants, repeats)
    return median(seconds["whole"]), median(seconds["fragment"]), median(seconds["steps"]) / 4


def _quiet_step_ratio(work: BenchWork, repeats: int) -> float:
    """Speed of steps without an event: Streaming DiLoCo against DiLoCo."""
    work = work._replace(steps=8)
    streaming = lc.methods.streaming_diloco(NEVER, 4, 5, 0.5, pattern="balanced")
    variants = {
        "diloco": engine_loop(work, lc.methods.diloco(NEVER), 2),
        "streaming": engine_loop(work, streaming, 2),
    }
    seconds = interleave(variants, repeats)
    return ratio(seconds["diloco"], seconds["streaming"])


def _host_overhead(repeats: int, leaves: int = 75, steps: int = 200) -> tuple[float, float]:
    """Microseconds per step above a plain jit loop of equal leaves, on a model with no work."""
    params = {f"p{i:03d}": jnp.zeros(4) for i in range(leaves)}
    optimizer = optax.sgd(1e-3, momentum=0.9)
    batch = {"x": np.zeros((1, 4), np.float32)}

    def loss_fn(params, batch, rng):
        del rng
        return sum(jnp.sum(p * batch["x"][0]) for p in params.values())

    @jax.jit
    def plain(params, opt, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, None)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    plain = jax.jit(plain, donate_argnums=(0, 1))
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    engine = lc.Engine(loss_fn, optimizer, lc.methods.diloco(NEVER), 1, mesh=mesh)
    one, many = [engine.init(params)], [engine.init(params)]
    state = [jax.tree.map(jnp.copy, params), optimizer.init(params)]
    staged = jax.tree.map(lambda x: x[None], batch)

    def plain_steps():
        for _ in range(steps):
            *state[:], loss = plain(*state, batch)
        return loss

    def engine_steps():
        for _ in range(steps):
            one[0], metrics = engine.step(one[0], staged)
        return metrics["loss"]

    def engine_run():
        many[0], _ = engine.run(many[0], [staged] * steps)
        return many[0].inner.step

    seconds = interleave({"plain": plain_steps, "step": engine_steps, "run": engine_run}, repeats)
    base = median(seconds["plain"])
    return tuple((median(seconds[k]) - base) / steps * 1e6 for k in ("step", "run"))


def _asking(repeats: int, calls: int = 1000) -> list[Row]:
    """Microseconds of asking a schedule what is still to be done after a step (`Schedule.acts`)."""
    methods = {
        "diloco": lc.methods.diloco(NEVER),
        "cocodc, 4 fragments": lc.methods.cocodc(NEVER, 4, 5),
        "decoupled_diloco, 4 fragments": lc.methods.decoupled_diloco(NEVER, 4, 5),
    }
    asked = {}
    for name, method in methods.items():
        engine = lc.Engine(_nothing, optax.sgd(0.1), method, 4)
        state = engine.init({f"p{i}": jnp.zeros(4) for i in range(8)})
        asked[name] = functools.partial(_ask, engine.sync_loop(state), state, calls)
    seconds = interleave(asked, repeats)
    return [
        figure(f"host time of `acts`, {name}", 1e6 * median(taken) / calls, "us")
        for name, taken in seconds.items()
    ]


def _nothing(params, batch, rng):
    del batch, rng
    return sum(jnp.sum(p) for p in params.values())


def _ask(loop, state, calls: int) -> tuple[()]:
    for step in range(1, calls + 1):
        loop.acts(state, step)
    return ()


def _target(row: Row) -> str:
    return "{} {:.3g}".format(*row["target"]) if row["target"] else ""


COLUMNS = (
    ("figure", lambda row: row["name"]),
    ("measured", lambda row: f"{row['value']:,.3g} {row['unit']}"),
    ("target", _target),
    ("met", lambda row: {None: "", True: "yes", False: "NO"}[row["met"]]),
)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module's docstring for the flags."""
    options = flags(repeats=9)
    options.text("size", "reference", "model: small or reference")
    options.switch("torch", "compare with PyTorch too")
    values = options.values
    checked_flags("bench engine", argv, values, __doc__, known=list(SIZES))
    size, repeats = values.size, values.repeats
    parts = (
        ("throughput", lambda: throughput(size, repeats, values.torch)),
        ("memory", lambda: memory(size)),
        ("events", lambda: events(make_work(size, steps=1), repeats)),
    )
    stage = BenchTable(parts, COLUMNS, lambda rows: f"engine ({size}): {machine()}")
    return run("bench engine", {"engine": stage}, values)


def torch_loop(work: BenchWork, compiled: bool = False):
    """A PyTorch training loop of the benchmark's model and batch.

    Same shapes, same arithmetic: RMSNorm, rotary positions, SwiGLU, causal attention, cross
    entropy, AdamW, fp32. With `compiled` the model is compiled and AdamW fused.
    """
    import torch

    torch.manual_seed(0)
    net = _torch_network(torch, work.model.config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=compiled)
    forward = torch.compile(net) if compiled else net
    batches = [torch.from_numpy(b["tokens"][0]).long() for b in work.batches(1)]

    def run():
        for tokens in batches:
            logits = forward(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return ()

    return run


def product_loops(work: BenchWork):
    """The products with weights of the benchmark's steps and nothing else: in JAX, and in PyTorch.

    Each matrix is multiplied by the activations, and by their cotangents for both gradients.
    """
    import torch

    c = work.model.config
    inner, rows = c.heads * c.head_dim, work.batch * work.context
    block = [(c.width, inner)] * 3 + [(inner, c.width)]
    block += [(c.width, c.mlp_width)] * 2 + [(c.mlp_width, c.width)]
    shapes = block * c.layers + [(c.width, c.vocab_size)]
    rng = np.random.default_rng(0)
    made = [
        [rng.standard_normal(shape, np.float32) for shape in ((rows, i), (i, o), (rows, o))]
        for i, o in shapes
    ]

    # Results overwrite those of the call before, as buffers of a step are used again.
    @functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
    def step(triples, before):
        del before
        return [(x @ w, dy @ w.T, x.T @ dy) for x, w, dy in triples]

    ours = jax.tree.map(jnp.asarray, made)
    found = [jax.tree.map(jnp.zeros_like, [(dy, x, w) for x, w, dy in ours])]
    theirs = [[torch.from_numpy(a) for a in triple] for triple in made]
    places = [[torch.empty_like(a) for a in (dy, x, w)] for x, w, dy in theirs]

    def run():
        for _ in range(work.steps):
            found[0] = step(ours, found[0])
        return found[0]

    def torch_run():
        for _ in range(work.steps):
            for (x, w, dy), (y, dx, dw) in zip(theirs, places, strict=True):
                torch.mm(x, w, out=y), torch.mm(dy, w.T, out=dx), torch.mm(x.T, dy, out=dw)
        return ()

    return run, torch_run


def _torch_network(torch, config):
    """The decoder of `lowcomm_jax.models` in PyTorch: tokens `[B, T]` -> logits `[B, T, V]`."""
    nn, functional = torch.nn, torch.nn.functional

    class TorchBlock(nn.Module):
        def __init__(self):
            super().__init__()
            inner = config.heads * config.head_dim
            self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
            self.qkv = nn.Linear(config.width, 3 * inner, bias=False)
            self.out = nn.Linear(inner, config.width, bias=False)
            self.gate_up = nn.Linear(config.width, 2 * config.mlp_width, bias=False)
            self.down = nn.Linear(config.mlp_width, config.width, bias=False)

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(b, t, 3, config.heads, config.head_dim)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(b, t, -1))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
            return x + self.down(functional.silu(gate) * up)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(config.vocab_size, config.width)
            self.blocks = nn.ModuleList(TorchBlock() for _ in range(config.layers))
            self.norm = nn.RMSNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
            half = config.head_dim // 2
            angle = torch.arange(config.max_seq_len)[:, None] / 10_000 ** (
                torch.arange(half)[None] / half
            )
            self.cos, self.sin = angle.cos(), angle.sin()

        def forward(self, tokens):
            x = self.embed(tokens)
            t = tokens.shape[1]
            for block in self.blocks:
                x = block(x, self.cos[:t], self.sin[:t])
            return self.head(self.norm(x))

    def rotate(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    return Net()
