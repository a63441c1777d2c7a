"""What the values of a config.json may be, as far as they are read: a file that is damaged or edited is refused here.

Keys may be absent or null; which ones an architecture needs it says itself. Other keys are not looked at.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_LAYERS = 10_000  # a damaged file may say billions, and lists are made that long before a tensor is missed
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
MAX_EXPERTS = 1 << 12  # the same of experts
Experts = Annotated[int, Meta(ge=1, le=MAX_EXPERTS)]
MAX_TOKENS = 1 << 24
Count = Annotated[int, Meta(ge=1, le=1 << 24)]
TokenId = Annotated[int, Meta(ge=-1, lt=MAX_TOKENS)]  # -1: none, as some files say
HeadDim = Annotated[int, Meta(ge=1, le=1 << 12)]
Positive = Annotated[float, Meta(gt=0.0, le=1e30)]
Base = Annotated[float, Meta(gt=1.0, le=1e30)]  # of frequencies: of 1 all were the same
Magnitude = Annotated[float, Meta(ge=0.0, le=1e3)]  # 0: none
Whole = Annotated[int, Meta(ge=0)]
Part = Annotated[float, Meta(gt=0.0, le=1.0)]


class RopeSchema(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: Base | None = None
    partial_rotary_factor: Part | None = None
    original_max_position_embeddings: Count | None = None
    factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Magnitude | None = None
    mscale_all_dim: Magnitude | None = None
    truncate: bool | None = None
    mixed_b: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    mrope_section: list[Count] | None = None


class LayeredRopeSchema(RopeSchema):
    full_attention: RopeSchema | None = None
    sliding_attention: RopeSchema | None = None


class LinearAttentionSchema(msgspec.Struct):
    head_dim: HeadDim | None = None
    num_heads: Count | None = None
    short_conv_kernel_size: Count | None = None
    full_attn_layers: list[int] | None = None


class QuantizationSchema(msgspec.Struct):
    quant_method: str


class ConfigSchema(msgspec.Struct):
    architectures: list[str] | None = None
    vocab_size: Count | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_hidden_layers: Layers | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: HeadDim | None = None
    max_position_embeddings: Count | None = None
    original_max_position_embeddings: Count | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    activation_function: str | None = None
    embedding_size: Count | None = None
    position_biased_input: bool | None = None
    norm_rel_ebd: str | None = None
    rms_norm_eps: Positive | None = None
    tie_word_embeddings: bool | None = None
    is_causal: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_theta: Base | None = None
    rope_local_base_freq: Positive | None = None
    partial_rotary_factor: Part | None = None
    rope_scaling: LayeredRopeSchema | None = None
    rope_parameters: LayeredRopeSchema | None = None
    layer_types: list[str] | None = None
    sliding_window: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None  # 0: none, as transformers writes it
    sliding_window_pattern: Count | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Whole | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count | None = None
    attention_chunk_size: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    attn_temperature_tuning: bool | None = None
    floor_scale: Count | None = None
    attn_scale: Positive | None = None
    intermediate_size_mlp: Count | None = None
    interleave_moe_layer_step: Count | None = None
    moe_layers: list[int] | None = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    attention_multiplier: Positive | None = None
    embedding_multiplier: Positive | None = None
    residual_multiplier: Positive | None = None
    logits_scaling: Positive | None = None
    num_experts: Experts | None = None
    num_local_experts: Annotated[int, Meta(ge=0, le=MAX_EXPERTS)] | None = None  # 0: dense
    type_vocab_size: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None  # 0: no types
    relative_attention: bool | None = None
    relative_attention_num_buckets: Annotated[int, Meta(ge=4, le=1 << 16)] | None = None
    position_buckets: Annotated[int, Meta(ge=-1, le=1 << 16)] | None = None  # -1: none
    max_relative_positions: Annotated[int, Meta(ge=-1, le=1 << 16)] | None = None  # -1: as many as positions
    pos_att_type: str | list[str] | None = None
    conv_kernel_size: Whole | None = None
    n_embd: Count | None = None
    n_inner: Count | None = None
    n_layer: Layers | None = None
    n_head: Count | None = None
    n_positions: Count | None = None
    max_trained_positions: Count | None = None
    rotary_emb_base: Positive | None = None
    pad_token_id: TokenId | None = None
    layer_norm_eps: Positive | None = None
    position_embedding_type: str | None = None
    is_decoder: bool | None = None
    activation: str | None = None
    dim: Count | None = None
    hidden_dim: Count | None = None
    n_layers: Layers | None = None
    n_heads: Count | None = None
    n_routed_experts: Experts | None = None
    moe_num_experts: Experts | None = None
    num_experts_per_tok: Count | None = None
    moe_k: Count | None = None
    moe_topk: Count | list[Count] | None = None
    moe_intermediate_size: Count | None = None
    shared_expert_intermediate_size: Count | None = None
    n_shared_experts: Whole | None = None
    moe_num_shared_experts: Whole | None = None
    first_k_dense_replace: Whole | None = None
    decoder_sparse_step: Count | None = None
    mlp_only_layers: list[int] | None = None
    moe_layer_start_index: Whole | None = None
    moe_layer_end_index: int | None = None
    moe_layer_interval: Count | None = None
    moe_norm_min: Positive | None = None
    moe_every_n_layers: Whole | None = None
    moe_top_k: Count | None = None
    mlp_fc1_bias: bool | None = None
    mlp_fc2_bias: bool | None = None
    qkv_proj_bias: bool | None = None
    norm_topk_prob: bool | None = None
    local_attention: Count | None = None
    global_attn_every_n_layers: Count | None = None
    local_rope_theta: Base | None = None
    global_rope_theta: Base | None = None
    norm_bias: bool | None = None
    classifier_bias: bool | None = None
    classifier_activation: str | None = None
    num_labels: Count | None = None
    id2label: dict[str, Any] | None = None
    routed_scaling_factor: Positive | None = None
    scoring_func: str | None = None
    moe_layer_freq: Count | None = None
    mla_scale_q_lora: bool | None = None
    mla_scale_kv_lora: bool | None = None
    n_group: Count | None = None
    topk_method: str | None = None
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_nope_head_dim: HeadDim | None = None
    qk_rope_head_dim: HeadDim | None = None
    v_head_dim: HeadDim | None = None
    index_topk: Count | None = None
    index_head_dim: HeadDim | None = None
    index_n_heads: Count | None = None
    index_topk_freq: Whole | None = None
    index_skip_topk_offset: Whole | None = None
    index_topk_pattern: str | list[str] | None = None
    indexer_types: list[str] | None = None
    rope_interleave: bool | None = None
    indexer_rope_interleave: bool | None = None
    scale_emb: Positive | None = None
    scale_depth: Positive | None = None
    dim_model_base: Count | None = None
    topk_group: Count | None = None
    router_jitter_noise: Annotated[float, Meta(ge=0.0)] | None = None
    swiglu_alpha: Positive | None = None
    swiglu_limit: Positive | None = None
    rotary_dim: Count | None = None
    use_qk_norm: bool | None = None
    qkv_bias: bool | None = None
    use_bias: bool | None = None
    moe_bias: bool | None = None
    lm_head_bias: bool | None = None
    clip_qkv: Positive | None = None
    attn_layer_indices: list[int] | None = None
    attn_layer_offset: Whole | None = None
    attn_layer_period: Count | None = None
    block_auto_adjust_ff_dim: bool | None = None
    block_ff_dim: Count | None = None
    block_ffn_dim_multiplier: Positive | None = None
    block_multiple_of: Count | None = None
    conv_L_cache: Count | None = None
    conv_bias: bool | None = None
    conv_kernel: Count | None = None
    expand: Positive | None = None
    expert_layer_offset: Whole | None = None
    expert_layer_period: Count | None = None
    full_attention_interval: Count | None = None
    full_attn_idxs: list[int] | None = None
    hybrid_override_pattern: str | None = None
    layer_norm_epsilon: Positive | None = None
    layers_block_type: list[str] | None = None
    linear_attn_config: LinearAttentionSchema | None = None
    in_proj_qkv_apart: bool | None = None
    linear_conv_kernel_dim: Count | None = None
    linear_head_dim: HeadDim | None = None
    linear_key_head_dim: Count | None = None
    linear_num_heads: Count | None = None
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_value_head_dim: Count | None = None
    mamba_conv_bias: bool | None = None
    mamba_d_conv: Count | None = None
    mamba_d_head: Count | Literal["auto"] | None = None
    mamba_d_ssm: Count | None = None
    mamba_d_state: Count | None = None
    mamba_dt_rank: Count | Literal["auto"] | None = None
    mamba_expand: Positive | None = None
    mamba_head_dim: Count | None = None
    mamba_n_groups: Count | None = None
    mamba_n_heads: Count | None = None
    mamba_norm_before_gate: bool | None = None
    mamba_num_heads: Count | None = None
    mamba_proj_bias: bool | None = None
    mamba_rms_norm: bool | None = None
    mixer_rms_eps: Positive | None = None
    mlp_multipliers: list[float] | None = None
    model_max_length: Count | None = None
    model_type: str | None = None
    moe_latent_size: Count | None = None
    moe_renormalize: bool | None = None
    moe_router_activation_func: str | None = None
    moe_shared_expert_intermediate_size: Count | None = None
    n_groups: Count | None = None
    norm_eps: Positive | None = None
    num_dense_layers: Whole | None = None
    num_expert_group: Count | None = None
    num_experts_per_token: Count | None = None
    num_heads: Count | None = None
    num_layers: Layers | None = None
    num_shared_experts: Whole | None = None
    shared_intermediate_size: Count | None = None
    ssm_multipliers: list[float] | None = None
    ssm_state_size: Count | None = None
    state_size: Count | None = None
    text_config: dict[str, Any] | None = None
    tie_embedding: bool | None = None
    time_step_limit: list[float | dict[str, str]] | None = None
    time_step_min: Positive | None = None
    time_step_rank: Count | Literal["auto"] | None = None
    use_conv_bias: bool | None = None
    use_expert_bias: bool | None = None
    expert_ffn_hidden_size: Count | None = None
    ffn_hidden_size: Count | None = None
    zero_expert_num: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    zero_expert_type: str | None = None
    kda_lower_bound: Annotated[float, Meta(lt=0.0, ge=-80.0)] | None = None
    kda_safe_gate: bool | None = None
    layer_group_size: Count | None = None
    short_conv_kernel_size: Count | None = None
    full_attn_alpha_factor: float | None = None
    full_attn_beta_factor: float | None = None
    linear_attn_alpha_factor: float | None = None
    linear_attn_beta_factor: float | None = None
    mlp_alpha_factor: float | None = None
    mlp_beta_factor: float | None = None
    quantization_config: QuantizationSchema | None = None
