"""Prompt files in every shape, and what is said of broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.data_files import read_jsonl, read_sharegpt
from quire.types.errors import ConfigError

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ({"prompt": "hi"}, {"text": "hi", "output_len": 64}),
        ({"prompt": [1, 2], "output_len": 3}, {"token_ids": [1, 2], "prompt_len": 2, "output_len": 3}),
        ({"prompt_token_ids": [1]}, {"token_ids": [1], "prompt_len": 1, "output_len": 64}),
        ({"messages": MESSAGES, "note": "ignored"}, {"messages": MESSAGES, "output_len": 64}),
    ],
)
def test_jsonl(tmp_path: Path, line: dict[str, Any], fields: dict[str, Any]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"\n{json.dumps(line)}\n\n")
    assert list(read_jsonl(path, 64)) == [fields]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2: Input data was truncated"),
        ('{"output_len": 3}', "line 1: has neither a prompt"),
        ('{"prompt": ""}', "line 1: has neither a prompt"),
        ('{"prompt": "a", "output_len": 0}', "line 1: output_len is 0"),
        ('{"prompt": "a", "output_len": "long"}', "line 1: Expected `int | null`"),
        ("\n\n", "holds no prompts"),
    ],
)
def test_broken_jsonl_names_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        list(read_jsonl(path, 64))
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)


def test_sharegpt_takes_the_first_two_turns_and_leaves_out_scraps(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"

    def conversation(*values: str) -> dict[str, Any]:
        return {"id": "x", "conversations": [{"from": "human", "value": value} for value in values]}

    path.write_text(
        json.dumps([conversation("abcdef", "abcd", "z"), conversation("hi", "there"), conversation("alone"), {}])
    )
    assert list(read_sharegpt(path, lambda text: list(map(ord, text)), 10)) == [("abcdef", 6, 4)]
    with pytest.raises(ConfigError, match="--max-total-len"):
        list(read_sharegpt(path, lambda text: list(map(ord, text)), 9))


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    with pytest.raises(ConfigError, match="--dataset-path"):
        list(read_sharegpt(path, list, 10))  # type: ignore[arg-type]  # never called
    path.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="no ShareGPT file"):
        list(read_sharegpt(path, list, 10))  # type: ignore[arg-type]  # never called
