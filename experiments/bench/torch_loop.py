"""The same transformer step in PyTorch, for `bench engine --torch`."""

from __future__ import annotations

from typing import Any


def loop(work: Any):
    """A plain PyTorch training loop of the benchmark's model and batch.

    Same shapes, same arithmetic: RMSNorm, rotary positions, SwiGLU, causal attention, cross
    entropy, AdamW, fp32.

    Raises:
      ValueError: PyTorch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError("--torch needs PyTorch: `pip install torch`") from error
    torch.manual_seed(0)
    net = _network(torch, work.model.config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    batches = [torch.from_numpy(b["tokens"][0]).long() for b in work.batches(1)]

    def run():
        for tokens in batches:
            logits = net(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return ()

    return run


def _network(torch, config):
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
