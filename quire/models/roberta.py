"""RoBERTa and XLM-RoBERTa: BERT whose positions are counted from behind that of padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.models.bert import Bert
from quire.models.config import ConfigReader
from quire.models.encoder import EncoderConfig


class Roberta(Bert):
    prefix = "roberta"
    classifiers: ClassVar = {
        "ForSequenceClassification": (("classifier.dense", "tanh"), ("classifier.out_proj", None)),
        "ForTokenClassification": (("classifier", None),),
    }
    masked: ClassVar = ("lm_head.dense", "lm_head.layer_norm", "lm_head")

    @classmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        read = ConfigReader(config, {"pad_token_id": 1})
        return replace(super().encoder_config(config), first_position=read["pad_token_id"] + 1)
