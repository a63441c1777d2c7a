"""What adapter_config.json may say about ranks and alphas of modules; hostile patterns cost no time."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loader.adapter_files import PeftConfig, read_peft_config
from quire.loader.module_patterns import compile_pattern
from quire.types.errors import AdapterError

MODULE = "model.layers.11.self_attn.q_proj"


def write(folder: Path, **config: Any) -> Path:
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "pattern",
    [
        *("q_proj", "self_attn.q_proj", r"self_attn\.q_proj", "proj", "_proj", "v_proj", "model", MODULE, ".*", ""),
        *("(q|k)_proj", "q_proj|k_proj", r"layers\.(1|11)\..*", r"layers\.\d+\..*q_proj", r"^.*\.11\..*", "q_proj$"),
        *(r"layers\.[0-9]\..*", r"[^.]+", r"layers.*self_attn.*", r".*\.layers\.1[01]\.self_attn\.(q|v)_proj"),
    ],
)
def test_patterns_mean_what_peft_means_by_them(pattern: str) -> None:
    expected = re.match(rf"(.*\.)?({pattern})$", MODULE) is not None  # as PEFT has it
    assert PeftConfig("LORA", 4, 8.0, rank_pattern={pattern: 9}).rank(MODULE) == (9 if expected else 4)


@pytest.mark.parametrize("text", ["{", "[]", '{"peft_type": 3}', "\xff"])
def test_a_config_that_cannot_be_read_is_named_with_what_helps(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(
        AdapterError, match=r"adapter_config.json cannot be read: .*; save or download the adapter again"
    ):
        read_peft_config(tmp_path)


PIECES = st.sampled_from(
    [
        "m",
        "o",
        "d",
        ".",
        r"\.",
        "1",
        r"\d",
        "[a-m]",
        "[^.]",
        ".*",
        "1+",
        "o?",
        "(o|od)",
        "(?:el)?",
        "(|m)",
        "l|m",
        "^",
        "$",
    ]
)


@given(st.lists(PIECES, max_size=7).map("".join), st.text("mode.l1", max_size=8))
def test_any_pattern_means_what_peft_means_by_it(pattern: str, module: str) -> None:
    expected = re.match(rf"(.*\.)?({pattern})$", module) is not None
    assert compile_pattern(pattern)(module) == expected


@pytest.mark.parametrize(
    "pattern", ["(m|mo|mod)(.|.|..)" * 40 + "!", ".*" * 2000 + "!", ".?" * 2000 + "!", "(.*|.+)" * 500 + "!"]
)
def test_no_pattern_takes_long(tmp_path: Path, pattern: str) -> None:
    config = read_peft_config(write(tmp_path, rank_pattern={pattern: 9}))
    begin = time.thread_time()
    assert config.rank(MODULE) == 4
    assert time.thread_time() - begin < 0.5


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"(": 1}, "unbalanced"),
        ({"a)|(b": 1}, "unbalanced"),
        ({r"(a)\1": 1}, "cannot be used"),
        ({"(?=a)": 1}, "cannot be used"),
        ({"(a+)+": 1}, "cannot be used"),
        ({"a{99}": 1}, "cannot be used"),
        ({"(" * 3000: 1}, "more than 32 groups"),
        ({"[z-a]": 1}, "wrong class"),
        ({"a*" * 3000: 1}, "6000 characters"),
        ({f"layer{index}": 1 for index in range(5000)}, "5000 keys"),
        ({"a" * 300_000: 1}, "300000 characters"),
    ],
    ids=["open", "unbalanced", "reference", "look", "nested", "counted", "deep", "class", "complex", "many", "long"],
)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_are_refused(tmp_path: Path, field: str, patterns: dict[str, int], words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        read_peft_config(write(tmp_path, **{field: patterns}))
