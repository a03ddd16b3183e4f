"""Which tests show that a situation of MLX-LM's users is survived: a situation without one fails here."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# What somebody does, and the tests (file and name, without `test_`) that fail where it does not work.
SITUATIONS: dict[int, tuple[str, list[str]]] = {
    2: (
        "a quantised model with a few dense layers, some of them tiny",
        [
            "generation:mixed_models_split_their_large_dense_layers_only",
        ],
    ),
    3: (
        "layers that are called Linear and are not: quantised activations, packed weights, own classes",
        [
            "generation:custom_linear_classes_compute_what_they_always_did",
            "generation:quantised_activations_stay_stock",
            "known:a_subclass_with_a_call_of_its_own_is_stock",
        ],
    ),
    4: (
        "a tied or an untied head over a large vocabulary",
        [
            "generation:the_head_is_left_alone",
        ],
    ),
    5: (
        "layers with a bias, and layers of different types in one model",
        [
            "generation:biases_and_mixed_types_give_what_stock_gives",
            "split:mixed_types_promote_as_in_stock",
        ],
    ),
    6: (
        "inputs of one to four dimensions, without rows, with one row, strided or broadcast",
        [
            "split:the_product",
            "split:unusual_inputs",
        ],
    ),
    7: (
        "batches of prompts of unequal length, and 64 answers written at once",
        [
            "generation:batches_of_prompts_with_padding",
            "generation:batch_generate_gives_the_same_text",
            "generation:batched_decoding_is_never_split",
        ],
    ),
    8: (
        "prompts in chunks with any remainder; caches that are found, cut back, full or read from a file",
        [
            "generation:chunks_and_remainders_of_every_size",
            "generation:only_chunks_with_many_rows_split",
            "generation:cache_hits_with_short_and_long_suffixes",
            "generation:trimmed_caches",
            "generation:rotating_caches",
            "generation:prompt_caches_saved_by_one_are_read_by_the_other",
        ],
    ),
    9: (
        "a draft model that helps a larger one",
        [
            "generation:speculative_decoding",
            "server:one_request_at_a_time_with_a_draft_model",
        ],
    ),
    10: (
        "a cache that is quantised or bounded",
        [
            "generation:quantised_caches",
            "generation:rotating_caches",
        ],
    ),
    11: (
        "adapters: loaded before or after, fused, and trained with the patch on",
        [
            "training:adapters_loaded_before_the_patch",
            "training:adapters_loaded_while_patched",
            "training:fused_adapters_split_again",
            "training:four_steps_of_fine_tuning_give_the_same_losses",
            "training:validation_between_the_steps_may_split",
        ],
    ),
    12: (
        "transformations of a function: compiled, differentiated, mapped, checkpointed, exported",
        [
            "traces:with_the_input_traced",
            "traces:with_only_a_parameter_traced",
            "traces:an_exported_function_is_stock",
            "traces:a_compiled_function_with_captured_arrays_is_right",
            "training:gradients_of_a_model_in_eval_mode",
        ],
    ),
    13: (
        "models in float32, float16 and bfloat16",
        [
            "generation:models_of_each_float_type_answer_as_stock",
            "split:the_product",
        ],
    ),
    15: (
        "recurrent and hybrid models",
        [
            "generation:recurrent_and_hybrid_models_split_and_answer_as_stock",
        ],
    ),
    16: (
        "latent attention",
        [
            "generation:latent_attention_keeps_its_own_products",
        ],
    ),
    17: (
        "blocks that borrow an earlier block's keys and values",
        [
            "liveness:shared_keys_and_values_end_the_live_part_early",
            "liveness:a_patched_prefill_does_no_more_linear_work_than_stock",
        ],
    ),
    19: (
        "a server with several clients, one of which goes away while its prompt is read",
        [
            "server:clients_at_once_and_one_that_goes_away",
        ],
    ),
    20: (
        "prompts on other threads, two models at once",
        [
            "generation:two_models_on_two_threads_at_once",
            "generation:calls_from_asyncio_to_thread",
            "patching:the_33rd_thread_is_stock",
            "known:the_lists_of_two_threads_do_not_tear",
        ],
    ),
    21: (
        "a patch before or after the import and the load, and a model that nobody handed over",
        [
            "generation:a_load_imported_before_the_patch_gives_known_models",
            "generation:a_patch_before_mlx_lm_is_imported",
            "generation:a_model_loaded_before_and_handed_over_splits",
            "generation:a_model_nobody_handed_over_is_stock",
        ],
    ),
    23: (
        "saving, converting, quantising, fusing, copying and pickling",
        [
            "files:saving_a_model_that_has_answered",
            "files:saving_weights_by_mlx_alone",
            "files:converting",
            "files:dequantising",
            "files:quantising_a_model_that_has_answered",
            "files:fusing_adapters",
            "files:nothing_is_left_on_a_model",
            "files:deep_copies",
            "files:pickles",
            "files:new_weights_in_a_known_model_count_at_once",
        ],
    ),
    24: (
        "patching and unpatching twice, and somebody else's patch on top",
        [
            "patching:patch_twice_unpatch_twice",
            "patching:it_refuses_to_remove_what_somebody_wrapped",
        ],
    ),
    29: (
        "a callback that raises and Ctrl-C, both in the middle of a prompt",
        [
            "generation:an_exception_in_the_middle_of_a_prompt",
            "generation:ctrl_c_inside_a_split_is_not_swallowed",
            "generation:a_batch_that_is_closed_waits_for_our_stream",
        ],
    ),
    30: (
        "a wrong setting, a model that is not there, a prompt longer than the context",
        [
            "settings:a_bad_value_is_named",
            "patching:a_wrong_setting_leaves_nothing_patched",
            "generation:a_wrong_setting_leaves_the_running_patch_as_it_is",
            "generation:a_wrong_setting_in_the_environment_is_named",
            "generation:a_missing_model_is_stocks_own_error",
            "generation:prompts_longer_than_the_context_go_on_as_in_stock",
        ],
    ),
}

LATER = {1, 14, 18, 22, 25, 26, 27, 28}
"""Situations of parts that are still to come."""


@pytest.mark.parametrize("number", sorted(set(range(1, 31)) - LATER))
def test_every_situation_has_its_tests(number: int) -> None:
    what, tests = SITUATIONS.get(number, ("nobody described it", []))
    assert tests, f"situation {number} ({what}) has no test"
    for test in tests:
        file, name = test.split(":")
        there = defined_in(HERE / f"test_{file}.py")
        assert f"test_{name}" in there, f"situation {number} ({what}): test_{file}.py has no test_{name}"


def defined_in(path: Path) -> set[str]:
    """The names of the tests of one file, without those that are skipped anywhere."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not any("skip" in ast.dump(d) for d in node.decorator_list)
    }
