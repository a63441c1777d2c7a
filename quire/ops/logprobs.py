"""Top-k logprobs of a row, and the logprob and rank of its chosen token."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op
from quire.ops.order import top_k_tokens


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


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    rows, size = 1 + seed % 6, (1, 130, 5000, 9001)[seed % 4]
    # Few values, so that many are equal.
    logits = torch.randint(-40, 40, (rows, size), generator=generator) * 0.25
    logits[torch.rand(rows, size, generator=generator) < 0.1] = -torch.inf
    logits[:, 0] = 1.0
    return logits, torch.randint(size, (rows,), generator=generator), (5, 0, 20, 1, 33)[seed % 5]


LOGPROBS = Op(
    "logprobs",
    logprobs,
    generate_inputs,
    3e-6,
    (Implementation("triton", "triton.logprobs:logprobs", ("cuda",), (torch.float32,)),),
)
