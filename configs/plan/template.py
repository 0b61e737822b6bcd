"""Template of a plan: every field. A 1.3B model over three continents.

    python -m experiments plan --config=configs/plan/template.py --config.network=consumer_1gbps

Takes about ten seconds. Expected: a column per method, plan.json and plan.png in the work
directory. What each field means, and what else it takes: the same command with --help.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    """Give the config."""
    config = ConfigDict()
    config.name = "1.3B over three continents"
    config.notes = ""
    config.model = config_dict.FieldReference("scaling_1_3b", field_type=object)
    config.network = config_dict.FieldReference("intercontinental", field_type=object)
    config.compute_s = 0.0
    config.devices_per_region = 8
    config.flops_per_device = 989e12  # of an H100 in bfloat16
    config.mfu = 0.4
    config.tokens = 0.0
    config.tokens_per_step = 2.0**21
    config.seq_len = 2048
    config.device_gb = config_dict.placeholder(float)
    config.price_per_gpu_hour = config_dict.placeholder(float)
    config.price_per_gb = config_dict.placeholder(float)
    config.mesh = ConfigDict({"stage": 1, "fsdp": 8, "tensor": 1})
    config.microbatch_tokens = 8192
    config.remat = True
    config.methods = ConfigDict(
        {
            "allreduce": {"preset": "allreduce"},
            "diloco": {"preset": "diloco", "period": 30},
            "streaming": {
                "preset": "streaming_diloco",
                "period": 100,
                "fragments": 8,
                "overlap": "auto",
                "margin": 1,
            },
            "eager": {"preset": "eager_diloco", "period": 100, "codec": "int4"},
            "cocodc": {"preset": "cocodc", "period": 100, "fragments": 4, "overlap": 5},
            "noloco": {"preset": "noloco", "period": 50},
            "sparseloco": {"preset": "sparseloco", "period": 30},
        }
    )
    config.scenario = ConfigDict(
        {"rank": config_dict.placeholder(float), "rates": config_dict.placeholder(tuple)}
    )
    config.loss_bound = 0.03
    return config
