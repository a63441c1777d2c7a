"""Reads a prompt of embeddings: an array, or its bytes in base64 with shape and type; never a pickle."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.types.errors import ContextLengthError, RequestError
from quire.types.messages import EngineInfo
from quire.types.request import PromptEmbeds

_FIELD = "prompt_embeds"
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_KEYS = {"data", "shape", "dtype"}


def read_prompt_embeds(value: Any, info: EngineInfo) -> PromptEmbeds:
    """Check that there is a finite number for each of the model's hidden values, of each of the prompt's tokens."""
    if info.prompt_embeds_size == 0:
        raise RequestError(
            f"{_FIELD} is not enabled; start with --enable-prompt-embeds, or give text or token ids", _FIELD
        )
    embeds = _of_mapping(value, info) if isinstance(value, Mapping) else _of_array(value, info)
    if not _is_finite(embeds):
        raise RequestError(f"{_FIELD} holds values that are not finite; give finite ones", _FIELD)
    return embeds


def _of_mapping(value: Mapping[str, Any], info: EngineInfo) -> PromptEmbeds:
    if set(value) != _KEYS:
        raise RequestError(f"{_FIELD} must have data (base64), shape and dtype, and nothing else", _FIELD)
    dtype, data = value["dtype"], value["data"]
    if dtype not in _SIZES:
        raise RequestError(f"{_FIELD}.dtype is {str(dtype)[:40]!r} but must be one of {', '.join(_SIZES)}", _FIELD)
    shape = _checked_shape(value["shape"], info)
    size = shape[0] * shape[1] * _SIZES[dtype]
    if not isinstance(data, str) or len(data) != 4 * -(-size // 3):
        raise RequestError(f"{_FIELD}.data must be the base64 of {size} bytes: {shape} of {dtype}", _FIELD)
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{_FIELD}.data is not base64: {error}", _FIELD) from error
    if len(decoded) != size:
        raise RequestError(f"{_FIELD}.data has {len(decoded)} bytes but must have {size}", _FIELD)
    return PromptEmbeds(dtype, shape, decoded)


def _of_array(value: Any, info: EngineInfo) -> PromptEmbeds:
    """An array of numpy, or a tensor that numpy can read."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"{_FIELD} is no array that numpy reads ({error}); give one of float32 or float16 on the CPU", _FIELD
        ) from error
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise RequestError(f"{_FIELD} is of type {array.dtype} but must be float16 or float32", _FIELD)
    shape = _checked_shape(list(array.shape), info)
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused for that
        kept: NDArray[Any] = array if array.dtype == np.float16 else array.astype(np.float32)
    return PromptEmbeds("float16" if kept.dtype == np.float16 else "float32", shape, kept.tobytes())


def _checked_shape(shape: Any, info: EngineInfo) -> tuple[int, int]:
    if not isinstance(shape, list | tuple) or len(shape) != 2 or not all(type(size) is int for size in shape):
        raise RequestError(f"{_FIELD} has the shape {str(shape)[:60]} but must have [tokens, hidden size]", _FIELD)
    num_tokens, size = shape
    if size != info.prompt_embeds_size:
        raise RequestError(
            f"{_FIELD} has {size} values per token but the model has {info.prompt_embeds_size}", _FIELD
        )
    if num_tokens < 1:
        raise RequestError(f"{_FIELD} has {num_tokens} tokens; give at least one", _FIELD)
    if num_tokens >= info.max_model_len:
        raise ContextLengthError(num_tokens, info.max_model_len)
    return num_tokens, size


def _is_finite(embeds: PromptEmbeds) -> bool:
    if embeds.dtype == "bfloat16":  # numpy has no such type: its exponent is all ones where it is not finite
        bits = np.frombuffer(embeds.data, dtype="<u2")
        return not bool(((bits & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(embeds.data, dtype=np.dtype(embeds.dtype))).all())
