"""Top-k logprobs of a row, and the logprob and rank of its chosen token."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import F32, Op, triton
from quire.ops.sample import top_k_tokens


def logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of logits [m, vocab_size] when `chosen` [m] was taken: [m, 1 + k] int32 and [m, 1 + k] float32.

    The rank of the chosen token, which is 1 more than how many logits are higher than its own, then the top k
    tokens in order: `count` of them, or the whole vocabulary. Then the log-probability of the chosen token, and
    those of the top k. A row's bits depend neither on other rows nor on `count`. Rows whose logits are not
    finite may give anything.
    """
    logits = logits.to(torch.float32)
    chosen = chosen.to(torch.int64).unsqueeze(1)
    ranks = (logits > logits.gather(1, chosen)).sum(1, keepdim=True) + 1
    top = top_k_tokens(logits, min(count, logits.shape[1]))[1] if count > 0 else chosen[:, :0]
    found = logits.log_softmax(-1).gather(1, torch.cat([chosen, top], dim=1))
    return torch.cat([ranks, top], dim=1).to(torch.int32), found


LOGPROBS = Op(logprobs, 3e-6, triton("logprobs", F32))
