"""A small mixture of experts: a model of your own that every command trains, resumes and compares.

    python -m experiments train --config=configs/diloco.py \
        --config.model=examples.mixture_of_experts:Mixture --config.model.experts=8

`Mixture` is what the config names, and its fields are the settings of `config.model`; a function
that returns a model does as well. A model has `init` and `loss_fn`; `specs`, `flops_per_token`,
`stacked` and `logits` are optional (`lowcomm_jax.models.Trainable`). Takes about 3 min on a laptop.

Blocks alternate a dense feed-forward layer and experts. Each token goes to its `top_k` experts of
highest score (arXiv 1701.06538), whose outputs are added with the softmax of their scores as
weights. Of an expert's tokens of one sequence those beyond its capacity are dropped: they keep the
residual alone. The load-balancing loss is that of arXiv 2101.03961, section 2.2. Experts are
stacked, one leaf of `[X, D, F]` a matrix, so that a mesh axis cuts them by `specs`. Where that is
`fsdp`, which cuts the sequences, too, tokens go to their experts' devices and back (all-to-all).

Shape suffixes: B sequences, T tokens, V vocabulary, D width, F hidden width, H heads, E head width,
X experts, C capacity of an expert.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lowcomm_jax import shard_batch


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A decoder-only transformer, every second block of which has experts.

    Attributes:
      vocab_size: entries of the vocabulary; the run gives the tokenizer's.
      layers: blocks.
      width: entries of the residual stream.
      heads: attention heads.
      hidden: hidden width of a feed-forward layer, and of an expert.
      experts: experts of a block.
      top_k: experts that a token goes to.
      capacity: tokens of a sequence that an expert takes, over those it would get if all got
        equally many.
      balance: weight of the load-balancing loss.
      over: mesh axis that cuts the experts, `tensor` or `fsdp`.
    """

    vocab_size: int
    layers: int = 4
    width: int = 64
    heads: int = 4
    hidden: int = 256
    experts: int = 4
    top_k: int = 2
    capacity: float = 1.5
    balance: float = 0.01
    over: str = "tensor"

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is no multiple of heads={self.heads}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k}: use 1 to experts={self.experts}")
        if self.over not in ("tensor", "fsdp"):
            raise ValueError(f"over={self.over!r}: use tensor or fsdp")

    def init(self, rng):
        """Draw the parameters: normal, each product of unit variance; the router starts at 0."""
        d, f, x, keys = self.width, self.hidden, self.experts, iter(jax.random.split(rng, 99))

        def draw(*shape):
            return jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

        params = {"table": 0.02 * jax.random.normal(next(keys), (self.vocab_size, d))}
        for i in range(self.layers):
            block = {"qkv": draw(d, 3 * d), "out": draw(d, d), "scale": jnp.ones((2, d))}
            if self._has_experts(i):
                block["router"] = jnp.zeros((d, x))
                block["experts"] = {"up": draw(x, d, f), "down": draw(x, f, d)}
            else:
                block |= {"up": draw(d, f), "down": draw(f, d)}
            params[f"block{i}"] = block
        return params | {"scale": jnp.ones((d,))}

    def loss_fn(self, params, batch, rng):
        """Cross-entropy over the targets that count, plus the balance loss; metrics in aux."""
        del rng  # nothing is drawn
        logits_BxTxV, balance, dropped, filled = self._forward(params, batch["tokens"][:, :-1])
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(logits_BxTxV), batch["tokens"][:, 1:, None], axis=-1
        )
        tokens = jnp.sum(batch["mask"])
        ce = -jnp.sum(chosen[..., 0] * batch["mask"]) / jnp.maximum(tokens, 1.0)
        aux = {"ce": ce, "balance": balance, "dropped": dropped, "filled": filled, "tokens": tokens}
        return ce + self.balance * balance, aux

    def logits(self, params, tokens_BxT):
        """Scores of the next token, so that an evaluation takes one pass."""
        return self._forward(params, tokens_BxT)[0]

    def specs(self, params, axis_sizes):
        """Experts over `over`, with `tensor` their rows over `fsdp`; all else over `fsdp` alone."""
        of_experts = ("tensor", "fsdp", None) if self.over == "tensor" else ("fsdp", None, None)

        def spec(path, leaf):
            expert = any(getattr(entry, "key", None) == "experts" for entry in path)
            axes = of_experts if expert else ("fsdp",) + (None,) * (leaf.ndim - 1)
            fits = [a and leaf.shape[i] % axis_sizes.get(a, 1) == 0 for i, a in enumerate(axes)]
            return P(*(axis if fit else None for axis, fit in zip(axes, fits)))

        return jax.tree.map_with_path(spec, params)

    @property
    def stacked(self):
        """An expert's matrix is one of its own to codecs and to Muon."""
        return tuple(f"block{i}/experts" for i in range(self.layers) if self._has_experts(i))

    def flops_per_token(self, seq_len):
        """6 for each weight that a token meets, plus attention to half the sequence."""
        d, f = self.width, self.hidden
        each = [
            4 * d * d
            + (d * self.experts + 2 * self.top_k * d * f if self._has_experts(i) else 2 * d * f)
            for i in range(self.layers)
        ]
        return float(6 * (sum(each) + self.vocab_size * d + self.layers * d * seq_len))

    def _has_experts(self, block):
        return block % 2 == 1

    def _forward(self, params, tokens_BxT):
        """(logits `[B, T, V]`, mean balance loss, share of dropped choices, of places taken)."""
        x_BxTxD, found = params["table"][tokens_BxT], []
        for i in range(self.layers):
            block = params[f"block{i}"]
            x_BxTxD += self._attention(block, _norm(x_BxTxD, block["scale"][0]))
            y_BxTxD = _norm(x_BxTxD, block["scale"][1])
            if self._has_experts(i):
                y_BxTxD, *of_router = self._experts(block, y_BxTxD)
                x_BxTxD += y_BxTxD
                found.append(jnp.stack(of_router))
            else:
                x_BxTxD += jax.nn.gelu(y_BxTxD @ block["up"]) @ block["down"]
        of_routers = jnp.mean(jnp.stack(found), axis=0) if found else jnp.zeros(3)
        return _norm(x_BxTxD, params["scale"]) @ params["table"].T, *of_routers

    def _attention(self, block, x_BxTxD):
        shape = (*x_BxTxD.shape[:2], 3, self.heads, -1)
        q, k, v = jnp.moveaxis((x_BxTxD @ block["qkv"]).reshape(shape), 2, 0)
        q, k = _rotated(q), _rotated(k)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return mixed.reshape(x_BxTxD.shape) @ block["out"]

    def _experts(self, block, x_BxTxD):
        """(output `[B, T, D]`, balance loss, share of choices beyond an expert's capacity, share of
        the experts' places that are taken)."""
        (b, t, _), x, k = x_BxTxD.shape, self.experts, self.top_k
        room = math.ceil(self.capacity * k * t / x)
        score_BxTxX = jax.nn.softmax(x_BxTxD @ block["router"])
        weight_BxTxk, expert_BxTxk = jax.lax.top_k(score_BxTxX, k)
        # Place of each choice among those of its expert: first choices first, then in order.
        chosen_BxkxTxX = jax.nn.one_hot(jnp.moveaxis(expert_BxTxk, -1, 1), x, dtype=jnp.int32)
        order = jnp.cumsum(chosen_BxkxTxX.reshape(b, -1, x), axis=1).reshape(b, k, t, x) - 1
        place_BxkxT = jnp.sum(order * chosen_BxkxTxX, axis=-1)
        slot_BxkxTxC = jax.nn.one_hot(place_BxkxT, room)  # a row of zeros beyond the capacity
        goes_BxkxTxX = chosen_BxkxTxX.astype(jnp.float32)
        to_BxTxXxC = jnp.einsum("bktx,bktc->btxc", goes_BxkxTxX, slot_BxkxTxC)
        share_BxTxk = weight_BxTxk / jnp.sum(weight_BxTxk, axis=-1, keepdims=True)
        from_BxTxXxC = jnp.einsum("btk,bktx,bktc->btxc", share_BxTxk, goes_BxkxTxX, slot_BxkxTxC)
        given_XxBxCxD = self._turned(jnp.einsum("btxc,btd->bxcd", to_BxTxXxC, x_BxTxD))
        hidden = jax.nn.gelu(jnp.einsum("xbcd,xdf->xbcf", given_XxBxCxD, block["experts"]["up"]))
        done_XxBxCxD = jnp.einsum("xbcf,xfd->xbcd", hidden, block["experts"]["down"])
        first_X = jnp.mean(goes_BxkxTxX[:, 0], axis=(0, 1))
        balance = x * jnp.sum(first_X * jnp.mean(score_BxTxX, axis=(0, 1)))
        return (
            jnp.einsum("btxc,bxcd->btd", from_BxTxXxC, self._turned(done_XxBxCxD)),
            balance,
            1 - jnp.mean(slot_BxkxTxC.sum(-1)),
            jnp.sum(slot_BxkxTxC) / (b * x * room),
        )

    def _turned(self, x):
        """The first two axes, sequences and experts, changed over; `fsdp` cuts the first one."""
        if self.over != "fsdp":
            return jnp.swapaxes(x, 0, 1)
        return shard_batch(jnp.swapaxes(shard_batch(x), 0, 1))


def _norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def _rotated(x_BxTxHxE):
    """Rotary positions."""
    half = x_BxTxHxE.shape[-1] // 2
    angle = jnp.arange(x_BxTxHxE.shape[1])[:, None] / 1e4 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x_BxTxHxE, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
