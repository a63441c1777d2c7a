"""EngineConfig: flat settings find their group, and a wrong one is named before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.groups import SpeculativeConfig
from quire.types.errors import ConfigError


def test_settings_find_their_groups() -> None:
    config = EngineConfig.from_flat(model="m", block_size=32, max_num_seqs=3, num_threads=2, policy="priority")
    assert (config.model.model, config.cache.block_size) == ("m", 32)
    assert (config.scheduler.max_num_seqs, config.scheduler.policy) == (3, "priority")
    assert config.device.num_threads == 2
    assert EngineConfig.from_flat() == EngineConfig()


def test_a_path_is_as_good_as_its_text() -> None:
    assert EngineConfig.from_flat(model=Path("/a/model")).model.model == "/a/model"


def test_a_size_may_be_written_as_on_the_command_line() -> None:
    assert EngineConfig.from_flat(kv_cache_memory="512MiB").cache.kv_cache_memory == 512 << 20
    config = EngineConfig.from_flat(structured_outputs_max_bytes="2KB")
    assert config.structured.structured_outputs_max_bytes == 2000
    with pytest.raises(ConfigError, match=r"^kv_cache_memory: '2 parsecs' is no byte count; write it like 512MiB"):
        EngineConfig.from_flat(kv_cache_memory="2 parsecs")


def test_an_unknown_setting_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'max_len'; known: .*max_model_len") as info:
        EngineConfig.from_flat(max_len=3, zzz=1)
    assert "zzz" not in str(info.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_model_len", 0, "at least 1"),
        ("max_num_seqs", -1, "at least 1"),
        ("max_num_batched_tokens", 0, "at least 1"),
        ("long_prefill_token_threshold", 0, "at least 1"),
        ("kv_cache_memory", 0, "at least 1"),
        ("steps_in_flight", 0, "at least 1"),
        ("num_threads", 0, "at least 1"),
        ("num_threads", 1025, "at most 1024"),
        ("block_size", 0, "at least 1"),
        ("block_size", 24, "a power of two up to 128"),
        ("block_size", 256, "a power of two up to 128"),
        ("max_model_len", "2k", "int or None"),
        ("max_model_len", 20.5, "int or None"),
        ("kv_cache_memory", 1.5, "int or None"),
        ("enable_prefix_caching", "no", "bool"),
        ("model", None, "str"),
        ("model", "", "a folder, a .gguf file, a hub id or a built-in alias"),
        ("dtype", "float64", "one of 'auto', 'float32', 'bfloat16', 'float16'"),
        ("load_format", "pickle", "one of 'auto', 'safetensors', 'gguf', 'dummy'"),
        ("policy", "lifo", "one of 'fcfs', 'priority'"),
        ("device", "abacus", "one of 'auto', 'cpu'"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {value!r} but must be {expected}"):
        EngineConfig.from_flat(**{name: value})


def test_a_date_that_is_none_is_refused_by_the_name_it_was_given_under(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("tomorrow", "2026-02-30", "31 Jan 2026", ""):
        with pytest.raises(ConfigError, match=r"system_date is .* but must be a date such as"):
            EngineConfig.from_flat(system_date=text)
    monkeypatch.setenv("QUIRE_SYSTEM_DATE", "soon")
    with pytest.raises(ConfigError, match="QUIRE_SYSTEM_DATE is 'soon'"):
        EngineConfig.from_flat()


def test_speculation_is_a_dict_of_its_own() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    config = EngineConfig.from_flat(speculative_config=given).speculation.speculative_config
    assert config == SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3)
    assert EngineConfig.from_flat(speculative_config=config).speculation.speculative_config == config
    assert EngineConfig.from_flat(speculative_config=None).speculation.speculative_config is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ngram", "must be a dict such as"),
        ({}, "method is None but must be one of .*ngram.*suffix"),
        ({"method": "magic"}, "method is 'magic' but must be one of .*ngram.*suffix"),
        ({"method": "ngram", "tokens": 3}, "unknown field 'tokens'; known: method, num_speculative_tokens"),
        (
            {"method": "ngram", "suffix_decoding_max_tree_depth": 3},
            "ngram does not read suffix_decoding_max_tree_depth",
        ),
        ({"method": ["ngram"]}, r"method is \['ngram'\] but must be one of .*ngram.*suffix"),
        ({"method": {"ngram": 4}}, "method is {'ngram': 4} but must be one of .*ngram.*suffix"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "num_speculative_tokens is '4' but must be int or None"),
        ({"method": "ngram", "num_speculative_tokens": 4.5}, "num_speculative_tokens is 4.5 but must be int or None"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": "x"}, "token_prob is 'x' but must be float"),
        ({"method": "eagle", "model": 3}, "model is 3 but must be str or None"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0 but must be at least 1"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "at most 64"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min is 4"),
        ({"method": "ngram", "prompt_lookup_min": 10**9}, "prompt_lookup_min is 1000000000 but must be at most 64"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "from 0 to 1"),
    ],
)
def test_a_wrong_speculative_config_is_named(given: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        EngineConfig.from_flat(speculative_config=given)
