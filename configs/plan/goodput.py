"""Goodput of three regions of 512 H100s: what failures cost with DP, DiLoCo and Decoupled.

    python -m experiments plan --goodput --config.region_mtbf_hours=99

Takes about three seconds. Replace every value by yours. Of Llama 3 (arXiv 2407.21783; second-hand:
news reports): 419 unexpected interruptions in 54 days on 16,384 H100s, so one of a chip in 50,675
hours. Of Gemini 2.5 (arXiv 2507.06261): at least ten minutes lost at an interrupt without
elasticity, tens of seconds with it. Assumed: 12 hours of repair, outages, the steps.
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
    # Chips of each region.
    config.regions = (512, 512, 512)
    # Mean time between interrupts: of a chip, or of a whole region's job as logs show it. One
    # number, or one for each region as text: "99,99,40".
    config.chip_mtbf_hours = "50675"
    config.region_mtbf_hours = config_dict.placeholder(str)
    # Seconds an interrupt costs: a job that goes on without the failed chips (elastic), and one
    # that restarts with all of them (DP; with elastic_regions = False each region's job, too). What
    # is computed again since the last checkpoint belongs to both.
    config.elastic_regions = True
    config.stop_s = FITTED["elastic"].stop_s  # fitted to a published table (docs/plan.md)
    config.restart_s = 600.0
    # A failed chip takes its slice out, until it is repaired; spare slices of a region replace it.
    config.repair_hours = 12.0
    config.slice_chips = 8
    config.spare_slices = 1
    # A whole region is away (a cut link, a preemption): how often, for how long. None = never.
    config.outage_mtbf_hours = 720.0
    config.outage_hours = 2.0
    # Share that is lost whatever fails: of elastic jobs, of DP.
    config.overhead = 0.0
    config.restart_overhead = 0.0
    # Of DiLoCo and Streaming: seconds of a step, H, fragments, overlap in steps. P of Decoupled,
    # which sends a fragment each step; 0 = what was not sent is in stop_s (as in the fit).
    config.step_s = 2.0
    config.period = 100
    config.fragments = 8
    config.overlap = 1
    config.decoupled_period = 24
    config.price_per_chip_hour = 2.5
    config.seed = 0
    return config
