"""Small models of MLX-LM's own classes, with seeded weights, wide enough for their layers to split."""

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn

WIDTH, VOCABULARY = 128, 160

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1000,
    "tie_word_embeddings": False,
}

_GEMMA3N = {
    "num_hidden_layers": 6,
    "head_dim": 32,
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": VOCABULARY,
    "sliding_window": 8,
    "rope_local_base_freq": 1.0,
    "final_logit_softcapping": 1.0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "activation_sparsity_pattern": [0.5] * 6,
    "hidden_size_per_layer_input": 128,
    "altup_num_inputs": 2,
    "altup_coef_clip": 1.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 128,
        "head_dim": 32,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "head_dim": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "gemma3n": {"text_config": _COMMON | _GEMMA3N | {"model_type": "gemma3n"}},
    "mamba": {
        "use_bias": False,
        "use_conv_bias": True,
        "conv_kernel": 4,
        "state_size": 16,
        "time_step_rank": 128,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-4,
        "conv_kernel": 3,
        "n_groups": 4,
        "use_bias": False,
        "use_conv_bias": False,
        "time_step_limit": (0.01, 10.0),
        "time_step_rank": "auto",
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 128,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 128,
        "partial_rotary_factor": 0.5,
    },
    "nemotron_h": {
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 3,
        "n_groups": 4,
        "time_step_limit": [0.01, 10.0],
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-4,
        "use_bias": True,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "-", "*", "-", "M", "-", "*", "-"],
    },
    "deepseek_v3": {
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 128,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "qk_nope_head_dim": 32,
        "rope_scaling": None,
    },
    "hunyuan": {
        "num_hidden_layers": 4,
        "attention_bias": False,
        "moe_topk": 1,
        "num_experts": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1.0},
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "afm7": {
        "num_hidden_layers": 6,
        "num_layers": 6,
        "hidden_dim": WIDTH,
        "num_kv_reuse_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 4,
    },
}


def tiny(model_type: str, **changes: Any) -> nn.Module:
    """A small model of `model_type` in eval mode; `changes` replace entries of its configuration."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    config = _COMMON | CONFIGS[model_type] | {"model_type": model_type} | changes
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    mx.eval(model.parameters())
    return model


class Pair(nn.Module):
    """Two linear layers, the first with a bias: the smallest model that somebody could hand over."""

    def __init__(self, width: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(nn.relu(self.up(x)))


def pair(**sizes: int) -> Pair:
    """A seeded `Pair` in eval mode."""
    mx.random.seed(11)
    made = Pair(**sizes)
    made.eval()
    mx.eval(made.parameters())
    return made


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The `nn.Linear` layers of `model` by their path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}


def tokens(count: int, batch: int = 1) -> mx.array:
    """Prompt tokens `[batch, count]`, the same ones each time."""
    return mx.random.randint(0, VOCABULARY, (batch, count), key=mx.random.key(3))
