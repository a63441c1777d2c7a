"""A tokenizer for the tiny models: one token per printable ASCII character, after the special ones."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }};{% endfor %}"


def write_tokenizer(folder: Path, extra_tokens: int = 0) -> None:
    """`extra_tokens` are added behind the others: <0>, <1>, ..."""
    characters = [character if character != " " else "Ġ" for character in map(chr, range(32, 127))]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([f"<{index}>" for index in range(extra_tokens)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
