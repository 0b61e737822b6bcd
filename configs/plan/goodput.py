"""Goodput under failures: the published simulation (arXiv 2604.21428), and every field.

    python -m experiments plan --goodput

Takes about ten seconds. Expected: every published figure within three percentage points. Published
are one interrupt of a chip a year and the chips. The seconds that an interrupt costs and the share
that is always lost are fitted to the table: two values for elastic jobs, two for data parallelism.
The table itself is second-hand. `configs/plan/goodput_three_regions.py` is a fleet of one's own.
"""

from ml_collections import ConfigDict, config_dict

from lowcomm_jax.planner.goodput import FITTED, PUBLISHED


def get_config() -> ConfigDict:
    """Give the config."""
    config = ConfigDict()
    config.name = "Decoupled DiLoCo's simulation"
    config.notes = ""
    # Chips of each region, (512, 512, 512): one fleet. Or, with regions = (), equal parts of each
    # of `chips`: a row a fleet, a column for each M of Decoupled, the others with `diloco_regions`.
    config.regions = ()
    config.chips = tuple(PUBLISHED)
    config.learners = (2, 4, 8, 16)
    config.diloco_regions = 8
    # Mean time between interrupts: of a chip, or of a whole region's job as logs show it. One
    # number, or one for each region as text: "99,99,40".
    config.chip_mtbf_hours = "8760"
    config.region_mtbf_hours = config_dict.placeholder(str)
    # Seconds an interrupt costs: a job that goes on without the failed chips (elastic), and one
    # that restarts with all of them (DP; with elastic_regions = False each region's job, too). What
    # is computed again since the last checkpoint belongs to both.
    config.elastic_regions = True
    config.stop_s = FITTED["elastic"].stop_s
    config.restart_s = FITTED["dp"].stop_s
    # A failed chip takes its slice out, until it is repaired; spare slices of a region replace it.
    config.repair_hours = 0.0
    config.slice_chips = 1
    config.spare_slices = 0
    # A whole region is away (a cut link, a preemption): how often, for how long. None = never.
    config.outage_mtbf_hours = config_dict.placeholder(float)
    config.outage_hours = 0.0
    # Share that is lost whatever fails: of elastic jobs, of DP.
    config.overhead = FITTED["elastic"].overhead
    config.restart_overhead = FITTED["dp"].overhead
    # Of DiLoCo and Streaming: seconds of a step, H, fragments, overlap in steps. P of Decoupled,
    # which sends a fragment each step; 0 = what was not sent is in stop_s (as in the fit).
    config.step_s = 1.0
    config.period = 100
    config.fragments = 8
    config.overlap = 1
    config.decoupled_period = 0
    config.price_per_chip_hour = config_dict.placeholder(float)
    config.seed = 0
    return config
