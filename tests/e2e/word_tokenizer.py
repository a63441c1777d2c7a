"""A tokenizer whose words are w0, w1, ...: word n is token n, and a text of them stands between <s> and </s>."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.e2e.tiny import VOCAB

SPECIAL = {"bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
SPECIAL["mask_token"] = "<mask>"
NAMES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def write_tokenizer(folder: Path, *, begins: bool = True, punctuation: dict[int, str] | None = None) -> None:
    """`begins`: whether <s> stands before a text; </s> always ends it. `punctuation`: tokens with another name."""
    words = ((punctuation or {}).get(number, f"w{number}") for number in range(5, VOCAB))
    vocab = {name: number for number, name in enumerate([*NAMES, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(NAMES)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if begins else "$A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))


def text_of(token_ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in token_ids)
