"""RoBERTa and XLM-RoBERTa: BERT whose positions are counted from behind that of padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.bert import Bert
from quire.models.config import ConfigReader
from quire.models.encoder import EncoderConfig


class Roberta(Bert):
    prefix = "roberta"

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        read = ConfigReader(config, {"pad_token_id": 1})
        return replace(super().encoder_config(config), first_position=read["pad_token_id"] + 1)
