"""`quire plan MODEL --machine NAME`: what clients would see of a load, by the real scheduler in virtual time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.config.groups import DEFAULT_MODEL
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.replay.workload import Arrivals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help=f"default: that of the file, or {DEFAULT_MODEL}")
    add(
        "--machine",
        required=True,
        metavar="NAME",
        help="a cost table of the package, or a file of `quire bench steps`",
    )
    load = parser.add_argument_group("load", "The requests of a trace, or made-up ones.").add_argument
    load(
        "--trace", metavar="FILE", type=Path, help="requests, lengths and arrivals of a trace; a redacted one will do"
    )
    load("--num-prompts", type=int, default=1000, metavar="N", help="default %(default)s")
    load("--input-len", type=int, default=128, metavar="N", help="tokens per prompt; default %(default)s")
    load("--output-len", type=int, default=64, metavar="N", help="tokens per answer; default %(default)s")
    load("--range-ratio", type=float, default=0.0, metavar="X", help="lengths vary by this part; default 0")
    load("--prefix-len", type=int, default=0, metavar="N", help="tokens that prompts share; default 0")
    load("--num-prefixes", type=int, default=1, metavar="N", help="different shared beginnings; default 1")
    load("--request-rate", type=float, default=inf, metavar="X", help="requests a second; default: all at once")
    load("--max-concurrency", type=int, metavar="N", help="most requests at once; default: no limit")
    load("--seed", type=int, default=0, metavar="N", help="of lengths and arrivals; default 0")
    tried = parser.add_argument_group("settings", "What is changed, and what is compared.").add_argument
    tried("--set", action="append", default=[], metavar="NAME=VALUE", help="another value of a setting")
    tried("--try", dest="tried", action="append", default=[], metavar="NAME=V1,V2", help="values to compare")
    tried("--best", default="throughput", metavar="WHAT", help="throughput, ttft, itl or e2e; default %(default)s")
    tried("--price-per-hour", type=float, metavar="X", help="of the machine, for the cost of a million tokens")
    add("--picture", metavar="FILE", type=Path, help="write an SVG there")
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    from quire.replay.capacity import OBJECTIVES, best_of, measure, variants, with_settings
    from quire.replay.costs import find_table

    if args.best not in OBJECTIVES:
        raise ConfigError(f"--best is {args.best!r} but must be one of {', '.join(OBJECTIVES)}")
    if args.price_per_hour is not None and not 0 <= args.price_per_hour < inf:
        raise ConfigError(f"--price-per-hour is {args.price_per_hour:g} but must be at least 0")
    if args.picture is not None:
        from quire.bench.report import check_writable

        check_writable("--picture", args.picture)
    table = find_table(args.machine, args.model or DEFAULT_MODEL)
    if args.model not in (None, table.model):
        raise ConfigError(
            f"{args.machine} is a cost table of {table.model!r}, not of {args.model!r}; measure that with"
            f" `quire bench steps {args.model} --table FILE`, or leave the model out"
        )
    setup = with_settings(table.setup, {name: value[0] for name, value in _settings(args.set, "--set").items()})
    arrivals, concurrency = _load(args)
    results = [
        measure(
            tried,
            table,
            arrivals(),
            max_concurrency=concurrency,
            price_per_hour=args.price_per_hour,
            settings=chosen,
        )
        for chosen, tried in variants(setup, _settings(args.tried, "--try"))
    ]
    title = f"{table.model} on {table.machine}"
    if args.picture is not None:
        from quire.replay.pictures import capacity_picture

        args.picture.write_text(capacity_picture(results, f"Planned: {title}", _subtitle(args)))
        print(f"wrote {args.picture}", file=sys.stderr)
    if args.json:
        print(json.dumps([msgspec.to_builtins(result) for result in results], indent=2))
        return 0
    from quire.bench.tables import print_grids
    from quire.replay.pictures import capacity_grid

    print_grids(f"{title}: {_subtitle(args)}", [capacity_grid(results)])
    if (refused := next((result for result in results if result.refused), None)) is not None:
        print(f"{refused.refused} of {refused.refused + refused.completed} requests are refused: {refused.refusal}")
    if len(results) > 1:
        print(best_of(results, OBJECTIVES[args.best]))
    return 0


def _load(args: argparse.Namespace) -> tuple[Callable[[], Arrivals], int | None]:
    from quire.replay.workload import Workload, trace_arrivals

    if args.trace is not None:
        from quire.replay.trace import Trace

        for field in fields(Workload):
            if getattr(args, field.name) != field.default:
                flag = field.name.replace("_", "-")
                raise ConfigError(f"--{flag} is of a made-up load, and --trace has its own requests; leave one out")
        trace = Trace(args.trace)
        return lambda: trace_arrivals(trace), None
    workload = Workload(**{field.name: getattr(args, field.name) for field in fields(Workload)})
    return workload.arrivals, workload.max_concurrency


def _settings(texts: list[str], flag: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        try:
            found[name.strip().replace("-", "_")] = [float(value) for value in values.split(",")]
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"{flag} is {text!r} but must be NAME=NUMBER, such as max_num_batched_tokens=1024")
    return found


def _subtitle(args: argparse.Namespace) -> str:
    if args.trace is not None:
        return f"the requests of {args.trace.name}"
    rate = "all at once" if args.request_rate == inf else f"{args.request_rate:g} a second"
    most = "" if args.max_concurrency is None else f", at most {args.max_concurrency} at a time"
    return f"{args.num_prompts} requests ({args.input_len} in, {args.output_len} out), {rate}{most}"
