"""Streaming DiLoCo's largest simulated model (arXiv 2501.18512): 100B, 108 layers, 4.9 s per step,
two regions.

    python -m experiments plan --config=configs/plan/streaming_100b.py

Takes about fifteen seconds. Expected: 99 % utilisation at about 1.6 Gbit/s with overlap and 4 bits
(published: 1.4). `python -m evidence published streaming` has all published bandwidths beside ours.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Give the config."""
    config = ConfigDict()
    config.name = "Streaming DiLoCo 100B, two regions"
    config.notes = "step time and depth as published; width chosen to reach 100B"
    config.model = "scaling_100b"
    config.network = ConfigDict({"regions": ["a", "b"], "bandwidth_gbps": 4.0, "name": "4 Gbit/s"})
    config.compute_s = 4.9
    config.tokens = 2e12
    config.tokens_per_step = 4e6
    config.mesh = ConfigDict({"fsdp": 64})
    config.microbatch_tokens = 4096
    config.remat = True
    config.methods = ConfigDict(
        {
            "allreduce": {"preset": "allreduce", "codec": "bf16"},
            "diloco": {"preset": "diloco", "codec": "bf16"},
            "streaming": {
                "preset": "streaming_diloco",
                "fragments": 36,
                "overlap": 0,
                "codec": "bf16",
            },
            "streaming_overlap": {
                "preset": "streaming_diloco",
                "fragments": 36,
                "overlap": 1,
                "codec": "bf16",
            },
            "streaming_fp4": {
                "preset": "streaming_diloco",
                "fragments": 36,
                "overlap": 1,
                "codec": "e3m0",
            },
        }
    )
    config.loss_bound = 0.03
    return config
