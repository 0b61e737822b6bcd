"""Llama 3 8B (arXiv 2407.21783) on a trillion tokens, in four regions of 64 H100s each.

    python -m experiments plan --config=configs/plan/llama_8b.py --explain

Takes about ten seconds. Published runs took fifteen trillion tokens (`--config.tokens=15e12`).
Links and assumptions are those of llama_7b.py.
"""

from ml_collections import ConfigDict

from configs.plan import llama_7b


def get_config() -> ConfigDict:
    """Give the config."""
    config = llama_7b.get_config()
    config.name = "Llama 3 8B on H100"
    config.model = "llama_8b"
    config.seq_len = 8192
    return config
