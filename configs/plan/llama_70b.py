"""Llama 3 70B (arXiv 2407.21783) on a trillion tokens, in four regions of 256 H100s each.

    python -m experiments plan --config=configs/plan/llama_70b.py --explain

Takes about ten seconds. Published runs took fifteen trillion tokens (`--config.tokens=15e12`).
Links and assumptions are those of llama_7b.py.
"""

from ml_collections import ConfigDict

from configs.plan import llama_7b


def get_config() -> ConfigDict:
    """Give the config."""
    config = llama_7b.get_config()
    config.name = "Llama 3 70B, 4 x 256 H100"
    config.model = "llama_70b"
    config.seq_len = 8192
    config.tokens_per_step = 2.0**23
    config.devices_per_region = 256
    config.mesh.fsdp = 256
    return config
