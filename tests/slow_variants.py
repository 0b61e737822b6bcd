"""Variants that show once more what quicker ones show: run with `pytest -m slow`.

The README's test command must end in ten minutes on two cores. Of a test with many parameters it
runs those that differ most; the others are named here, so that what runs when is seen in one place.
"""

import re

SLOW = [
    # Oracles: every method with 2 and 3 regions, with and without absences, and its odd settings.
    r"test_oracle\.py::test_diloco\[(?!all-equal-adamw-2|skip-weighted-sgd-3|skip-equal-adamw-2)",
    r"test_oracle\.py::test_ddp\[(?!adamw-3|sgd-2)",
    r"test_oracle\.py::test_eager\[(?!skip-3|all-2)",
    r"test_oracle\.py::test_streaming\[(?!3-3-0.3-2|2-3-0.0-3|3-1-1.0-1)",
    r"test_oracle\.py::test_cocodc\[(?!2-3-3-0.5|1-5-2-40.0|0-None-3-0.5)",
    r"test_oracle\.py::test_noloco\[(?!2-2-0|4-2-1|5-3-1)",
    r"test_oracle\.py::test_async_local_sgd\[(?!dylu-speeds1|fixed-speeds2)",
    r"test_oracle_compressed\.py::\w+\[(1-all|3-weighted|2-3-weighted)",
    r"test_oracle_dilocox\.py::test_low_rank_with_error_feedback\[(0-2|0-3|1-1)",
    r"test_oracle_dilocox\.py::test_rank_and_period\w+\[(?!0-settings1|1-settings2)",
    r"test_oracle_shared_basis\.py::test_projections_on_what_landed_last\[(?!2-2-0|3-1-1)",
    # Identities and guarantees: methods whose landings differ in kind.
    r"test_fast_path\.py::test_run_equals_steps\w+\[(?!cocodc|dilocox|noloco|sparseloco)",
    r"test_fast_path\.py::test_nothing_compiles\w+\[(?!diloco|cocodc|noloco|demo)",
    r"test_identities_compressed\.py::test_rounds_lose_nothing_with_decay_1\[(?!stat2)",
    r"test_identities_compressed\.py::test_finish\w+\[(?!sparseloco|decoupled)",
    r"test_identities_compressed\.py::test_decoupled\w+nesterov_for_one_region\[1\]",
    r"test_mesh\.py::test_vmap_and_map_agree",
    r"test_mesh\.py::test_inner_step_has_no_collective_across_regions\[shape1",
    r"test_gossip_mesh\.py::test_training_is_bit_identical_on_every_mesh\[2",
    r"test_gossip_mesh\.py::test_means_are_bit_identical_on_every_mesh\[2-",
    # Codecs: one of each family.
    r"test_codec_battery\.py::test_(round_trip|vmap|aggregate)\w+\[(?!fp32|bf16|int8|stat4|e3m0"
    r"|topk_stat2\]|random_k|dct_topk|sign\]|low_rank_int4)",
    r"test_codec_aggregate\.py::test_lifted_over_regions_with_shards\[(topk_stat2_ef|int4-vmap)",
    r"test_transformer\.py::test_remat\w+\[unrolled",
    r"test_transformer\.py::test_grouped_query_attention_equals_jax\[(?!6-2)",
    # Whole runs, and jobs that wait for one another.
    r"test_same_numbers\.py::\w+\[dilocox_shared-2",
    r"test_fault_campaign\.py::test_few_faults\[sparseloco",
    r"test_remote_faults\.py::test_a_region_that_fell_behind\w+\[store",
    r"test_learning\.py::test_reaches_the_stored_interval_on_generated_text\[cocodc",
    r"test_adloco_run\.py::test_adloco$",
]
_SLOW = re.compile("|".join(SLOW))


def is_slow(name: str) -> bool:
    """Whether a test, by its node id, is left to `-m slow`."""
    return _SLOW.search(name) is not None
