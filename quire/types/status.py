"""Why a row that was to sample has no token; codes that kernels write beside each token."""

from __future__ import annotations

OK = 0
BAD_LOGITS = 1
NO_TOKEN = 2
OVERFLOWS = 3

MESSAGES = {
    BAD_LOGITS: "the model produced NaN or infinite logits; the weights or the dtype are unsuitable",
    NO_TOKEN: (
        "no token may be chosen: allowed_token_ids, bad_words, min_tokens and the grammar exclude every token; "
        "loosen one of them"
    ),
    OVERFLOWS: "the logits overflow; use less extreme logit_bias or repetition_penalty",
}
