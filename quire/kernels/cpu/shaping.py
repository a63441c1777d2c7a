"""What changes logits before a token is chosen: see quire/ops/shaping.py and quire/ops/shaping.py."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.tracing import empty

_CHUNK = 4096  # as in shaping.cpp


def _address(ahead: Tensor | None) -> int | None:
    return None if ahead is None else ahead.data_ptr()


def keep_allowed(
    logits: Tensor, rows: Tensor, masks: Tensor, lines: Tensor, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    count, size = logits.shape
    out, highest = empty(count, size), empty(count, -(-size // _CHUNK))
    bound().keep_allowed(
        logits.data_ptr(),
        rows.data_ptr(),
        masks.data_ptr(),
        lines.data_ptr(),
        _address(ahead),
        out.data_ptr(),
        highest.data_ptr(),
        count,
        size,
        logits.stride(0),
        masks.stride(0),
        lines.shape[0],
        lines.stride(0),
    )
    return out, highest


def edit_logits(
    logits: Tensor,
    rows: Tensor,
    edits: Tensor,
    starts: Tensor,
    counts: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    ahead: Tensor | None = None,
) -> Tensor:
    bound().edit_logits(
        logits.data_ptr(),
        rows.data_ptr(),
        edits.data_ptr(),
        starts.data_ptr(),
        counts.data_ptr(),
        token_ids.data_ptr(),
        num_tokens.data_ptr(),
        num_prompt_tokens.data_ptr(),
        _address(ahead),
        logits.shape[0],
        logits.stride(0),
        edits.shape[1],
        token_ids.stride(0),
    )
    return logits


def penalize(
    logits: Tensor,
    rows: Tensor,
    penalties: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    ahead: Tensor | None = None,
) -> Tensor:
    bound().penalize(
        logits.data_ptr(),
        rows.data_ptr(),
        penalties.data_ptr(),
        penalties.stride(0),
        token_ids.data_ptr(),
        num_tokens.data_ptr(),
        num_prompt_tokens.data_ptr(),
        _address(ahead),
        *logits.shape,
        logits.stride(0),
        token_ids.stride(0),
    )
    return logits
