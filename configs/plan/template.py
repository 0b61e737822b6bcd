"""Template of a plan: every field, with what it means. A 1.3B model over three continents.

    python -m experiments plan --config=configs/plan/template.py --config.network=consumer_1gbps

Takes about ten seconds. Expected: a column per method, plan.json and plan.png in the work
directory.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    """Give the config."""
    config = ConfigDict()
    config.name = "1.3B over three continents"
    config.notes = ""
    # A name out of lowcomm_jax.models.PRESETS, or {preset: name} and fields that differ, or all
    # fields of a TransformerConfig; or module:factory of your own, or {name: module:factory} and
    # its settings.
    config.model = config_dict.FieldReference("scaling_1_3b", field_type=object)
    # A preset (configs/network.py lists them), "aws:Oregon,Tokyo,London", a .yaml file, or the
    # mapping itself.
    config.network = config_dict.FieldReference("intercontinental", field_type=object)
    # Seconds of the median region's inner step (the network says how much slower one region is
    # than another); 0 = from devices, FLOP/s and MFU.
    config.compute_s = 0.0
    config.devices_per_region = 8
    config.flops_per_device = 989e12
    config.mfu = 0.4
    # Tokens of the whole run (0 = 20 per parameter) and of one inner step over all regions.
    config.tokens = 0.0
    config.tokens_per_step = 2.0**21
    # Of the command that starts a method: tokens of a sequence.
    config.seq_len = 2048
    # Memory of a device in GB (10^9 bytes), to say what fits; prices in any currency: of a device
    # and hour, and of a GB that leaves a region. None = unknown.
    config.device_gb = config_dict.placeholder(float)
    config.price_per_gpu_hour = config_dict.placeholder(float)
    config.price_per_gb = config_dict.placeholder(float)
    # Axes inside a region, for the memory per device.
    config.mesh = ConfigDict({"stage": 1, "fsdp": 8, "tensor": 1})
    config.microbatch_tokens = 8192
    config.remat = True
    # Rows: `preset`, a method of lowcomm_jax.methods (or "allreduce"), as published, or
    # module:function of your own, and keywords of its factory that differ. overlap = "auto" takes
    # as many steps as hide a fragment's transfer, and `margin` more; a method that can never catch
    # up with the link is refused unless it has stalls = True.
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
    # What a run would measure, and a plan has to assume: the rank of DiLoCoX's means (None = as
    # sent), and how fast each of CoCoDC's fragments changes (None = all alike). Besides, everyone
    # takes part in each round and counts alike, and AdLoCo's trainers never merge and keep their
    # first batch.
    config.scenario = ConfigDict(
        {"rank": config_dict.placeholder(float), "rates": config_dict.placeholder(tuple)}
    )
    # Largest published loss penalty (nats beside H = 30) the search for the best H, K, tau and
    # codec may use.
    config.loss_bound = 0.03
    return config
