"""Each kernel of the library and the tests that hold it: odd sizes, extreme values, any place in any batch."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from quire.kernels.cpu import library
from tests.attention import test_context_parallel, test_cpu_native, test_latent, test_sparse
from tests.kernels.cpu import (
    test_encoder,
    test_extremes,
    test_grouped,
    test_lora,
    test_matrix,
    test_native,
    test_sampling,
    test_states,
    test_step,
)
from tests.parallel import test_shared_memory, test_sockets

MODULES = (
    test_context_parallel,
    test_cpu_native,
    test_latent,
    test_sparse,
    test_encoder,
    test_extremes,
    test_grouped,
    test_lora,
    test_matrix,
    test_native,
    test_sampling,
    test_states,
    test_step,
    test_shared_memory,
    test_sockets,
)


class Held(NamedTuple):
    sizes: str
    extremes: str
    batch: str  # the same bits whatever stands beside it


BATCHED_MATMUL = "test_a_row_has_the_same_bits_in_any_batch"
OF_STATES = (
    "short_conv",
    "recurrence",
    "keep_inputs",
    "delta_inputs",
    "scan_inputs",
    "gated_norm",
    "gate",
    "copy_columns",
)
OF_STEPS = (
    "place_drafts",
    "gather_mixed",
    "gather_decode",
    "decode_slots",
    "gather_slots",
    "gather_sampling",
    "keep_allowed",
    "edit_logits",
    "penalize",
)
GROUPED = [f"{prefix}grouped_{stage}" for prefix in ("", "integer_", "byte_") for stage in ("gate_up", "down")]
GROUPED_ALIKE = "test_every_format_multiplies_each_row_as_if_alone"
LOOKED_UP = "test_rows_are_looked_up"
COVERED = {
    "matmul": Held(BATCHED_MATMUL, "test_matmuls", "test_every_batch_size_to_64_gives_the_same_bits"),
    **dict.fromkeys(
        ("integer_matmul", "byte_matmul"),
        Held(BATCHED_MATMUL, "test_matmuls_of_integers", "test_every_batch_size_to_64_gives_the_same_bits"),
    ),
    "panel_bytes": Held("test_any_blocks_keep_their_values", "test_any_blocks", LOOKED_UP),
    "pack_blocks": Held("test_any_blocks_keep_their_values", "test_any_blocks", LOOKED_UP),
    "pack_floats": Held(
        "test_quantization_errs_by_half_a_step_at_most", "test_what_cannot_be_quantized_is_refused", LOOKED_UP
    ),
    "unpack_rows": Held(LOOKED_UP, "test_any_blocks", LOOKED_UP),
    "gelu": Held(*["test_gelu"] * 3),
    **dict.fromkeys(("shrink_lora", "expand_lora"), Held(*["test_adapters_are_added_token_by_token"] * 3)),
    "expand_lora_gated": Held(*["test_adapters_are_added_before_an_activation"] * 3),
    **{
        name: Held(*["test_tokens_have_the_slots_of_their_rows"] * 3)
        for name in ("gather_adapters", "select_adapters", "tile_adapters", "look_up_lora", "pick_adapters")
    },
    "linear": Held(
        "test_a_row_of_a_matmul_has_the_same_bits_in_any_batch", "test_plain_matmuls", "test_plain_matmuls"
    ),
    "add_rms_norm": Held("test_small_ops_do_not_depend_on_the_batch", "test_norms", "test_norms"),
    "add_layer_norm": Held(*["test_layer_norms"] * 3),
    "gated": Held("test_small_ops_do_not_depend_on_the_batch", "test_activations", "test_activations"),
    "scale": Held(*["test_scaling_and_soft_caps"] * 3),
    "scale_rows": Held(*["test_scaling_and_soft_caps"] * 3),
    "soft_cap": Held(*["test_scaling_and_soft_caps"] * 3),
    "gather_rows": Held(*["test_rows_are_picked_as_they_are"] * 3),
    "tokens_in_range": Held(*["test_rows_of_a_range_of_tokens"] * 3),
    "copy_columns": Held(*["test_rows_of_a_range_of_tokens"] * 3),
    "join_columns": Held(*["test_columns_side_by_side_and_apart"] * 3),
    "spread_logits": Held(*["test_columns_side_by_side_and_apart"] * 3),
    "clear_outside_range": Held(*["test_rows_of_a_range_of_tokens"] * 3),
    "sum_over_ranks": Held(*["test_sums_are_a_tree_over_the_ranks"] * 3),
    **dict.fromkeys(
        ("send_to_stage", "receive_from_stage"),
        Held(*["test_a_link_hands_on_messages_of_any_size_in_their_order"] * 3),
    ),
    **dict.fromkeys(
        ("scatter_rows_over_ranks", "gather_rows_over_ranks", "own_rows"),
        Held(*["test_rows_of_a_sum_are_scattered_and_gathered"] * 3),
    ),
    **dict.fromkeys(
        ("scatter_rows_over_sockets", "gather_rows_over_sockets"),
        Held(*["test_rows_of_a_sum_over_sockets_are_scattered_and_gathered"] * 3),
    ),
    "sum_over_sockets": Held(*["test_sums_over_sockets_have_the_bits_of_shared_memory"] * 3),
    "gather_over_sockets": Held(*["test_columns_over_sockets_are_in_rank_order"] * 3),
    **dict.fromkeys(("local_experts", "count_experts"), Held(*["test_what_is_dispatched_is_the_references"] * 3)),
    **dict.fromkeys(
        ("expert_routes", "add_slots"),
        Held(*["test_tokens_are_dispatched_and_what_experts_give_is_combined"] * 3),
    ),
    "rows_over_ranks": Held(*["test_rows_go_from_one_rank_to_some"] * 3),
    "rows_over_sockets": Held(*["test_rows_over_sockets_go_from_one_rank_to_some"] * 3),
    **dict.fromkeys(("own_slots", "merge_contexts"), Held(*["test_ranks_attend_like_one"] * 3)),
    "gather_over_ranks": Held(*["test_columns_are_gathered_in_rank_order"] * 3),
    "note_finite": Held(*["test_what_is_not_finite_is_found_in_its_row"] * 3),
    "prepare_qkv": Held(
        "test_norm_rotation_and_write_match_the_reference",
        "test_extreme_keys_and_values",
        "test_any_schedule_gives_the_same_bits",
    ),
    "gather_rotation": Held(*["test_rotations_are_looked_up"] * 3),
    "attention": Held(
        "test_matches_dense_attention", "test_attention_with_extreme_scores", "test_any_schedule_gives_the_same_bits"
    ),
    **dict.fromkeys(
        ("prepare_latent", "per_head", "latent_attention"),
        Held(
            "test_the_absorbed_form_is_the_unabsorbed_one",
            "test_what_is_not_finite_stays_in_its_row",
            "test_any_schedule_gives_the_same_bits",
        ),
    ),
    "first_max": Held("test_the_first_maximum", "test_nan_is_reported", "test_draws"),
    "sample_within": Held("test_draws_are_the_references", "test_draws", "test_rows_do_not_depend_on_the_batch"),
    **dict.fromkeys(
        ("offer_candidates", "sample_among"),
        Held(*["test_draws_among_the_offers_of_ranks"] * 2, "test_ops_of_steps_are_their_references"),
    ),
    "greedy": Held(
        "test_the_chosen_token_is_appended_and_the_row_advances",
        "test_rows_whose_logits_broke_are_told",
        "test_the_chosen_token_is_appended_and_the_row_advances",
    ),
    **dict.fromkeys(GROUPED, Held(GROUPED_ALIKE, "test_rows_that_are_not_finite_stay_by_themselves", GROUPED_ALIKE)),
    "route": Held(*["test_routes_are_the_references"] * 2, "test_a_row_is_routed_alike_in_every_batch"),
    "add_shared": Held(*["test_shared_experts_are_added"] * 3),
    # Copies of whole numbers and changes of single logits, row by row.
    **{name: Held(*["test_ops_of_steps_are_their_references"] * 3) for name in OF_STEPS},
    **{name: Held(*["test_recurrent_ops_are_their_references"] * 2, "test_rows_beside_rows") for name in OF_STATES},
    **dict.fromkeys(
        ("mark_second", "positions_of", "add_places", "prompt_sums"),
        Held(
            "test_encoder_ops_are_their_references",
            "test_a_prompt_that_is_not_finite_stays_by_itself",
            "test_prompts_beside_prompts",
        ),
    ),
    **dict.fromkeys(
        ("prepare_index", "select_keys"),
        Held(
            "test_selected_keys_alone_are_attended_to",
            "test_what_is_not_finite_is_healed",
            "test_any_schedule_gives_the_same_bits",
        ),
    ),
    "append_tokens": Held(
        "test_the_chosen_token_is_appended_and_the_row_advances",
        "test_rows_whose_logits_broke_are_told",
        "test_the_chosen_token_is_appended_and_the_row_advances",
    ),
}


@pytest.mark.parametrize("kernel", library.parameters())
def test_every_kernel_is_held_by_tests(kernel: str) -> None:
    names = {name for module in MODULES for name in vars(module)}
    assert kernel in COVERED, f"{kernel} is in kernels.def: name the tests that hold it"
    assert not set(COVERED[kernel]) - names
