"""`quire bench serve | sweep | latency | embed | throughput | steps | spec | moe | startup`: measurements."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.bench import flags
from quire.bench.options import EmbedOptions, LatencyOptions
from quire.bench.report import check_writable, environment, write_report
from quire.cli.embed import DEFAULT_EMBEDDER
from quire.cli.parser import Parser
from quire.config.args import add_engine_arguments, engine_config_from, engine_settings_from
from quire.config.groups import DEFAULT_MODEL
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.tables import Grid

SWEEP_FOLDER = "bench-results"
_CLIENT_PACKAGES = ("quire", "aiohttp")
_ENGINE_PACKAGES = ("quire", "torch")


def add_arguments(parser: Parser) -> None:
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    for name, (summary, add, run_kind) in KINDS.items():
        kind = kinds.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        # Absent, it leaves alone what stands before KIND.
        kind.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        add(kind)
        kind.shorten_help()
        kind.set_defaults(run_kind=run_kind)


def run(args: argparse.Namespace) -> int:
    for name in ("output_dir", "table"):
        if (path := vars(args).get(name)) is not None:
            check_writable(f"--{name.replace('_', '-')}", Path(path))
    code: int = args.run_kind(args)
    return code


def _add_serve(parser: argparse.ArgumentParser) -> None:
    flags.add_target_flags(parser)
    flags.add_data_flags(parser)
    flags.add_load_flags(parser)
    flags.add_output_flags(parser, "serve")


def _run_serve(args: argparse.Namespace) -> int:
    options = flags.serve_options(args)
    from quire.bench.output import plain_record, save_run
    from quire.bench.serve import bench_serve
    from quire.bench.tables import summary_grids

    found = environment(*_CLIENT_PACKAGES, secrets=[args.api_key or ""])
    result = bench_serve(options)
    settings = {**options.describe(), "served_model": result.model}
    if args.output_dir is not None:
        folder = args.output_dir / args.experiment_name
        _tell(save_run(folder, "serve", found, settings, result.summary, result.records))
    results = {"summary": result.summary.to_dict(), "requests": [plain_record(record) for record in result.records]}
    title = f"{result.model} at {options.target.base_url}"
    _show(args, title, summary_grids(result.summary), found, settings, results)
    return 0


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    flags.add_target_flags(parser)
    flags.add_data_flags(parser)
    flags.add_load_flags(parser, swept=True)
    flags.add_output_flags(parser, "sweep", SWEEP_FOLDER)
    parser.add_argument("--resume", action="store_true", help="keep the points that the experiment has already")


def _run_sweep(args: argparse.Namespace) -> int:
    options = flags.serve_options(args)
    from quire.bench.sweep import Point, run_sweep

    points = [Point("request rate", rate) for rate in args.request_rates or ()]
    points += [Point("concurrency", number) for number in args.concurrencies or ()]
    for point in points:
        point.apply(options)  # refuse a bad point before the first one is measured
    found = environment(*_CLIENT_PACKAGES, secrets=[args.api_key or ""])
    folder = args.output_dir / args.experiment_name
    result = run_sweep(options, points, folder, found, resume=args.resume, say=_say)
    _tell(result.paths)
    summaries = {label: summary.to_dict() for label, summary in result.summaries.items()}
    _show(args, f"{args.experiment_name} at {options.target.base_url}", [result.grid], found, {}, summaries)
    return 0


def _add_latency(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch-size", type=int, default=1, metavar="N", help="prompts in the batch; default %(default)s")
    add("--input-len", type=int, default=128, metavar="N", help="tokens per prompt; default %(default)s")
    add("--output-len", type=int, default=64, metavar="N", help="tokens per answer; default %(default)s")
    add("--repeats", type=int, default=5, metavar="N", help="default %(default)s")
    add("--warmup", type=int, default=1, metavar="N", help="repeats before, uncounted; default %(default)s")
    flags.add_output_flags(parser, "latency")
    add_engine_arguments(parser)


def _run_latency(args: argparse.Namespace) -> int:
    settings = engine_settings_from(args)
    shape = {field.name: getattr(args, field.name) for field in fields(LatencyOptions)}
    options = LatencyOptions(**shape)
    from quire import LLM
    from quire.bench.offline import bench_latency
    from quire.bench.tables import latency_grids

    with LLM(**settings) as llm:
        summary = bench_latency(llm, options, seed=settings.get("seed", 0))
    title = f"{args.batch_size} x ({args.input_len} in, {args.output_len} out), {args.repeats} times"
    _finish(args, "latency", title, latency_grids(summary), {**shape, "engine": settings}, summary.to_dict())
    return 0


def _add_embed(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch-size", type=int, default=32, metavar="N", help="texts in the batch; default %(default)s")
    add("--input-len", type=int, default=128, metavar="N", help="tokens per text; default %(default)s")
    add("--repeats", type=int, default=5, metavar="N", help="default %(default)s")
    add("--warmup", type=int, default=1, metavar="N", help="repeats before, uncounted; default %(default)s")
    flags.add_output_flags(parser, "embed")
    add_engine_arguments(parser, model=DEFAULT_EMBEDDER)


def _run_embed(args: argparse.Namespace) -> int:
    settings = {"model": DEFAULT_EMBEDDER, **engine_settings_from(args)}
    shape = {name: getattr(args, name) for name in ("batch_size", "input_len", "repeats", "warmup")}
    options = EmbedOptions(**shape)
    from quire import LLM
    from quire.bench.embed import bench_embed
    from quire.bench.tables import embed_grids

    with LLM(**settings) as llm:
        summary = bench_embed(llm, options, seed=settings.get("seed", 0))
    title = f"{args.batch_size} x {args.input_len} tokens, {args.repeats} times"
    _finish(args, "embed", title, embed_grids(summary), {**shape, "engine": settings}, summary.to_dict())
    return 0


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    flags.add_data_flags(parser, with_tokenizer=False)
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="prompts to run before; default %(default)s"
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="make answers as long as asked; default: on, and off for prompts from files",
    )
    flags.add_output_flags(parser, "throughput")
    add_engine_arguments(parser, without={"seed"})


def _run_throughput(args: argparse.Namespace) -> int:
    engine = engine_settings_from(args)
    data = flags.data_options(args, tokenizer=engine.get("tokenizer") or engine.get("model", DEFAULT_MODEL))
    if args.warmup < 0:
        raise ConfigError(f"--warmup is {args.warmup} but must be at least 0")
    from quire import LLM
    from quire.bench.offline import bench_throughput
    from quire.bench.output import save_run
    from quire.bench.tables import summary_grids

    ignore_eos = not data.from_file if args.ignore_eos is None else args.ignore_eos
    with LLM(**engine) as llm:
        result = bench_throughput(llm, data, warmup=args.warmup, ignore_eos=ignore_eos)
    found = environment(*_ENGINE_PACKAGES)
    settings = {"data": data.describe(), "warmup": args.warmup, "ignore_eos": ignore_eos, "engine": engine}
    if args.output_dir is not None:
        folder = args.output_dir / args.experiment_name
        _tell(save_run(folder, "throughput", found, settings, result.summary, result.records))
    grids = summary_grids(result.summary)
    _show(args, "offline throughput", grids, found, settings, {"summary": result.summary.to_dict()})
    return 0


def _add_startup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="fresh processes; default %(default)s")
    flags.add_output_flags(parser, "startup")
    add_engine_arguments(parser)


def _run_startup(args: argparse.Namespace) -> int:
    settings = engine_settings_from(args)
    from quire.bench.startup import bench_startup
    from quire.bench.tables import startup_grids
    from quire.engine.settings import check_settings

    check_settings(engine_config_from(args))
    summary = bench_startup(settings, args.repeats)
    title = f"fresh processes, one after the other: {args.repeats}"
    _finish(args, "startup", title, startup_grids(summary), {"engine": settings}, summary.to_dict())
    return 0


def _add_moe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--experts", type=int, default=32, metavar="N", help="of the layer; default %(default)s")
    add("--width", type=int, default=512, metavar="N", help="of an expert; default %(default)s")
    add("--hidden-size", dest="hidden", type=int, default=1024, metavar="N", help="default %(default)s")
    add("--top-k", type=int, default=8, metavar="N", help="experts of a token; default %(default)s")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="on a GPU; default %(default)s")
    add("--repeats", type=int, default=20, metavar="N", help="of each point; default %(default)s")
    flags.add_output_flags(parser, "moe")


def _run_moe(args: argparse.Namespace) -> int:
    from quire.bench.moe import MoeOptions, bench_moe

    shape = {field.name: getattr(args, field.name) for field in fields(MoeOptions)}
    grids, results = bench_moe(MoeOptions(**shape))
    title = f"ms of {args.experts} experts of width {args.width}, {args.top_k} a token, hidden size {args.hidden}"
    _finish(args, "moe", title, grids, shape, results)
    return 0


def _add_spec(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch-sizes", nargs="+", type=int, default=[1, 4, 16], metavar="N", help="default 1 4 16")
    add(
        "--acceptances",
        nargs="+",
        type=float,
        default=[0.0, 0.5, 0.8, 0.9, 1.0],
        metavar="X",
        help="shares of predicted tokens that are right; default 0 0.5 0.8 0.9 1",
    )
    add("--input-len", type=int, default=32, metavar="N", help="tokens per prompt; default %(default)s")
    add("--output-len", type=int, default=256, metavar="N", help="tokens per answer; default %(default)s")
    add("--repeats", type=int, default=3, metavar="N", help="of each point; default %(default)s")
    flags.add_output_flags(parser, "spec")
    add_engine_arguments(parser)


def _run_spec(args: argparse.Namespace) -> int:
    from quire.bench.spec import SpecOptions, bench_spec, spec_chart, spec_grids

    settings = engine_settings_from(args)
    shape = {field.name: getattr(args, field.name) for field in fields(SpecOptions)}
    options = SpecOptions(**shape)
    speculative = engine_config_from(args).speculation.speculative_config
    if speculative is not None and speculative.method == "none":
        raise ConfigError("speculative_config: method is none, so nothing would be measured; leave it out")
    from quire import LLM
    from quire.bench.output import save_page

    with LLM(**settings) as llm:
        points = bench_spec(llm, options, seed=settings.get("seed", 0), say=_say)
    title = f"drafts: {args.input_len} tokens in, {args.output_len} out, {args.repeats} times"
    if args.output_dir is not None:
        picture = spec_chart(points, "Speed-up by draft tokens", title)
        folder = args.output_dir / args.experiment_name
        _tell(save_page(folder, "spec", spec_grids(points), {"speedup": picture}, environment(*_ENGINE_PACKAGES)))
    results = {"points": [point.to_dict() for point in points]}
    _finish(args, "spec", title, spec_grids(points), {**shape, "engine": settings}, results)
    return 0


def _finish(
    args: argparse.Namespace,
    name: str,
    title: str,
    grids: Sequence[Grid],
    settings: dict[str, Any],
    results: dict[str, Any],
) -> None:
    """Write and show the report of a measurement that has no pictures."""
    found = environment(*_ENGINE_PACKAGES)
    if args.output_dir is not None:
        path = args.output_dir / args.experiment_name / f"{name}.json"
        _tell([write_report(path, found, results, settings=settings)])
    _show(args, title, grids, found, settings, results)


def _show(
    args: argparse.Namespace,
    title: str,
    grids: Sequence[Grid],
    found: dict[str, Any],
    settings: dict[str, Any],
    results: dict[str, Any],
) -> None:
    if args.json:
        print(json.dumps({"environment": found, "settings": settings, "results": results}, indent=2))
        return
    from quire.bench.tables import print_grids

    print_grids(title, grids)


def _tell(paths: Sequence[Path]) -> None:
    _say("\n".join(f"wrote {path}" for path in paths))


def _say(text: str) -> None:
    """Everything but the result goes to stderr, so that a pipe gets the result alone."""
    print(text, file=sys.stderr)


def _add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", metavar="NAME", help="what to call this machine; default: its processor or GPU")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the cost table there, for `quire plan`")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument(
        "--seconds",
        type=float,
        default=90.0,
        help="about how long to measure, at least one round; default: %(default)g",
    )
    add_engine_arguments(parser)


def _run_steps(args: argparse.Namespace) -> int:
    config = engine_config_from(args)
    from quire.replay.step_bench import StepBench

    found = environment(*_ENGINE_PACKAGES)
    bench = StepBench(config, _say)
    machine = args.machine or bench.machine_name(found["machine"])
    table = bench.table(machine, config.model.model, found, args.seconds)
    bench.close()
    text = msgspec.json.format(msgspec.json.encode(table)) + b"\n"
    if args.table is not None:
        args.table.parent.mkdir(parents=True, exist_ok=True)
        args.table.write_bytes(text)
        _tell([args.table])
    if args.json:
        sys.stdout.write(text.decode())
        return 0
    from quire.bench.tables import Grid, print_grids

    decode = Grid(["decode rows", "ms"], [(str(rows), f"{1000 * s:.2f}") for rows, s in table.decode])
    prefill = Grid(["prompt tokens", "ms"], [(str(tokens), f"{1000 * s:.2f}") for tokens, s in table.prefill])
    print_grids(f"steps of {table.model} on {table.machine}", [decode, prefill])
    return 0


Kind = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]

KINDS: dict[str, Kind] = {
    "serve": ("what users of a server see: latencies and throughput under a load", _add_serve, _run_serve),
    "sweep": ("bench serve over several loads, with the latency-throughput curve", _add_sweep, _run_sweep),
    "latency": ("how long one batch takes, without a server", _add_latency, _run_latency),
    "embed": ("how fast the engine embeds a batch of texts, without a server", _add_embed, _run_embed),
    "throughput": ("how fast the engine works off many prompts, without a server", _add_throughput, _run_throughput),
    "steps": (
        "how long steps take, by rows, tokens and context: a cost table for `quire plan`",
        _add_steps,
        _run_steps,
    ),
    "spec": ("how much faster draft tokens make the engine, by batch size and acceptance", _add_spec, _run_spec),
    "moe": ("how long the experts of one layer take; on a GPU, finds the fastest tiles", _add_moe, _run_moe),
    "startup": ("how long a fresh process takes until its first token", _add_startup, _run_startup),
}
