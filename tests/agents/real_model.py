"""A tiny model in a folder, with a context as long as agents want it, that answers every prompt with a greeting.

Its weights are random, but for the embeddings and the output layer: they make each token of the greeting follow the
one before it, its first follow everything else, and the end follow its last. So a client's turn ends, and ends with a
text that can be looked for.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.tiny import make_model
from tests.e2e.tiny_tokenizer import SPECIAL, write_tokenizer

GREETING = "Hi."
CONTEXT = 131072
_VOCAB = len(SPECIAL) + 95
_HIDDEN = 128
_EOS = 2


def write_model(folder: Path) -> Path:
    make_model(
        folder,
        "llama",
        vocab_size=_VOCAB,
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.02,
        tie_word_embeddings=False,
    )
    write_tokenizer(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    embeddings = torch.linalg.qr(torch.randn(_HIDDEN, _HIDDEN))[0][:_VOCAB] * 10
    weights["model.embed_tokens.weight"] = embeddings.contiguous()
    output = torch.zeros(_VOCAB, _HIDDEN)
    for token, successor in enumerate(_successors()):
        output[successor] += embeddings[token]
    weights["lm_head.weight"] = output
    save_file(weights, path, metadata={"format": "pt"})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": _EOS, "max_new_tokens": 64}))
    return folder


def _successors() -> list[int]:
    """The token that follows each token."""
    greeting = [len(SPECIAL) + ord(character) - ord(" ") for character in GREETING]
    following = [greeting[0]] * _VOCAB
    for token, successor in zip(greeting, [*greeting[1:], _EOS], strict=True):
        following[token] = successor
    return following
