"""Reads prompts from JSONL and ShareGPT-shaped files; every error names the file and the place in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.types.errors import ConfigError

MIN_SHAREGPT_TOKENS = 4  # shorter questions and answers are greetings or scraps


class _Line(msgspec.Struct):
    """One line of a JSONL file. Unknown fields are ignored."""

    prompt: str | list[int] | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    output_len: int | None = None


class _Turn(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from", default="")


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_jsonl(path: Path, default_output_len: int) -> Iterator[dict[str, Any]]:
    """The fields of a Sample for each line that is not empty."""
    decoder = msgspec.json.Decoder(_Line)
    found = False
    for number, text in enumerate(_read(path).splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            fix = "see docs/guides/benchmarking.md for the fields"
            raise ConfigError(f"{path}, line {number}: {error}; {fix}") from error
        found = True
        yield _sample_fields(line, default_output_len, f"{path}, line {number}")
    if not found:
        raise ConfigError(f"{path} holds no prompts; each line is an object with a prompt or messages")


def _sample_fields(line: _Line, default_output_len: int, where: str) -> dict[str, Any]:
    output_len = default_output_len if line.output_len is None else line.output_len
    if output_len < 1:
        raise ConfigError(f"{where}: output_len is {output_len} but must be at least 1")
    fields: dict[str, Any] = {"output_len": output_len}
    token_ids = line.prompt if isinstance(line.prompt, list) else line.prompt_token_ids
    if line.messages:
        return fields | {"messages": line.messages}
    if token_ids:
        return fields | {"token_ids": token_ids, "prompt_len": len(token_ids)}
    if line.prompt:
        return fields | {"text": line.prompt}
    raise ConfigError(f"{where}: has neither a prompt nor prompt_token_ids nor messages")


def read_sharegpt(
    path: Path, encode: Callable[[str], Sequence[int]], max_total_len: int
) -> Iterator[tuple[str, int, int]]:
    """(first question, its tokens, the answer's tokens) of each conversation that has both and is not too long."""
    try:
        conversations = msgspec.json.decode(_read(path), type=list[_Conversation])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no ShareGPT file (a list of objects with conversations): {error}") from error
    found = False
    for conversation in conversations:
        if len(conversation.conversations) < 2:
            continue
        question, answer = (turn.value for turn in conversation.conversations[:2])
        prompt_len, output_len = len(encode(question)), len(encode(answer))
        if min(prompt_len, output_len) >= MIN_SHAREGPT_TOKENS and prompt_len + output_len <= max_total_len:
            found = True
            yield question, prompt_len, output_len
    if not found:
        raise ConfigError(
            f"{path} has no conversation of two turns with at least {MIN_SHAREGPT_TOKENS} tokens each and at most "
            f"{max_total_len} together; raise --max-total-len"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error}; check --dataset-path") from error
