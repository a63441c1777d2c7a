"""Flags come from the settings' fields: any value of any field survives the way through the command line."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import args, env
from quire.config.args import Setting
from quire.config.engine import EngineConfig
from quire.types.errors import ConfigError, RequestError
from quire.types.sampling import SamplingParams

ENGINE_SETTINGS = [setting for group in args.engine_settings().values() for setting in group]
SAMPLING_SETTINGS = [s for s in args.sampling_settings() if s.name not in args.NOT_ON_THE_COMMAND_LINE]


def engine_parser(**options: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    args.add_engine_arguments(parser, **options)
    return parser


def sampling_parser(**defaults: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    args.add_sampling_arguments(parser, defaults)
    return parser


def values_of(setting: Setting) -> st.SearchStrategy[Any]:
    kind = setting.type
    if setting.name == "structured_outputs":
        return st.sampled_from([{"regex": "a+"}, {"choice": ["a", "b"]}])
    if setting.name == "repetition_detection":
        return st.builds(lambda size: {"max_pattern_size": size, "min_count": 2}, st.integers(1, 9))
    if setting.name == "speculative_config":
        return st.builds(lambda most: {"method": "ngram", "num_speculative_tokens": most}, st.integers(1, 64))
    if setting.name == "system_date":
        return st.dates().map(str)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    # A value that begins with a dash needs --flag=value, which is how `as_flags` writes it.
    simple = {
        bool: st.booleans(),
        int: st.integers(1, 10**6),
        float: st.floats(0.125, 1.0),
        str: st.text(min_size=1, max_size=8),
    }
    if kind in simple:
        return simple[kind]
    if get_origin(kind) is tuple:
        return st.lists(values_of(Setting("", get_args(kind)[0], None, "")), min_size=1, max_size=3)
    return st.dictionaries(st.integers(0, 99), st.floats(-1, 1), max_size=3)


def as_flags(setting: Setting, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [setting.flag if value else setting.flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [f"{setting.flag}={item}" for item in value]
    return [f"{setting.flag}={json.dumps(value) if isinstance(value, dict) else value}"]


# Numbers that not every machine or model takes, and those that others must fit.
FIXED = {
    **dict.fromkeys(("block_size", "num_threads"), st.just(32)),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), st.just(1)),
    **dict.fromkeys(("tp_exact", "enable_expert_parallel", "elastic"), st.just(False)),
    "parallel": st.just("manual"),
    "enable_eplb": st.just(False),
    "all2all_backend": st.just("all_reduce"),
    "num_redundant_experts": st.just(0),
    "decode_context_parallel_size": st.just(1),
    "sequence_parallel_threshold": st.just(0),
    "executor": st.sampled_from(["auto", "inproc", "multiproc"]),
    "join_timeout": st.sampled_from([0.5, 60.0]),
    "lora_slots": st.sampled_from(["16x6", "8x1,64x2"]),
}


@given(st.data())
def test_any_engine_settings_round_trip(data: st.DataObject) -> None:
    settings = {
        s.name: data.draw(FIXED.get(s.name, values_of(s))) for s in ENGINE_SETTINGS if data.draw(st.booleans())
    }
    if "max_num_seqs" in settings and "max_num_batched_tokens" in settings:
        settings["max_num_batched_tokens"] = max(settings["max_num_seqs"], settings["max_num_batched_tokens"])
    if "hosts_address" in settings:
        settings |= {"executor": "hosts", "hosts_address": "127.0.0.1:0"}
    by_name = {s.name: s for s in ENGINE_SETTINGS}
    flags = [flag for name, value in settings.items() for flag in as_flags(by_name[name], value)]
    namespace = engine_parser().parse_args(flags)
    assert args.engine_settings_from(namespace) == settings
    assert args.engine_config_from(namespace) == EngineConfig.from_flat(**settings)


@given(st.data())
def test_any_sampling_parameters_round_trip(data: st.DataObject) -> None:
    chosen = [s for s in SAMPLING_SETTINGS if s.name != "min_tokens" and data.draw(st.booleans())]
    values = {s.name: data.draw(values_of(s)) for s in chosen}
    if any(not word.strip() for word in values.get("bad_words", ())):
        values.pop("bad_words")
    flags = [flag for s in chosen if s.name in values for flag in as_flags(s, values[s.name])]
    namespace = sampling_parser().parse_args(flags)
    assert args.sampling_params_from(namespace) == msgspec.convert(values, SamplingParams)


def test_no_flags_give_the_defaults() -> None:
    assert args.engine_config_from(engine_parser().parse_args([])) == EngineConfig()
    assert args.sampling_params_from(sampling_parser().parse_args([])) == SamplingParams()


def test_a_commands_own_defaults_yield_to_flags_and_are_shown() -> None:
    parser = sampling_parser(temperature=0.25, max_tokens=None)
    assert args.sampling_params_from(parser.parse_args([]), temperature=0.25).temperature == 0.25
    given_flag = parser.parse_args(["--temperature", "1"])
    assert args.sampling_params_from(given_flag, temperature=0.25).temperature == 1.0
    assert "Default: 0.25." in parser.format_help()


def test_defaults_are_shown_as_they_would_be_written() -> None:
    parser = argparse.ArgumentParser()
    args.add_server_arguments(parser)
    text = " ".join(parser.format_help().split())
    assert "Largest request body. Default: 16MiB." in text
    assert "Default: ." not in text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1000000", 10**6),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("2GiB", 2 << 30),
        ("2 GB", 2 * 10**9),
        ("1.5g", 3 << 29),
        ("7B", 7),
        ("1T", 1 << 40),
    ],
)
def test_byte_counts(text: str, count: int) -> None:
    namespace = engine_parser().parse_args(["--kv-cache-memory", text])
    assert args.engine_config_from(namespace).cache.kv_cache_memory == count


@pytest.mark.parametrize("text", ["", "GiB", "2XiB", "-1", "1e9", "2 2"])
def test_a_bad_byte_count_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=r"is no byte count; write it like 512MiB"):
        engine_parser().parse_args([f"--kv-cache-memory={text}"])


def test_the_model_may_be_positional_or_a_flag() -> None:
    parser = engine_parser()
    assert args.engine_settings_from(parser.parse_args(["a.gguf"])) == {"model": "a.gguf"}
    assert args.engine_settings_from(parser.parse_args(["--model", "a.gguf"])) == {"model": "a.gguf"}
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        engine_parser(positional=False).parse_args(["a.gguf"])


def test_engine_and_sampling_flags_live_together() -> None:
    parser = argparse.ArgumentParser()
    args.add_sampling_arguments(parser, {})
    args.add_engine_arguments(parser, without={"seed"})
    namespace = parser.parse_args(["m", "--seed", "3", "--stop", "a", "--stop", "b", "--no-enable-prefix-caching"])
    assert args.sampling_params_from(namespace).seed == 3
    assert args.sampling_params_from(namespace).stop == ("a", "b")
    assert args.engine_settings_from(namespace) == {"model": "m", "enable_prefix_caching": False}


def test_wrong_values_are_typed_errors() -> None:
    with pytest.raises(ConfigError, match="block_size is 7"):
        args.engine_config_from(engine_parser().parse_args(["--block-size", "7"]))
    with pytest.raises(RequestError, match="top_p is 2"):
        args.sampling_params_from(sampling_parser().parse_args(["--top-p", "2"]))
    with pytest.raises(argparse.ArgumentError, match="not the JSON expected"):
        sampling_parser().parse_args(["--logit-bias", "[1]"])


def test_choices_are_those_of_the_type() -> None:
    with pytest.raises(argparse.ArgumentError, match=r"invalid choice: 'int3'.*bfloat16"):
        engine_parser().parse_args(["--dtype", "int3"])


@pytest.mark.parametrize("setting", ENGINE_SETTINGS + args.sampling_settings(), ids=lambda s: s.name)
def test_every_setting_explains_itself(setting: Setting) -> None:
    assert setting.help.endswith(".")


def test_the_page_has_every_setting_and_variable() -> None:
    page = args.reference_markdown()
    for setting in ENGINE_SETTINGS + SAMPLING_SETTINGS:
        assert f"| `{setting.flag}` |" in page
    for name in asdict(EngineConfig()):
        assert f"## {name.capitalize()}\n" in page
    with open(env.__file__, encoding="utf-8") as source:
        variables = re.findall(r"\"(QUIRE_[A-Z_]+)\"", source.read())
    assert variables
    for variable in variables:
        assert f"`{variable}`" in page
