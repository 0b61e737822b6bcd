"""Goodput of three regions of 512 H100s: what failures cost with DP, DiLoCo and Decoupled.

    python -m experiments plan --goodput --config.region_mtbf_hours=99

Takes about three seconds. Replace every value by yours; with --help the command says what each is.
Of Llama 3 (arXiv 2407.21783; second-hand: news reports): 419 unexpected interruptions in 54 days on
16,384 H100s, so one of a chip in 50,675 hours. Of Gemini 2.5 (arXiv 2507.06261): at least ten
minutes lost at an interrupt without elasticity, tens of seconds with it. Assumed: 12 hours of
repair, outages, the steps.
"""

from ml_collections import ConfigDict, config_dict

from lowcomm_jax.planner.goodput import FITTED


def get_config() -> ConfigDict:
    """Give the config."""
    config = ConfigDict()
    config.name = "3 regions of 512 H100"
    config.notes = (
        "defaults: chip MTBF of Llama 3 (second-hand), restart of Gemini 2.5; repair, outages and "
        "steps are assumed"
    )
    config.regions = (512, 512, 512)
    config.chip_mtbf_hours = "50675"
    config.region_mtbf_hours = config_dict.placeholder(str)
    config.elastic_regions = True
    config.stop_s = FITTED["elastic"].stop_s  # fitted to a published table (docs/plan.md)
    config.restart_s = 600.0
    config.repair_hours = 12.0
    config.slice_chips = 8
    config.spare_slices = 1
    config.outage_mtbf_hours = 720.0  # a cut link, a preemption
    config.outage_hours = 2.0
    config.overhead = 0.0
    config.restart_overhead = 0.0
    config.step_s = 2.0
    config.period = 100
    config.fragments = 8
    config.overlap = 1
    config.decoupled_period = 24
    config.price_per_chip_hour = 2.5
    config.seed = 0
    return config
