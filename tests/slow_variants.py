"""Tests that `pytest` leaves to `pytest -m slow`, besides those marked so where they stand.

The README's test command is to end in a quarter of an hour on two cores. Of a test with many
parameters it runs those that differ most. Of tests that show the same on another way it runs the
quicker one. The others are named here, so that what runs when is seen in one place.
"""

import re

SLOW = [
    # Oracles: every method with 2 and 3 regions, with and without absences, and its odd settings.
    r"test_oracle\.py::test_diloco\[(?!all-equal-adamw-2|skip-weighted-sgd-3|skip-equal-adamw-2)",
    r"test_oracle\.py::test_ddp\[(?!adamw-3|sgd-2)",
    r"test_oracle\.py::test_eager\[(?!skip-3|all-2|all-1)",
    r"test_oracle\.py::test_streaming\[(?!3-3-0.3-2|2-3-0.0-3|3-1-1.0-1)",
    r"test_oracle\.py::test_cocodc\[(?!2-3-3-0.5|1-5-2-40.0|0-None-3-0.5)",
    r"test_oracle\.py::test_noloco\[(?!2-2-0|4-2-1)",
    r"test_oracle_edit\.py::test_edit\[(?!sharp-adamw|defaults-sgd)",
    r"test_oracle_gasloc\.py::test_gasloc\[(?!odd|own|two)",
    r"test_oracle\.py::test_async_local_sgd\[(?!fixed-speeds2)",
    r"test_oracle_small_methods\.py::test_(isoloco_has|restarted_diloco\[[13]|snoo\[1)",
    r"test_oracle_small_methods\.py::test_heloco\[(?!dylu-uneven)",
    r"test_wire_bytes\.py::test_a_merge_rule\w+\[radial in",
    r"test_oracle_compressed\.py::\w+\[(1-all|2-all|3-weighted|2-3-weighted)",
    r"test_oracle_compressed\.py::test_(muloco_two_shot|decoupled\w+as_coded\[3|muloco\[4-3|streaming_in_e3m0\[2)",
    r"test_oracle_dilocox\.py::test_low_rank_with_error_feedback\[(?!0-1|1-2)",
    r"test_oracle_dilocox\.py::test_rank_and_period\w+\[(?!0-settings1)",
    r"test_oracle_dilocox\.py::test_(a_bucket|a_round_is_as|full_rank|a_large_payload)",
    r"test_oracle_channels\.py::test_sparta\[(?!partitioned|shuffled|sampled-3)",
    r"test_oracle_channels\.py::test_(des_loc\[all|values\w+\[0)",
    r"test_channels\.py::test_run_equals\w+\[(?!sparta_diloco)",
    r"test_channels\.py::test_nothing_but_selected\w+\[0",
    r"test_channels\.py::test_resuming\w+\[(?!sparta_diloco|replayed)",
    r"test_channels\.py::test_every_replica\w+\[sparta_diloco",
    r"test_channels\.py::test_bands_of_a_large_leaf\w+\[2",
    r"test_channels\.py::test_codecs_that_send_every_entry\w+\[(fp16|int8|e3m0)",
    r"test_channels\.py::test_(finishing_twice\w+\[sparta_diloco|warm_compiles)",
    # Identities and guarantees: methods whose landings differ in kind.
    r"test_fast_path\.py::test_run_equals_steps\w+\[(?!cocodc|dilocox|noloco|sparseloco)",
    r"test_fast_path\.py::test_nothing_compiles\w+\[(?!diloco|cocodc|noloco|learners|halos)",
    r"test_identities\.py::test_finish_synchronises\w+\[(?!noloco|diloco|halos|heloco|sparseloco|learners)",
    # Their oracles are quick ones.
    r"test_identities\.py::test_(muloco_in_fp32|decoupled\w+sends_all|sparseloco_that)",
    r"test_oracle_dilocox\.py::test_without_codec_and_delay",
    r"test_identities\.py::test_decoupled\w+nesterov_for_one_region\[1\]",
    r"test_regions\.py::test_vmap_and_map_agree",
    r"test_regions\.py::test_inner_step_has_no_collective_across_regions\[shape1",
    r"test_pairs\.py::test_training_is_bit_identical_on_every_mesh\[2",
    r"test_pairs\.py::test_means_are_bit_identical_on_every_mesh\[(?!3-int4-2-1)",
    r"test_gossip_loop\.py::test_(with_an_absent\w+\[bf16|noise\w+\[8-4|nothing_compiles\w+\[(1-3|6-2))",
    r"test_regions\.py::test_(ddp_is_the_exception|every_mesh_gives_the_same_losses)",
    r"test_fast_path\.py::test_resuming_from_a_copied_state",
    r"test_offload\.py::test_offloaded_equals_on_the_device\[cocodc",
    r"test_codec_error\.py::\w+\[1-1",
    r"test_weights_for_codecs\.py::test_the_anchor_that_all_regions_share\[two slots",
    r"test_routed_steps\.py::test_(bytes_are_booked_per|the_clock_waits_for_every_hop)",
    r"test_stages\.py::test_a_stage_reduces_slices\w+\[int4_ef",
    r"test_wire_bytes\.py::test_(partners\w+\[dense|slices_of_rows\w+\[int8|\w+\[int8 in slices)",
    r"test_one_f_one_b\.py::test_loss_and_gradients_of_every_microbatch\[4",
    r"test_outlier_guard\.py::test_one_bad_batch\w+\[(?!streaming-adamw|noloco)",
    r"test_participation\.py::test_accumulated_microbatches_equal_one_batch\[(?!diloco-3)",
    # Bit for bit between programs of different form: not at the quick set's level of optimization.
    r"test_learner_rounds\.py::test_with_everyone_equal",
    r"test_oracle_decoupled\.py::test_with_everyone_equal",
    # Codecs: one of each family.
    r"test_codec_battery\.py::test_(round_trip|vmap|aggregate)\w+\[(?!fp32|bf16|int8|e3m0|dct_topk"
    r"|sign\])",
    r"test_codec_oracles\.py::test_low_rank_is_exact\w+\[4",
    r"test_drive_codecs\.py::test_three_counts\w+\[(?!cocodc|demo|noloco|streaming)",
    r"test_codec_aggregate\.py::test_lifted_over_regions_with_shards\[(topk_stat2_ef|int4-vmap)",
    r"test_codec_aggregate\.py::test_units_in_shares_come\w+\[shape(?!0-|5-)\d\S*-(dct_topk|bf16_gate)\]",
    r"test_codec_aggregate\.py::test_units_in_shares_of\w+\[topk_stat2-shape[35]\]",
    r"test_codec_aggregate\.py::test_random_groups\w+\[shape[023]\S*-stat4\]",
    r"test_codec_aggregate\.py::test_slices_of_few_rows\w+\[shape[01]\S*-stat4\]",
    r"test_own_codec\.py::test_leaves_without_values\w+\[bf16",
    # Models, stages, trainers.
    r"test_transformer\.py::test_(vmap_and_map|bfloat16_compute|scan_and_unrolled|gradients_against)",
    r"test_transformer\.py::test_(remat\w+\[unrolled|future\w+\[unrolled)",
    r"test_sharding\.py::test_loss_and_gradients_inside_a_region\[(?!shape1)",
    r"test_generate\.py::test_greedy_with_cache_equals_greedy_without\[unrolled",
    r"test_pipeline\.py::test_loss_and_gradients_equal_the_model\w+\[(?!gpipe-4-shape1)",
    r"test_pipeline\.py::test_(random_routes|routes_that_lead_straight|bfloat16_reduces|logits_equal|an_unknown)",
    r"test_trainers_in_turn\.py::test_pipeline_stages",
    r"test_adaptive_devices\.py::test_(several_devices|offload_does)",
    r"test_trainers_oracle\.py::test_merges\[",
    r"test_transformer\.py::test_grouped_query_attention_equals_jax\[(?!6-2)",
    # Whole runs, and jobs that wait for one another.
    r"test_training_campaign\.py::test_few_faults",
    r"test_two_shot\.py::test_(a_run_is|who_is_killed|anchors_and\w+\[(?!dense-3-store))",
    r"test_trainer_rounds\.py::test_(a_restored_run|payloads_that_are_coded|a_region_that_is_late_lands)",
    r"test_trainer_rounds\.py::test_(absent_regions|a_run_that_ends_inside)",
    r"test_trainer_rounds\.py::test_anchors\w+\[3",
    r"test_lost_regions\.py::test_survivors",
    r"test_lost_regions\.py::test_absent_regions_are_as_absent_as_on_the_mesh",
    r"test_store_away\.py::test_training_goes_on\w+\[(?!streaming)",
    r"test_store_away\.py::test_what_is_deferred\w+\[peers",
    r"test_store_away\.py::test_what_is_under_way\w+\[(?!diloco\])",
    r"test_concurrent_exchange\.py::test_it_equals\w+\[(?!coded\])",
    r"test_deleted_records\.py::test_the_anchors_stay_the_same",
    r"test_left_out_residuals\.py::test_sent_and_residual\w+\[15",
    r"test_examples\.py::test_(the_slurm_script|two_processes_on)",
    r"test_precompile\.py::test_nothing_is_compiled_once\w+\[(?!cocodc)",
    r"test_deferred_events\.py::test_a_checkpoint\w+\[(?!cocodc)",
    # DiLoCoX is compared in test_pause, too, NoLoCo in test_early_payload, EDiT in
    # test_weights_of_norms; roles are SPES's.
    r"test_same_numbers\.py::(test_regions_of_one_and|\w+\[(?!pulseloco-3|gasloc-3|spes-3|gossip))",
    r"test_partly_away\.py::test_(one_region_is_cut_off\[False|round_trips)",
    r"test_plan_target\.py::test_a_training_config",
    r"test_inner_step\.py::test_(with_tensor\w+\[mesh1|with_fsdp\w+\[h100:1x8x8|a_device_does|\w+\[xla)",
    # On GPUs test_wire.py shows the same of Streaming and DiLoCoX.
    r"test_overlap\.py::test_(coded_payloads_hide\[(two_shot|int4-h100)|a_transformer_of_150m)",
    r"test_send_memory\.py::test_(a_table_of_units|large_padded\w+\[(topk-|random_k))",
    # One of each kind of traffic, and those that aot/test_golden.py compiles. On GPUs `diloco` is
    # `dilocox`, too.
    # EDiT's norms have a test of their own; streaming in int4 is compiled for TPUs in test_overlap.
    r"test_wire\.py::test_gpu\w+\[(?!ddp|diloco|noloco|sparta|streaming)",
    r"test_wire\.py::test_tpu\w+\[(?!demo|diloco\]|noloco|streaming)",
    # DiLoCoX's factors are quick ones, and so are int8 and top-k of the other families.
    r"test_wire\.py::test_codecs_move\w+\[(low_rank|random_k|sign|e3m0)",
    r"test_experts\.py::test_tokens_reach\w+\[diloco",
    r"test_scripted_faults\.py::",
    r"test_snapshots\.py::\w+\[(gasloc|muloco|sparse mean|radial in|int8|delayed, |isoloco|roles"
    r"|edit, |snoo|partial|own rules)",
    r"test_pause\.py::\w+\[delayed\]",
    r"test_trainer_rounds\.py::test_a_wait\w+\[(True-False|False-True)",
    r"test_learner_rounds\.py::test_anchors\w+\[quorum 2",
    r"test_arrival_rounds\.py::test_every_arrival\w+\[nesterov",
    r"test_hung_store\.py::test_a_job_leaves\w+\[False",
    # By the transport that keeps payloads where that matters, else by the quicker one.
    r"test_state_transfer\.py::\w+\[store\]",
    r"test_remote_exchange\.py::(?!test_(one_commit|what_cannot|jax_arrays|groups))\w+\[store\]",
    r"test_remote_exchange\.py::test_(one_commit|what_cannot|jax_arrays|groups)\w+\[peers",
    r"test_remote_exchange\.py::test_what_is_sent_on_other\w+\[peers",
    r"test_membership\.py::test_a_(region_comes_back|dead_region)\w+\[store",
    r"test_membership\.py::(?!test_a_(region_comes_back|dead_region))\w+\[peers",
    r"test_forged_records\.py::(?!test_a_damaged)\w+\[peers",
    r"test_every_exchange\.py::test_(several|groups)\w+\[peers",
    r"test_every_exchange\.py::test_who_sits_out\w+\[store",
    r"test_payload_gc\.py::test_(only|a_living\w+too_far|payloads_of_the_dead|payloads_are|what_goes"
    r"|announcements)\w+\[peers",
    r"test_payload_gc\.py::test_(a_living\w+is_late|payloads_stay)\w+\[store",
    r"test_two_shot_exchange\.py::test_everyone\w+\[(store-3|peers-[14])",
    r"test_two_shot_exchange\.py::test_who_is_lost\w+\[(store-lost0|peers-lost1)",
    r"test_two_shot_exchange\.py::test_(the_slice|a_slice|a_listener_takes)\w+\[store",
    r"test_two_shot_exchange\.py::test_(?!everyone|who_is_lost|the_slice|a_slice|a_listener_takes)"
    r"\w+\[peers",
    r"test_exchange_campaign\.py::test_few_faults\[(store|peers-True)",
    r"test_object_store\.py::test_regions\w+\[peers",
    r"test_parted_anchors\.py::test_who_parted\w+\[lowest",
    r"test_learning\.py::",
    r"test_train_network\.py::test_slots_come_from_the_network",
    r"test_dilocox_stages\.py::test_both_optimizers",
    r"test_train_run\.py::test_(export_and_start|samples_continue)",
    r"test_compare\.py::test_(a_field_is_varied|processes_side_by_side)",
    r"test_compare_checks\.py::test_the_studies_pass_their_checks",
    r"test_noloco_run\.py::",
    r"test_checkpoint_regions\.py::test_(new_regions|refused_without|fewer)",
    r"test_checkpoint_stages\.py::test_resume_is_exact\[quick",
    r"test_checkpoint_damage\.py::test_every_flipped_byte",
    r"test_adloco_run\.py::test_adloco$",
    r"test_interrupt\.py::test_while_the_main_thread\w+\[2\]",
    r"test_kept_metrics\.py::test_(a_signal_takes\w+\[first|within_an_evaluation\[12-signal)",
    r"test_one_program_run\.py::test_(fewer_devices|a_folder_in_use)",
    r"test_own_model\.py::test_the_mixture_trains_by\w+\[(?!spes)",
    r"test_own_model\.py::test_experts_over_devices\w+\[tensor",
    # Tools of the tests, in processes of their own.
    r"test_same_as\.py::test_another_momentum",
    r"test_time_limit\.py::test_a_test_that_hangs",
]
_SLOW = re.compile("|".join(SLOW))


def is_slow(name: str) -> bool:
    """Whether a test, by its node id, is left to `-m slow`."""
    return _SLOW.search(name) is not None
