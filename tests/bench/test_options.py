"""Options refuse what makes no sense, by the name of the flag."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quire.bench.options import DataOptions, LoadOptions, ServeOptions, TargetOptions, parse_goodput
from quire.types.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "values", "complaint"),
    [
        (DataOptions, {"dataset_name": "jsonl"}, "--dataset-path"),
        (DataOptions, {"dataset_path": Path("x")}, "--dataset-name jsonl or sharegpt"),
        (DataOptions, {"dataset_name": "novel"}, "--dataset-name is 'novel'"),
        (DataOptions, {"input_len": 0}, "--input-len is 0"),
        (DataOptions, {"num_prompts": 0}, "--num-prompts is 0"),
        (DataOptions, {"range_ratio": 1.0}, "--range-ratio is 1"),
        (DataOptions, {"dataset_name": "shared-prefix", "prefix_len": 128}, "--prefix-len 128"),
        (DataOptions, {"dataset_name": "shared-prefix", "range_ratio": 0.5}, "a prompt of 64 tokens"),
        (TargetOptions, {"base_url": "localhost:8000"}, "http://"),
        (TargetOptions, {"endpoint": "edits"}, "--endpoint is 'edits'"),
        (TargetOptions, {"request_timeout": 0}, "--request-timeout is 0"),
        (LoadOptions, {"request_rate": 0}, "--request-rate is 0"),
        (LoadOptions, {"request_rate": math.nan}, "--request-rate is nan"),
        (LoadOptions, {"max_concurrency": 0}, "--max-concurrency is 0"),
        (LoadOptions, {"warmup": -1}, "--warmup is -1"),
        (LoadOptions, {"ramp": -1}, "--ramp is -1"),
        (LoadOptions, {"ramp": 5}, "--ramp has nothing to ramp up"),
    ],
)
def test_mistakes_are_named(options: type[Any], values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(**values)
    assert complaint in str(caught.value)


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:200", "tpot:50.5"]) == {"ttft": 200, "tpot": 50.5}
    for text in ("ttft", "ttft:", "speed:3", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match=f"--goodput '{text}'"):
            parse_goodput([text])


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_base_may_end_with_v1(base: str) -> None:
    assert TargetOptions(base_url=base).url("models") == "http://h:1/v1/models"


def test_answers_to_real_prompts_end_by_themselves() -> None:
    files = DataOptions(dataset_name="jsonl", dataset_path=Path("x"))
    assert ServeOptions().ignore_eos()
    assert not ServeOptions(data=files).ignore_eos()
    assert ServeOptions(data=files, target=TargetOptions(ignore_eos=True)).ignore_eos()


def test_the_description_is_json_without_the_key() -> None:
    options = ServeOptions(
        data=DataOptions(dataset_name="jsonl", dataset_path=Path("x")), target=TargetOptions(api_key="hush")
    )
    text = json.dumps(options.describe(), allow_nan=False)
    assert "hush" not in text + repr(options)
    assert json.loads(text)["load"]["request_rate"] == "inf"
