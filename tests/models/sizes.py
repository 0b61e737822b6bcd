"""Sizes of the tiny decoder of several tests here, with grouped heads."""

SIZES = {
    "vocab_size": 37,
    "layers": 2,
    "width": 20,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 8,
    "mlp_width": 28,
}
