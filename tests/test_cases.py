"""The 70 failure cases that the project set out from, and where each is shown to come out right.

The cases restate public reports on other exporters, loaders and speculative loops. Each has a sentence of our own on
what is right here, the tests that show it, or the later work that owes them. Where the wording of a case and the
command line's or the contract's documents differ, those win, and the sentence says what is done instead.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COUNT = 70
ENGINE = "the engine"
OWNERS = (ENGINE,)
"""Later work, as the issue that asked for this table names it."""

BUILDER, RUNTIME, CLI, CLI_PLAN = "tests/builder", "tests/runtime", "tests/test_cli.py", "tests/test_cli_plan.py"
QUANT = f"{BUILDER}/quant"
GAPS, SOURCE, PLAN = f"{BUILDER}/test_case_gaps.py", f"{BUILDER}/test_source.py", f"{BUILDER}/test_plan.py"
LINEAR, TENSORS, CODECS = f"{QUANT}/test_linear.py", f"{QUANT}/test_tensors.py", f"{QUANT}/test_codecs.py"
CROSSCHECK, NAMES = f"{QUANT}/test_crosscheck.py", f"{QUANT}/test_names.py"
MODELOPT, COMPRESSED = f"{QUANT}/test_modelopt.py", f"{QUANT}/test_compressed_tensors.py"
FORMATS, FINDINGS = f"{BUILDER}/test_formats.py", f"{BUILDER}/test_findings.py"
MODELS, GRAPHS, CONFIG = f"{BUILDER}/test_models.py", f"{BUILDER}/test_graphs.py", f"{BUILDER}/test_config.py"
PACKAGE, EXPORTER = f"{BUILDER}/test_package.py", f"{BUILDER}/test_exporter.py"
WEIGHTS, READER = f"{BUILDER}/test_weights.py", f"{BUILDER}/test_reader.py"
CHECKPOINT, TOKENS, GENAI = (
    f"{BUILDER}/test_checkpoint.py",
    f"{BUILDER}/test_tokens.py",
    f"{BUILDER}/test_genai_config.py",
)
INSPECTION = f"{BUILDER}/test_inspection.py"
MOE, EXPERTS = f"{BUILDER}/test_moe.py", f"{QUANT}/test_experts.py"
LINKING, STAGING, KILL = f"{BUILDER}/test_linking.py", f"{BUILDER}/test_staging.py", f"{BUILDER}/test_kill.py"
MANIFEST, PROVENANCE = f"{BUILDER}/test_manifest.py", f"{BUILDER}/test_provenance.py"
ENGINE_TESTS, CONTROLS = f"{RUNTIME}/test_engine.py", f"{RUNTIME}/test_negative_controls.py"
STATES, SAMPLING = f"{RUNTIME}/test_fixed_state.py", f"{RUNTIME}/test_sampling.py"
FAKE, FAILURES = f"{RUNTIME}/test_engine_on_a_fake.py", f"{RUNTIME}/test_failures.py"


@dataclass(frozen=True)
class Case:
    """id in the list of cases; what is right here; tests as FILE::NAME; owed: whose later work the rest is."""

    id: str
    right: str
    tests: tuple[str, ...] = ()
    owed: str | None = None


CASES: tuple[Case, ...] = (
    # A1: quantized loading
    Case(
        "A01",
        "a global scale is inverted once, by the name it is stored under, whatever its shape",
        (
            f"{TENSORS}::test_a_divisor_is_inverted_exactly_once",
            f"{TENSORS}::test_both_dialects_dequantize_bit_identically",
            f"{TENSORS}::test_nvfp4_globals_may_be_scalars_or_vectors_of_one",
        ),
    ),
    Case(
        "A02",
        "input scales are never used, so none is no trouble; some is a warning that names modules, not an error",
        (
            f"{GAPS}::test_input_scales_may_be_absent_everywhere",
            f"{GAPS}::test_a_lost_input_scale_is_named",
            f"{SOURCE}::test_lost_input_scales_of_each_format_are_counted_apart",
        ),
    ),
    Case(
        "A03",
        "gate and up keep a global scale each; a checkpoint that stores them fused is refused by name",
        (
            f"{TENSORS}::test_parts_of_one_mlp_keep_their_own_global_scales",
            f"{GAPS}::test_gate_and_up_of_different_scales_are_packaged_exactly",
            f"{GAPS}::test_fused_projections_are_refused_by_name",
        ),
    ),
    Case(
        "A04",
        "a NaN block scale over zeros is clamped with a warning, over anything else refused by row and block",
        (
            f"{GAPS}::test_a_nan_scale_over_zeros_is_clamped_and_said",
            f"{FORMATS}::test_nan_over_a_block_of_zeros_is_clamped",
            f"{FORMATS}::test_nan_over_a_weight_is_refused_by_row_and_block",
        ),
    ),
    Case(
        "A05",
        "a scale that is no positive number is refused by tensor and index before anything is written",
        (
            f"{LINEAR}::test_a_scale_that_is_not_a_positive_number_is_refused",
            f"{LINEAR}::test_a_zero_block_scale_is_a_zero_block",
        ),
    ),
    Case(
        "A06",
        "scales are multiplied in float32 or not at all, so the smallest ones lose nothing in the package; what a cast"
        " to float16 would turn into zero is counted",
        (
            f"{WEIGHTS}::test_values_that_float16_turns_into_zero_are_counted",
            f"{FORMATS}::test_the_smallest_scales_of_a_gate_lose_nothing",
            f"{TENSORS}::test_the_smallest_scales_lose_no_weight_to_zero",
            f"{FORMATS}::test_weights_stay_the_checkpoints_bytes",
        ),
    ),
    Case(
        "A07",
        "all 16 codes have their value and sign, the even column is the low nibble, and bytes stay as they are",
        (
            f"{CODECS}::test_every_e2m1_code_has_its_value_and_sign",
            f"{CODECS}::test_the_low_nibble_is_the_even_column",
            f"{MODELS}::test_packaged_bytes_are_the_checkpoints",
        ),
    ),
    Case(
        "A08",
        "rows that end inside a block are refused with their width, and so is a scale of another width",
        (
            f"{LINEAR}::test_packed_rows_that_end_in_the_middle_of_a_block_are_refused",
            f"{LINEAR}::test_a_wrong_shape_or_type_is_refused",
        ),
    ),
    Case(
        "A09",
        "a scale of a wrong width is refused with the one due, also half of it where blocks of 16 are declared; a"
        " quantizer's leftovers are listed, and fatal with --strict",
        (
            f"{LINEAR}::test_a_wrong_shape_or_type_is_refused",
            f"{CROSSCHECK}::test_scales_of_half_the_declared_width_are_refused",
            f"{LINEAR}::test_a_tensor_of_no_module_is_reported",
            f"{SOURCE}::test_strict_refuses_what_no_module_uses",
        ),
    ),
    Case(
        "A10",
        "a plain float weight is float whatever the exclude list forgot, and that is said once",
        (
            f"{LINEAR}::test_a_plain_weight_is_float_whatever_is_declared",
            f"{GAPS}::test_an_exclude_list_that_forgets_the_heads_fc_is_said_once",
            f"{CROSSCHECK}::test_an_exclude_list_that_forgets_the_heads_projection_is_one_line",
        ),
    ),
    Case(
        "A11",
        "router and shared-expert gate stay float whatever is declared",
        (f"{MOE}::test_router_and_shared_gate_are_float_whatever_is_declared",),
    ),
    Case(
        "A12",
        "nothing depends on the method's name; every tensor is used or skipped for a reason in both dialects",
        (
            f"{LINEAR}::test_the_bytes_decide_and_the_method_name_does_not",
            f"{GAPS}::test_float_mixers_are_carried_in_both_dialects",
            f"{GRAPHS}::test_an_initializer_is_filled_once",
        ),
    ),
    Case(
        "A13",
        "ignore lists match as their own dialect does, and an entry that matches nothing is a warning",
        (
            f"{COMPRESSED}::test_targets_and_ignore_lists_match_as_compressed_tensors_does",
            f"{MODELOPT}::test_excluded_modules_are_float",
            f"{NAMES}::test_exact_names_are_found_in_every_spelling",
            f"{CROSSCHECK}::test_entries_that_match_nothing_are_one_line_with_the_nearest_names",
        ),
    ),
    Case(
        "A14",
        "any linear may be quantized; decay gates are dequantized to float",
        (
            f"{LINEAR}::test_any_linear_may_be_quantized",
            f"{MODELS}::test_quantized_gates_are_dequantized",
            f"{FORMATS}::test_every_projection_may_be_packed_and_gates_are_float",
        ),
    ),
    Case(
        "A15",
        "a map of formats is read from either file at any nesting, and what it does not list is not quantized",
        (
            f"{CROSSCHECK}::test_every_place_and_nesting_declares_the_same",
            f"{CROSSCHECK}::test_two_files_that_differ_are_both_named_and_config_json_is_compared",
            f"{MODELOPT}::test_siblings_inherit_nothing",
        ),
    ),
    Case(
        "A16",
        "without config_groups or an index the bytes and the one header are enough; stacked experts are read, too",
        (
            f"{EXPERTS}::test_every_layout_is_the_same_experts",
            f"{GAPS}::test_config_groups_may_be_missing",
            f"{COMPRESSED}::test_without_groups_the_format_is_every_modules",
            f"{CHECKPOINT}::test_a_lone_shard_needs_no_index_and_two_do",
        ),
    ),
    Case(
        "A17",
        "the census says how many experts are stored unquantized",
        (f"{MOE}::test_unquantized_experts_keep_their_bytes_and_are_counted",),
    ),
    Case(
        "A18",
        "every spelling of an FP8 scale multiplies its own rows and blocks, and a missing one is refused",
        (
            f"{TENSORS}::test_one_matrix_in_every_fp8_spelling_is_one_matrix",
            f"{TENSORS}::test_fp8_scales_of_every_shape_multiply_their_rows",
            f"{TENSORS}::test_block_scales_multiply_their_blocks",
            f"{TENSORS}::test_real_checkpoints_dequantize_to_the_formula_in_float64",
            f"{LINEAR}::test_a_missing_tensor_is_named",
        ),
    ),
    Case(
        "A19",
        "KV scales of both spellings are counted, judged and left alone: the cache of a package is not quantized",
        (
            f"{SOURCE}::test_kv_scales_of_either_spelling_are_counted_and_change_nothing",
            f"{FINDINGS}::test_kv_scales_are_found_under_either_spelling",
            f"{FINDINGS}::test_odd_kv_scales_are_named",
        ),
    ),
    Case(
        "A20",
        "no head: exported without one, said aloud, exit 0, and 2 if required; half a head: 2, listing what is missing",
        (
            f"{CLI_PLAN}::test_a_lost_head_is_said_or_refused",
            f"{SOURCE}::test_half_a_head_is_refused_with_all_that_is_missing",
            f"{EXPORTER}::test_an_absent_head_is_a_warning_or_refused",
        ),
    ),
    Case(
        "A21",
        "inspect counts rows of zeros in each tensor and points out many",
        (
            f"{FINDINGS}::test_dead_keys_are_found_though_most_of_the_weight_lives",
            f"{FINDINGS}::test_more_than_half_of_the_rows_is_flagged",
        ),
    ),
    Case(
        "A22",
        "headers are parsed by ourselves and types without a reader are refused by name; torch is never loaded",
        (
            f"{CHECKPOINT}::test_every_stored_type_reads_back",
            f"{CHECKPOINT}::test_a_handwritten_file_reads",
            f"{CHECKPOINT}::test_a_broken_header_is_refused",
            f"{EXPORTER}::test_exporting_loads_no_torch_runs_no_code_and_depends_on_no_hash_order",
        ),
    ),
    # A2: structure and arithmetic of the hybrid model
    Case(
        "A23",
        "flat q, k, v and z are split as stored with any number of value heads; the fused layout is refused by name",
        (
            f"{GAPS}::test_a_gated_delta_layer_is_the_recurrence_in_float64",
            f"{GAPS}::test_fused_projections_are_refused_by_name",
        ),
    ),
    Case(
        "A24",
        "value heads share a key head in groups, by division",
        (
            f"{MODELS}::test_value_heads_follow_their_key_head_in_groups",
            f"{GAPS}::test_a_gated_delta_layer_is_the_recurrence_in_float64",
        ),
    ),
    Case(
        "A25",
        "query and gate are split inside each head, and scales of rows move with them",
        (
            f"{MODELS}::test_query_and_gate_lie_side_by_side_for_each_head",
            f"{MODELS}::test_the_query_comes_first_and_the_gate_second",
            f"{GAPS}::test_blocks_of_a_quantized_query_belong_to_their_head",
        ),
    ),
    Case(
        "A26",
        "norms are 1 + w with or without a head, the gated one is plain; layer norms around 1 are a warning, and a"
        " converted checkpoint, told by its convolutions, makes the same initializers",
        (
            f"{MODELS}::test_norms_are_one_plus_w_in_float32_and_the_gated_norm_is_plain",
            f"{GAPS}::test_the_norm_convention_does_not_depend_on_the_head",
            f"{GAPS}::test_norms_that_look_converted_are_exported_with_a_warning",
            f"{GAPS}::test_final_norms_far_from_zero_are_no_sign",
            f"{FINDINGS}::test_a_converters_whole_signature",
            f"{GAPS}::test_a_converted_checkpoint_makes_the_same_initializers",
            f"{GAPS}::test_convolutions_of_both_layouts_are_refused",
        ),
    ),
    Case(
        "A27",
        "text rotates plainly and partially: channels behind the rotary width pass through",
        (
            f"{GAPS}::test_text_rotates_as_plain_partial_rope",
            f"{MODELS}::test_only_the_first_quarter_of_each_head_is_rotated",
            f"{MODELS}::test_rotary_tables",
        ),
    ),
    Case(
        "A28",
        "theta is found in every place it has lived, and has no default",
        (
            f"{CONFIG}::test_theta_is_found_wherever_it_is_written",
            f"{CONFIG}::test_theta_has_no_default",
        ),
    ),
    Case(
        "A29",
        "what is stored comes before the tie flag: either of two tied tensors serves as both, two stored are untied,"
        " and inspect says how far apart they are",
        (
            f"{CONFIG}::test_the_tie_flag_is_the_text_models_then_the_outer_one",
            f"{MODELS}::test_a_tied_head_answers_like_its_copy",
            f"{GAPS}::test_one_of_two_tied_tensors_is_enough",
            f"{MODELS}::test_a_stored_head_is_used_whatever_the_tie_flag_says",
            f"{FINDINGS}::test_a_stored_head_that_is_declared_tied",
        ),
    ),
    Case(
        "A30",
        "there is no option to force sharing, and untied tensors are never shared",
        (f"{CLI_PLAN}::test_sharing_cannot_be_forced", f"{GAPS}::test_untied_tensors_are_not_shared"),
    ),
    Case(
        "A31",
        "a quantized LM head leaves the lookup to a float embedding, and every name resolves",
        (
            f"{GAPS}::test_a_quantized_head_is_never_looked_up",
            f"{GAPS}::test_a_head_that_is_ignored_and_tied_is_the_embedding",
            f"{GAPS}::test_a_lookup_needs_a_float_embedding",
            f"{GRAPHS}::test_no_name_dangles_and_nothing_is_left_over",
        ),
    ),
    Case(
        "A32",
        "rows of experts lie as the op's attributes say, and their forward pass is the documentation's in float64",
        (
            f"{MOE}::test_four_bit_experts_are_carried_to_the_bit",
            f"{MOE}::test_the_ops_attributes_are_the_familys",
            f"{EXPERTS}::test_rows_are_packed_as_the_plainest_loop_packs_them",
            f"{RUNTIME}/test_lowering.py::test_nvfp4_experts",
        ),
    ),
    Case(
        "A33",
        "the shared expert's output is scaled by its sigmoid gate, behind its down projection",
        (f"{MOE}::test_the_shared_experts_gate_comes_behind_its_projection",),
    ),
    Case(
        "A34",
        "recurrent state, A_log, dt_bias and gates are float32 in a float16 graph; rows leave in the activation type",
        (
            f"{GRAPHS}::test_activations_of_a_recurrence_stay_in_float32",
            f"{MODELS}::test_decay_parameters_are_float32_whatever_they_are_stored_as",
            f"{GAPS}::test_states_are_float32_in_every_graph",
        ),
    ),
    Case(
        "A35",
        "the order of requests in a step changes nobody's tokens",
        (f"{STATES}::test_gathered_states_equal_views", f"{FAILURES}::test_request_order_changes_nobodys_tokens"),
    ),
    Case(
        "A36",
        "rejected drafts leave no trace in the recurrent state",
        (
            f"{ENGINE_TESTS}::test_any_drafter_gives_the_same_tokens",
            f"{FAILURES}::test_two_drafters_of_different_quality_give_the_same_tokens",
        ),
    ),
    # A3: the head and its weights
    Case(
        "A37",
        "hidden states leave after the final norm, in the target and in the head",
        (
            f"{GRAPHS}::test_hidden_states_leave_after_the_final_norm",
            f"{CONTROLS}::test_hidden_before_the_final_norm",
        ),
    ),
    Case(
        "A38",
        "the head concatenates the embedding, then the hidden state",
        (
            f"{GRAPHS}::test_the_head_concatenates_embedding_then_hidden",
            f"{MODELS}::test_the_heads_input_is_the_embedding_then_the_hidden_state",
            f"{CONTROLS}::test_reversed_concat",
        ),
    ),
    Case(
        "A39",
        "one layer drafts for every step by its own output; two layers, and drafts beyond the limit, are refused",
        (
            f"{CONFIG}::test_an_impossible_geometry_is_refused_by_key",
            f"{MODELS}::test_real_checkpoints_answer_as_transformers_does",
            f"{ENGINE_TESTS}::test_more_drafts_than_the_package_allows_are_refused",
        ),
    ),
    Case(
        "A40",
        "the head uses the target's own bytes for embedding and LM head; embeddings of its own are refused",
        (
            f"{PACKAGE}::test_the_head_uses_the_targets_embedding_and_lm_head",
            f"{PACKAGE}::test_our_data_file_is_covered_up_to_alignment",
            f"{GAPS}::test_a_head_with_embeddings_of_its_own_is_refused",
        ),
    ),
    Case(
        "A41",
        "the head is primed on the prompt alike whatever its chunks",
        (
            f"{ENGINE_TESTS}::test_chunked_prompt_primes_the_head_alike",
            f"{CONTROLS}::test_head_not_primed_on_the_prompt",
            f"{RUNTIME}/test_schedules.py::test_random_schedules_give_plain_greedys_tokens",
        ),
    ),
    Case("A42", "decoding is plain unless drafts are asked for", (f"{CLI}::test_run_is_plain_unless_asked",)),
    Case(
        "A43",
        "acceptance is counted by position, and a floor can fail a check",
        (
            f"{SAMPLING}::test_counters_of_rounds",
            f"{ENGINE_TESTS}::test_draft_counts_are_the_oracles",
            f"{RUNTIME}/test_trained_schedules.py::test_random_schedules",
        ),
    ),
    # A4: the loop
    Case(
        "A44",
        "a step with prompt rows has no drafts",
        (
            f"{ENGINE_TESTS}::test_prefill_and_drafts_never_share_a_step",
            f"{RUNTIME}/test_scheduler.py::test_any_prompt_row_defers_all_drafts",
            f"{FAKE}::test_a_prompt_joins_while_another_request_drafts",
        ),
    ),
    Case(
        "A45",
        "a step that commits nothing leaves states as they were",
        (
            f"{STATES}::test_nothing_committed_changes_before_commit",
            f"{STATES}::test_a_row_that_keeps_nothing_keeps_its_state",
        ),
    ),
    Case(
        "A46",
        "the turn ends at the first stop id, and nothing behind it is delivered or counted",
        (
            f"{ENGINE_TESTS}::test_stop_id_inside_an_accepted_prefix_ends_the_turn",
            f"{FAKE}::test_a_stop_id_at_every_place_of_an_accepted_draft",
        ),
    ),
    Case(
        "A47",
        "drafts are clamped to the room that is left",
        (
            f"{ENGINE_TESTS}::test_generation_ends_at_the_context",
            f"{RUNTIME}/test_scheduler.py::test_drafts_are_clamped_to_the_tokens_left",
            f"{FAKE}::test_the_last_positions_of_the_context",
        ),
    ),
    Case(
        "A48",
        "no block is lost or owned twice",
        (
            f"{RUNTIME}/test_blocks.py::test_no_block_is_lost_or_owned_twice",
            f"{RUNTIME}/test_schedules.py::test_random_schedules_give_plain_greedys_tokens",
            f"{FAKE}::test_a_full_context_after_a_short_request",
        ),
    ),
    Case(
        "A49",
        "a request that can never fit is refused with both numbers",
        (
            f"{ENGINE_TESTS}::test_a_request_that_never_fits_is_refused_with_both_numbers",
            f"{FAKE}::test_admission_counts_every_token_once",
        ),
    ),
    Case(
        "A50",
        "the head stays level with the target after every round",
        (
            f"{ENGINE_TESTS}::test_draft_counts_are_the_oracles",
            f"{FAILURES}::test_the_head_is_level_with_the_target_after_every_round",
        ),
    ),
    Case(
        "A51",
        "a run repeated by graph capture advances no state twice",
        (f"{FAILURES}::test_graph_capture_runs_the_model_several_times_and_advances_no_state_twice",),
    ),
    Case(
        "A52",
        "with a temperature the target's distribution is kept, and a seed is heeded",
        (
            f"{RUNTIME}/test_sampling_distribution.py::test_each_tokens_distribution_is_the_targets",
            f"{RUNTIME}/test_sampling_distribution.py::test_a_seed_gives_one_text_whatever_is_drafted",
        ),
    ),
    # A5: packaging, files, versions, safety
    Case(
        "A53",
        "stop ids are the ordered union of all files that name one, below the vocabulary, written as a list",
        (
            f"{TOKENS}::test_stop_ids_are_the_ordered_union",
            f"{TOKENS}::test_an_id_outside_the_vocabulary_is_refused",
            f"{GENAI}::test_numbers_are_the_checkpoints_and_the_options",
        ),
    ),
    Case(
        "A54",
        "tokenizer and template are copied as they are, by an allow-list, and never run",
        (
            f"{GAPS}::test_an_unknown_tokenizer_class_is_copied_verbatim",
            f"{INSPECTION}::test_the_tokenizers_class_and_template",
            f"{TOKENS}::test_text_files_are_copied_verbatim_and_nothing_else_is",
        ),
    ),
    Case(
        "A55",
        "every name of the configuration is in its graph, and an illegal block size is refused",
        (
            f"{READER}::test_a_renamed_graph_tensor_is_refused_by_name",
            f"{READER}::test_a_name_that_only_the_configuration_has_is_refused",
            f"{CLI}::test_export_refuses_impossible_options",
        ),
    ),
    Case(
        "A56",
        "rotary rows, context and longest generation agree, and plan says what a context costs",
        (
            f"{GENAI}::test_numbers_are_the_checkpoints_and_the_options",
            f"{MODELS}::test_rotary_tables_have_a_row_for_every_position",
            f"{PLAN}::test_memory_is_what_the_hand_reckons",
        ),
    ),
    Case(
        "A57",
        "IR and opsets are pinned, whatever onnx is installed; the manifest stamps operators, their attributes and the"
        " contract, and a package of another contract is refused",
        (
            f"{GRAPHS}::test_versions_are_pinned",
            f"{PROVENANCE}::test_required_ops_are_those_of_the_graphs",
            f"{MANIFEST}::test_another_version_is_refused",
        ),
    ),
    Case(
        "A58",
        "a second export replaces the first whole, and every byte of the data file that we write is somebody's; linked"
        " shards keep their own offsets",
        (
            f"{PACKAGE}::test_force_replaces_the_whole_folder",
            f"{PACKAGE}::test_our_data_file_is_covered_up_to_alignment",
            f"{PACKAGE}::test_ranges_of_a_file_do_not_overlap",
            f"{LINKING}::test_real_checkpoints_are_read_in_place",
        ),
    ),
    Case(
        "A59",
        "a disk that is too small is found before a byte is written, with the bytes due; one that fills up is named as"
        " such, whatever the call it fails, and leaves nothing",
        (
            f"{PACKAGE}::test_a_disk_that_is_too_small_is_found_before_anything_is_written",
            f"{PACKAGE}::test_a_shard_that_has_to_be_copied_is_counted_before_its_first_byte",
            f"{PACKAGE}::test_a_failure_on_the_way_leaves_things_as_they_were",
            f"{KILL}::test_an_error_at_any_call_leaves_things_as_they_were",
        ),
    ),
    Case(
        "A60",
        "a snapshot of links reads like the folder and is not written to; packages are plain files",
        (
            f"{CHECKPOINT}::test_a_snapshot_of_links_into_a_blob_store_reads_like_the_folder",
            f"{PACKAGE}::test_any_folder_name_will_do",
        ),
    ),
    Case(
        "A61",
        "an index names nothing but shards beside it, and a text file is no link out of the checkpoint",
        (
            f"{CHECKPOINT}::test_an_index_cannot_name_anything_but_a_shard_beside_it",
            f"{PACKAGE}::test_a_link_out_of_the_checkpoint_is_not_followed",
        ),
    ),
    Case(
        "A62",
        "no code of a checkpoint is run and no pickle opened",
        (
            f"{EXPORTER}::test_exporting_loads_no_torch_runs_no_code_and_depends_on_no_hash_order",
            f"{CHECKPOINT}::test_no_shard_is_refused_and_a_pickle_is_none",
        ),
    ),
    Case(
        "A63",
        "the index alone says which shard's bytes count, and a missing shard or tensor is named",
        (
            f"{CHECKPOINT}::test_the_index_is_an_allow_list",
            f"{CHECKPOINT}::test_a_shard_that_was_not_downloaded_is_named",
            f"{CHECKPOINT}::test_a_tensor_its_shard_does_not_have_is_named",
            f"{SOURCE}::test_a_head_in_a_shard_that_the_index_forgot_is_said",
        ),
    ),
    Case(
        "A64",
        "weights are streamed, so memory is that of the largest tensor; plan says the bytes first",
        (
            f"{WEIGHTS}::test_memory_is_bounded_by_the_largest_tensor",
            f"{WEIGHTS}::test_an_export_writes_within_the_memory_of_its_largest_tensor",
            f"{PLAN}::test_bytes_are_those_that_an_export_writes",
        ),
    ),
    Case(
        "A65",
        "graph files are small, writes are chunked, both graphs share data files on purpose, and in those that we write"
        " large tensors start at 64 KiB; offsets beyond 4 GB are whole",
        (
            f"{GRAPHS}::test_graph_files_are_small_and_weights_external",
            f"{WEIGHTS}::test_tensors_larger_than_a_chunk_are_written_piece_by_piece",
            f"{WEIGHTS}::test_bytes_arrive_at_their_places_without_needless_gaps",
            f"{PACKAGE}::test_our_data_file_is_covered_up_to_alignment",
            f"{LINKING}::test_offsets_beyond_four_gigabytes_are_whole",
        ),
    ),
    Case(
        "A66",
        "a padded LM head keeps its rows and the vocabulary is the width of the logits; masking is the loop's",
        (f"{GAPS}::test_a_padded_vocabulary_is_not_trimmed", f"{INSPECTION}::test_rows_beyond_the_tokenizer"),
        ENGINE,
    ),
    Case(
        "A67",
        "the directory one stands in is neither read nor written, and what is in the way needs --force",
        (
            f"{PACKAGE}::test_the_directory_one_stands_in_does_not_matter",
            f"{CLI_PLAN}::test_two_working_directories_give_one_package",
            f"{PACKAGE}::test_an_existing_output_is_refused_and_left_alone",
        ),
    ),
    Case(
        "A68",
        "model_type and tensor names decide, so four spellings are one plan; vision tensors are counted",
        (
            f"{PLAN}::test_spellings_of_one_checkpoint_are_one_plan",
            f"{PLAN}::test_a_prefix_of_another_class_is_refused_by_name",
            f"{EXPORTER}::test_spellings_of_one_checkpoint_give_one_package",
            f"{GENAI}::test_the_type_is_the_text_models_for_vision_checkpoints_too",
        ),
    ),
    Case(
        "A69",
        "any folder name will do; names inside a package are bare",
        (
            f"{PACKAGE}::test_any_folder_name_will_do",
            f"{GAPS}::test_a_file_name_with_a_separator_is_refused",
            f"{CLI_PLAN}::test_paths_with_spaces_and_other_letters",
        ),
    ),
    Case(
        "A70",
        "an export killed at any step leaves the old package or the new one, whole, and the next one succeeds and"
        " cleans up what a dead run left, never what a live one works on",
        (
            f"{PACKAGE}::test_a_killed_export_leaves_no_package_and_the_next_one_succeeds",
            f"{KILL}::test_a_kill_leaves_the_old_package_or_the_new_one",
            f"{KILL}::test_flushes_come_before_the_name",
            f"{STAGING}::test_what_a_killed_run_left_is_removed",
            f"{STAGING}::test_what_a_run_works_on_is_left_alone",
            f"{CLI}::test_a_terminated_export_leaves_nothing",
        ),
    ),
)


def test_every_case_has_one_row() -> None:
    assert wrong_ids(CASES) == []


def test_every_named_test_exists() -> None:
    assert unknown_tests(CASES, collected(ROOT)) == []


def test_every_row_has_a_test_or_an_owner() -> None:
    assert without_anybody(CASES) == []


def test_every_row_says_something_of_its_own() -> None:
    sentences = [case.right for case in CASES]
    assert all(len(sentence.split()) > 5 for sentence in sentences)
    assert len(set(sentences)) == len(sentences)


def wrong_ids(cases: Sequence[Case]) -> list[str]:
    """Cases that are missing, twice, or none of the list."""
    due = {f"A{number:02}" for number in range(1, COUNT + 1)}
    ids = [case.id for case in cases]
    return sorted((due ^ set(ids)) | {name for name in ids if ids.count(name) > 1})


def unknown_tests(cases: Sequence[Case], known: Collection[str]) -> list[str]:
    return [f"{case.id} {test}" for case in cases for test in case.tests if test not in known]


def without_anybody(cases: Sequence[Case]) -> list[str]:
    """Cases with neither tests nor later work, or with work of nobody known."""
    return [case.id for case in cases if not (case.tests or case.owed) or case.owed not in (None, *OWNERS)]


def collected(root: Path) -> set[str]:
    """FILE::NAME of every test function below root/tests, read and not imported; one of a class has its name between.

    A parametrized function is one test.
    """
    return {
        f"{path.relative_to(root).as_posix()}::{name}"
        for path in sorted((root / "tests").rglob("test_*.py"))
        for name in names_of_tests(ast.parse(path.read_text("utf-8")).body)
    }


def names_of_tests(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from (f"{node.name}::{name}" for name in names_of_tests(node.body))


# The checks themselves


def test_a_missing_a_doubled_and_an_unknown_case_are_found() -> None:
    assert wrong_ids(CASES[1:]) == ["A01"]
    assert wrong_ids([*CASES, CASES[0]]) == ["A01"]
    assert wrong_ids([*CASES, replace(CASES[0], id="A71")]) == ["A71"]


@pytest.mark.parametrize("name", ["tests/test_cases.py::test_gone", "tests/gone.py::test_x", "test_cases.py", ""])
def test_a_test_that_is_gone_is_found(name: str) -> None:
    assert unknown_tests([Case("A01", "", (name,))], collected(ROOT)) == [f"A01 {name}"]


def test_a_case_that_nobody_answers_for_is_found() -> None:
    assert without_anybody([Case("A01", "")]) == ["A01"]
    assert without_anybody([Case("A01", "", owed="somebody")]) == ["A01"]
    assert without_anybody([Case("A01", "", owed=ENGINE), Case("A02", "", ("x::y",))]) == []


def test_collecting_reads_files_and_imports_none(tmp_path: Path) -> None:
    """Parametrized, asynchronous and grouped ones count; helpers, nested functions and other files do not."""
    text = """
raise RuntimeError("imported")
@pytest.mark.parametrize("x", [1, 2])
def test_a(x):
    def test_inner(): pass
async def test_b(): pass
class TestC:
    def test_d(self): pass
    def helper(self): pass
class Other:
    def test_e(self): pass
def helper(): pass
"""
    (tmp_path / "tests" / "sub").mkdir(parents=True)
    (tmp_path / "tests" / "sub" / "test_x.py").write_text(text)
    (tmp_path / "tests" / "helpers.py").write_text("def test_f(): pass")
    file = "tests/sub/test_x.py"
    assert collected(tmp_path) == {f"{file}::test_a", f"{file}::test_b", f"{file}::TestC::test_d"}
