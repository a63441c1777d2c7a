"""All ops there are, for whoever wants each of them: tests, and lists of what a platform would run."""

from __future__ import annotations

from typing import Any

from quire.ops.activation import (
    GELU,
    GELU_AND_MUL,
    GELU_TANH,
    GELU_TANH_AND_MUL,
    GELU_TANH_AND_MUL_FP8,
    RELU,
    SILU_AND_MUL,
    SILU_AND_MUL_FP8,
)
from quire.ops.append import APPEND_GREEDY, APPEND_TOKENS
from quire.ops.base import Op
from quire.ops.choice import DRAW, FIRST_MAX
from quire.ops.drafts import PLACE_DRAFTS
from quire.ops.draw_within import DRAW_WITHIN
from quire.ops.embedding import CLEAR_OUTSIDE_RANGE, EMBED, EMBED_FROM, TOKENS_IN_RANGE
from quire.ops.fp8 import LINEAR_FP8, PREQUANTIZED_LINEAR_FP8
from quire.ops.gated_linear import GATED_LINEAR
from quire.ops.gather import GATHER_DECODE, GATHER_MIXED, GATHER_SAMPLING
from quire.ops.grouped import ADD_SHARED, GROUPED_DOWN, GROUPED_GATE_UP, LOCAL_EXPERTS, SPARSE_MLP
from quire.ops.index import SELECT_KEYS
from quire.ops.keep_allowed import KEEP_ALLOWED
from quire.ops.linear import LINEAR, LINEAR_TRANSPOSED
from quire.ops.logprobs import LOGPROBS
from quire.ops.lora import (
    EXPAND_LORA,
    EXPAND_LORA_GATED,
    GATHER_ADAPTERS,
    LINEAR_SHRINKING,
    LOOK_UP_LORA,
    PICK_ADAPTERS,
    SELECT_ADAPTERS,
    SHRINK_LORA,
    TILE_ADAPTERS,
)
from quire.ops.norm import ADD_LAYER_NORM, ADD_RMS_NORM, ADD_RMS_NORM_FP8, LAYER_NORM, RMS_NORM, RMS_NORM_FP8
from quire.ops.packed import PACKED_LINEAR, PACKED_SPARSE_MLP
from quire.ops.per_head import PER_HEAD
from quire.ops.places import ADD_PLACES, MARK_SECOND, POSITIONS_OF
from quire.ops.pooling import PROMPT_SUMS
from quire.ops.recurrent import (
    COMPACT,
    GATE,
    GATED_CONV,
    GATED_DELTA,
    GATED_NORM,
    LINEAR_ATTENTION,
    SELECTIVE_SCAN,
    SHORT_CONV,
    STATE_SPACE,
)
from quire.ops.rope import GATHER_ROTATION, GATHER_ROTATION_BY_AXIS
from quire.ops.routing import ROUTE, ROUTER_LOGITS
from quire.ops.rows import START_ROWS, WRITE_BLOCKS
from quire.ops.scale import SCALE, SCALE_ROWS
from quire.ops.select import GATHER_ROWS, TAKE_COLUMNS
from quire.ops.shaping import EDIT_LOGITS, PENALIZE
from quire.ops.soft_cap import SOFT_CAP
from quire.ops.split_k import ADD_RMS_NORM_SPLIT_K, LINEAR_SPLIT_K
from quire.ops.top_p import KEEP_TOP_P

OPS: tuple[Op[Any], ...] = (
    GELU,
    GELU_TANH,
    RELU,
    GELU_AND_MUL,
    SILU_AND_MUL,
    GELU_TANH_AND_MUL,
    SILU_AND_MUL_FP8,
    GELU_TANH_AND_MUL_FP8,
    LINEAR,
    LINEAR_TRANSPOSED,
    GATED_LINEAR,
    LINEAR_SPLIT_K,
    LINEAR_FP8,
    PREQUANTIZED_LINEAR_FP8,
    ROUTER_LOGITS,
    ROUTE,
    GROUPED_GATE_UP,
    LOCAL_EXPERTS,
    GROUPED_DOWN,
    SPARSE_MLP,
    PACKED_LINEAR,
    PACKED_SPARSE_MLP,
    ADD_SHARED,
    GATHER_ADAPTERS,
    SELECT_ADAPTERS,
    TILE_ADAPTERS,
    SHRINK_LORA,
    EXPAND_LORA,
    EXPAND_LORA_GATED,
    LINEAR_SHRINKING,
    LOOK_UP_LORA,
    PICK_ADAPTERS,
    PER_HEAD,
    SELECT_KEYS,
    LAYER_NORM,
    ADD_LAYER_NORM,
    RMS_NORM,
    ADD_RMS_NORM,
    ADD_RMS_NORM_SPLIT_K,
    RMS_NORM_FP8,
    ADD_RMS_NORM_FP8,
    EMBED,
    EMBED_FROM,
    MARK_SECOND,
    ADD_PLACES,
    POSITIONS_OF,
    PROMPT_SUMS,
    TOKENS_IN_RANGE,
    CLEAR_OUTSIDE_RANGE,
    GATHER_ROTATION,
    GATHER_ROTATION_BY_AXIS,
    GATHER_ROWS,
    TAKE_COLUMNS,
    WRITE_BLOCKS,
    START_ROWS,
    GATHER_DECODE,
    GATHER_MIXED,
    GATHER_SAMPLING,
    PLACE_DRAFTS,
    SCALE,
    SCALE_ROWS,
    SOFT_CAP,
    FIRST_MAX,
    DRAW,
    KEEP_TOP_P,
    DRAW_WITHIN,
    KEEP_ALLOWED,
    EDIT_LOGITS,
    PENALIZE,
    APPEND_TOKENS,
    APPEND_GREEDY,
    LOGPROBS,
    SHORT_CONV,
    GATED_CONV,
    GATED_DELTA,
    STATE_SPACE,
    SELECTIVE_SCAN,
    LINEAR_ATTENTION,
    GATED_NORM,
    GATE,
    COMPACT,
)
