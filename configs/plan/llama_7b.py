"""LLaMA 7B (arXiv 2302.13971) on its published trillion tokens, in four regions of 64 H100s each.

    python -m experiments plan --config=configs/plan/llama_7b.py --explain

Takes about ten seconds. Over three continents (0.36 Gbit/s where it is slowest). Assumptions to
be replaced by yours: 40 % MFU, 2.5 a GPU hour, 0.02 a GB sent.
"""

from ml_collections import ConfigDict

from configs.plan import template


def get_config() -> ConfigDict:
    """Give the config."""
    config = template.get_config()
    config.name = "LLaMA 7B on H100"
    config.model = "llama_7b"
    config.tokens = 1e12
    config.tokens_per_step = 2.0**22
    config.seq_len = 2048
    config.devices_per_region = 64
    config.device_gb = 80.0
    config.price_per_gpu_hour = 2.5
    config.price_per_gb = 0.02
    config.mesh = ConfigDict({"stage": 1, "fsdp": 64, "tensor": 1})
    config.microbatch_tokens = 8192
    # In fp32 its fragments never catch up with such a link: planned with the waits, in 8 bits.
    config.methods.cocodc.codec = "int8"
    config.methods.cocodc.stalls = True
    return config
