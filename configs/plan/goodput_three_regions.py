"""Goodput of three regions of 512 H100s: what failures cost with DP, DiLoCo and Decoupled.

    python -m experiments plan --goodput --config=configs/plan/goodput_three_regions.py \
        --config.region_mtbf_hours=99

Takes about three seconds. Replace every value by yours. Of Llama 3 (arXiv 2407.21783; second-hand:
news reports): 419 unexpected interruptions in 54 days on 16,384 H100s, so one of a chip in 50,675
hours. Of Gemini 2.5 (arXiv 2507.06261): at least ten minutes lost at an interrupt without
elasticity, tens of seconds with it. Assumed: 12 hours of repair, outages, the steps.
"""

from ml_collections import ConfigDict

from configs.plan import goodput


def get_config() -> ConfigDict:
    """Give the config."""
    config = goodput.get_config()
    config.name = "3 regions of 512 H100"
    config.notes = (
        "defaults: chip MTBF of Llama 3 (second-hand), restart of Gemini 2.5; repair, outages and "
        "steps are assumed"
    )
    config.regions = (512, 512, 512)
    config.chips, config.learners = (), ()
    config.chip_mtbf_hours = "50675"
    config.restart_s = 600.0
    config.repair_hours = 12.0
    config.slice_chips = 8
    config.spare_slices = 1
    config.outage_mtbf_hours = 720.0
    config.outage_hours = 2.0
    config.overhead = config.restart_overhead = 0.0
    config.step_s = 2.0
    config.decoupled_period = 24
    config.price_per_chip_hour = 2.5
    return config
