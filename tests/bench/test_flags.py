"""Every flag reaches its option, and the defaults of flags and options agree."""

from __future__ import annotations

import argparse

import pytest

from quire.bench import flags
from quire.bench.options import ServeOptions
from quire.types.errors import ConfigError


def parse(*arguments: str) -> ServeOptions:
    parser = argparse.ArgumentParser()
    flags.add_target_flags(parser)
    flags.add_data_flags(parser)
    flags.add_load_flags(parser)
    return flags.serve_options(parser.parse_args(arguments))


def test_no_flags_are_the_defaults() -> None:
    assert parse() == ServeOptions()


def test_flags_become_options() -> None:
    options = parse(
        *("--base-url", "http://h:1", "--endpoint", "chat", "--model", "m", "--api-key", "k", "--no-ignore-eos"),
        *("--dataset-name", "shared-prefix", "--num-prefixes", "2", "--prefix-len", "8", "--input-len", "16"),
        *("--request-rate", "2.5", "--arrival", "constant", "--ramp", "3", "--max-concurrency", "9", "--warmup", "1"),
        *("--goodput", "ttft:200", "tpot:50", "--extra-body", '{"top_k": 3}', "--seed", "7"),
    )
    assert (options.target.endpoint, options.target.model, options.target.api_key) == ("chat", "m", "k")
    assert options.target.ignore_eos is False
    assert options.target.extra_body == {"top_k": 3}
    assert (options.data.num_prefixes, options.data.prefix_len, options.data.seed) == (2, 8, 7)
    assert (options.load.request_rate, options.load.ramp, options.load.max_concurrency) == (2.5, 3, 9)
    assert options.goodput == {"ttft": 200, "tpot": 50}


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_the_extra_body_is_an_object(text: str) -> None:
    with pytest.raises(ConfigError, match="--extra-body"):
        parse("--extra-body", text)
