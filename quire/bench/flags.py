"""The flags that the benchmarks share, and the options they become. Imports nothing heavy: --help needs it."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import msgspec

from quire.bench.options import (
    Arrival,
    DataOptions,
    DatasetName,
    Endpoint,
    LoadOptions,
    ServeOptions,
    TargetOptions,
    parse_goodput,
)
from quire.config.groups import DEFAULT_MODEL
from quire.types.errors import ConfigError


def add_data_flags(parser: argparse.ArgumentParser, *, with_tokenizer: bool = True) -> None:
    section = parser.add_argument_group("prompts", "What is asked, and how long the answers are.")
    add = section.add_argument
    add("--dataset-name", choices=get_args(DatasetName), default="random", help="where prompts come from")
    add("--dataset-path", type=Path, metavar="FILE", help="for jsonl and sharegpt")
    add("--num-prompts", type=int, metavar="N", help="requests to send; default 100, or all of the file")
    add("--input-len", type=int, default=128, metavar="N", help="tokens per prompt; default %(default)s")
    add("--output-len", type=int, default=64, metavar="N", help="tokens per answer; default %(default)s")
    add(
        "--range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="lengths vary evenly between 1 - X and 1 + X of these; default 0",
    )
    add("--num-prefixes", type=int, default=4, metavar="N", help="shared-prefix: how many; default %(default)s")
    add(
        "--prefix-len",
        type=int,
        default=96,
        metavar="N",
        help="shared-prefix: tokens of --input-len that are shared; default %(default)s",
    )
    add(
        "--max-total-len",
        type=int,
        default=2048,
        metavar="N",
        help="sharegpt: leave out longer conversations; default %(default)s tokens",
    )
    add("--token-ids", action="store_true", help="send prompts as token ids, not as text")
    if with_tokenizer:
        add(
            "--tokenizer",
            default=DEFAULT_MODEL,
            metavar="NAME",
            help="counts the tokens of prompts: a folder, .gguf file, hub id or alias; default %(default)s",
        )
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals; default %(default)s")


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("server", "Any OpenAI-compatible one.")
    add = section.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default %(default)s")
    add("--endpoint", choices=get_args(Endpoint), default="completions", help="default %(default)s")
    add("--model", metavar="NAME", help="default: the first that the server lists")
    add("--api-key", metavar="KEY", help="sent as a bearer token; never written to a report")
    add("--temperature", type=float, default=0.0, metavar="X", help="default %(default)g")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="make answers as long as asked; default: on, and off for prompts from files",
    )
    add("--extra-body", default="{}", metavar="JSON", help="more fields for every request")
    add("--request-timeout", type=float, default=600.0, metavar="SECONDS", help="default %(default)g")
    add(
        "--ready-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait this long for the server to answer; default %(default)g",
    )


def add_load_flags(parser: argparse.ArgumentParser, *, swept: bool = False) -> None:
    section = parser.add_argument_group("load", "When requests are sent.")
    add = section.add_argument
    add(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="X",
        help="requests per second; inf (the default) sends as fast as the concurrency allows",
    )
    add("--arrival", choices=get_args(Arrival), default="poisson", help="of a rate; default %(default)s")
    add("--max-concurrency", type=int, metavar="N", help="most requests in flight; default: no limit")
    add(
        "--ramp",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="let the rate, or without one the concurrency, grow from zero over this time",
    )
    add("--warmup", type=int, default=0, metavar="N", help="requests to send before, uncounted; default 0")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="count requests within limits, e.g. ttft:200 tpot:50 e2e:3000",
    )
    if swept:
        either = section.add_mutually_exclusive_group(required=True)
        either.add_argument("--request-rates", nargs="+", type=float, metavar="X", help="sweep over these")
        either.add_argument("--concurrencies", nargs="+", type=int, metavar="N", help="sweep over these")


def add_output_flags(parser: argparse.ArgumentParser, experiment: str, folder: str | None = None) -> None:
    section = parser.add_argument_group("output")
    section.add_argument("--json", action="store_true", help="print the report as JSON, not as a table")
    section.add_argument(
        "--output-dir",
        type=Path,
        default=folder,
        metavar="DIR",
        help=f"write report and pictures to DIR/EXPERIMENT; default: {folder or 'write nothing'}",
    )
    section.add_argument("--experiment-name", default=experiment, metavar="NAME", help="default %(default)s")


def data_options(args: argparse.Namespace, **fixed: Any) -> DataOptions:
    return DataOptions(**_values(DataOptions, args, fixed))


def serve_options(args: argparse.Namespace) -> ServeOptions:
    body = {"extra_body": _extra_body(args.extra_body)}
    return ServeOptions(
        data=data_options(args),
        target=TargetOptions(**_values(TargetOptions, args, body)),
        load=LoadOptions(**_values(LoadOptions, args, {})),
        goodput=parse_goodput(args.goodput),
    )


def _values(options: type[Any], args: argparse.Namespace, fixed: dict[str, Any]) -> dict[str, Any]:
    """A flag has the name of the field that it sets."""
    return {field.name: getattr(args, field.name) for field in fields(options) if field.name not in fixed} | fixed


def _extra_body(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-body {text!r} is no JSON object: {error}") from error
