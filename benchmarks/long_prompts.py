"""What long prompts do to running streams and short requests, in each performance mode, and what the bound costs.

    python benchmarks/long_prompts.py        # on a CPU: the default model, a stream, two prompts of 7,000 tokens
    python benchmarks/long_prompts.py --shape llama-8b --streams 16 --long-prompts 1 --long-tokens 100000

In each mode streams and short requests run alone first, then beside the long prompts. A time to first token counts
from when a request was due; HTTP is left out. `before` is the rule by tokens alone with today's default budget.
Writes JSON and, where both `before` and `balanced` ran, a picture. With --points FILE, one mode can run at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import SHAPES
from report import RESULTS, environment, write_results

from quire.bench.svg import Panel, Svg, linear_ticks, log_ticks
from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient, make_inproc_client
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

MODES: dict[str, dict[str, Any]] = {
    "before": {"performance_mode": "balanced", "step_time_target": 0.0},
    "throughput": {"performance_mode": "throughput"},
    "balanced": {"performance_mode": "balanced"},
    "interactivity": {"performance_mode": "interactivity"},
}
COLOURS = {"before": "orange", "balanced": "blue"}
SHORT_OUTPUTS = 4
WARM_UP = 3.0  # seconds


@dataclass
class Life:
    """What became of one request; seconds on the clock of the run."""

    kind: str
    due: float
    prompt_tokens: int
    times: list[float] = field(default_factory=list)  # of its tokens


class Load:
    """One engine, driven by its caller: requests go in between steps, as in a server's engine process."""

    def __init__(self, client: EngineClient, seed: int = 0) -> None:
        self.client = client
        self.random = random.Random(seed)
        self.lives: dict[str, Life] = {}
        self._begin = time.perf_counter()
        self._vocab_size = client.info.vocab_size

    @property
    def now(self) -> float:
        return time.perf_counter() - self._begin

    def add(self, kind: str, num_prompt_tokens: int, num_outputs: int, due: float | None = None) -> str:
        name = f"{kind}-{len(self.lives)}"
        self.lives[name] = Life(kind, self.now if due is None else due, num_prompt_tokens)
        params = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True, detokenize=False)
        token_ids = [self.random.randrange(10, self._vocab_size - 10) for _ in range(num_prompt_tokens)]
        self.client.add_request(
            EngineRequest(request_id=name, token_ids=token_ids, params=params, max_tokens=num_outputs)
        )
        return name

    def step(self) -> None:
        """One step, if there is work."""
        outputs = self.client.get_outputs()
        now = self.now
        for output in outputs.outputs:
            assert output.error is None, output.error
            self.lives[output.request_id].times += [now] * len(output.token_ids)

    def run_until(self, seconds: float, short_every: float, short_tokens: int, awaited: list[str]) -> None:
        """Short requests come at even times until `seconds` have passed and all of `awaited` have a first token."""
        begin = next_due = self.now
        while self.now < begin + seconds or not all(self.lives[name].times for name in awaited):
            while next_due <= self.now:
                self.add("short", short_tokens, SHORT_OUTPUTS, next_due)
                # Not quite even, so that arrivals do not fall in step with steps.
                next_due += short_every * self.random.uniform(0.7, 1.3)
            self.step()

    def finish(self) -> None:
        while self.client.has_unfinished():
            self.step()

    def within(self, kind: str, begin: float, end: float) -> list[Life]:
        return [life for life in self.lives.values() if life.kind == kind and begin <= life.due < end]

    def gaps(self, begin: float, end: float) -> list[tuple[float, float]]:
        """(time, seconds since the token before) of the streams' tokens."""
        pairs = [
            (later, later - time)
            for life in self.lives.values()
            if life.kind == "stream"
            for time, later in zip(life.times, life.times[1:], strict=False)
            if begin <= time and later <= end
        ]
        return sorted(pairs)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def summary(load: Load, begin: float, end: float) -> dict[str, Any]:
    gaps = [gap for _, gap in load.gaps(begin, end)]
    # Those that have not been answered yet have waited until now at least.
    ttfts = [(life.times[0] if life.times else load.now) - life.due for life in load.within("short", begin, end)]
    in_time = [life for life in load.lives.values() if life.times and begin <= life.times[0] <= end]
    outputs = sum(sum(begin <= time <= end for time in life.times) for life in load.lives.values())
    tokens = outputs + sum(life.prompt_tokens for life in in_time)
    return {
        "seconds": end - begin,
        "inter_token_ms": {name: 1e3 * percentile(gaps, share) for name, share in _SHARES.items()},
        "short_ttft_ms": {name: 1e3 * percentile(ttfts, share) for name, share in _SHARES.items()},
        "num_short": len(ttfts),
        "output_tokens": outputs,
        "tokens_per_s": tokens / (end - begin),
    }


_SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def make_client(args: argparse.Namespace, settings: dict[str, Any]) -> EngineClient:
    chosen: dict[str, Any] = {"enable_prefix_caching": False, **settings}
    if args.shape is not None:
        folder = Path(tempfile.mkdtemp())
        longest = args.long_tokens + 4096
        shared = {"max_position_embeddings": longest, "hidden_act": "silu", "eos_token_id": 2}
        (folder / "config.json").write_text(json.dumps({**shared, **SHAPES[args.shape]}))
        chosen |= {"model": str(folder), "load_format": "dummy", "max_model_len": longest}
    else:
        chosen["model"] = args.model
    return make_inproc_client(EngineConfig.from_flat(**chosen))


def measure(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    client = make_client(args, MODES[mode])
    load = Load(client)
    every, short = args.short_every, args.short_tokens
    # What is compiled, captured and learnt at first is no part of the figures: a long prompt beside everything else.
    outputs = client.info.max_model_len - args.stream_tokens
    streams = [load.add("warm-up", args.stream_tokens, outputs) for _ in range(args.streams)]
    load.run_until(WARM_UP, every, short, streams)
    if not args.no_warm_up:
        load.run_until(0.0, every, short, [load.add("warm-up", args.long_tokens, 1)])
    client.abort(streams)
    load.finish()
    streams = [load.add("stream", args.stream_tokens, outputs) for _ in range(args.streams)]
    load.run_until(1.0, every, short, streams)
    begin = load.now
    load.run_until(args.alone_seconds, every, short, [])
    alone = summary(load, begin, load.now)
    begin = load.now
    prompts = [load.add("long", args.long_tokens, SHORT_OUTPUTS) for _ in range(args.long_prompts)]
    load.run_until(0.0, every, short, prompts)
    end = load.now
    load.run_until(0.5, every, short, [])
    beside = summary(load, begin, end)
    beside["long_ttft_s"] = [load.lives[name].times[0] - begin for name in prompts]
    client.abort(list(load.lives))
    load.finish()
    client.shutdown()
    return {
        "alone": alone,
        "beside": beside,
        "gaps": [(round(at - begin, 4), round(gap, 5)) for at, gap in load.gaps(begin, end)],
        "short_ttfts": [
            (round(life.due - begin, 4), round(life.times[0] - life.due, 5))
            for life in load.within("short", begin, end)
            if life.times
        ],
    }


def show(found: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'':14}{'inter-token ms':>34}{'TTFT of short ms':>26}{'long prompts':>13}{'all':>9}")
    print(f"{'':14}{'':8}" + f"{'p50':>8}{'p99':>9}{'max':>9}" * 2 + f"{'s':>13}{'tok/s':>9}")
    for mode, result in found.items():
        for part in ("alone", "beside"):
            one = result[part]
            times = [one[name][share] for name in ("inter_token_ms", "short_ttft_ms") for share in _SHARES]
            row = f"{mode:14}{part:8}" + "".join(
                f"{value:{8 if index % 3 == 0 else 9}.1f}" for index, value in enumerate(times)
            )
            last = f"{max(one['long_ttft_s']):13.2f}" if "long_ttft_s" in one else f"{'':13}"
            print(row + last + f"{one['tokens_per_s']:9.0f}")


def draw(found: dict[str, dict[str, Any]], title: str, subtitle: str) -> str:
    """Gaps of the streams and TTFT of the short requests over time, before and after."""
    svg = Svg(920, 420, title, subtitle)
    svg.legend(896, 32, COLOURS.items())
    length = max(found[mode]["beside"]["seconds"] for mode in COLOURS)
    panels = (("gaps", "Time between two tokens of a stream, ms"), ("short_ttfts", "Short requests: TTFT, ms"))
    for column, (name, text) in enumerate(panels):
        values = [1e3 * value for mode in COLOURS for _, value in found[mode][name] if value > 0]
        if not values:
            continue
        box = (72.0 + column * 460, 104.0, 352.0, 250.0)
        ticks = log_ticks(max(0.5, min(values)), max(values))
        panel = Panel(svg, box, linear_ticks(0, length), ticks, title=text, x_label="s since they came", log_y=True)
        for mode, colour in COLOURS.items():
            points = found[mode][name]
            for at, value in points[:: max(1, len(points) // 1500)]:
                svg.dot(*panel.at(at, 1e3 * value), colour, 2.0)
    return svg.render()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="smollm2")
    model.add_argument("--shape", choices=list(SHAPES), help="a model of this shape with dummy weights")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--stream-tokens", type=int, default=32, help="prompt tokens of a stream")
    parser.add_argument("--long-prompts", type=int, default=2)
    parser.add_argument("--long-tokens", type=int, default=7000)
    parser.add_argument("--short-tokens", type=int, default=24, help="prompt tokens of a short request")
    parser.add_argument("--short-every", type=float, default=0.5, help="mean seconds between two short requests")
    parser.add_argument("--alone-seconds", type=float, default=20.0, help="how long to run without long prompts")
    parser.add_argument("--no-warm-up", action="store_true", help="no long prompt before those that are measured")
    parser.add_argument(
        "--out", default="long_prompts", help="name of the JSON file in benchmarks/results, without .json"
    )
    parser.add_argument("--points", type=Path, help="keeps all that was measured: a mode may run apart from others")
    parser.add_argument("--picture", type=Path, help="where the SVG file goes; unset: beside the JSON")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    if args.points is not None and args.points.exists():
        found = json.loads(args.points.read_text())
    where = environment("quire", "torch", *(["triton"] if args.shape else []))
    if args.shape:
        where["machine"]["device"] = device_name()
    for mode in args.modes:
        print(f"{mode} ...", flush=True)
        found[mode] = measure(args, mode)
        show({mode: found[mode]})
        gc.collect()
        free_memory()
        if args.points is not None:
            args.points.write_text(json.dumps(found))
        path = write_results(args.out, where, {mode: without_points(result) for mode, result in found.items()})
    show(found)
    print(f"written to {path}")
    if all(mode in found for mode in COLOURS):
        what = f"{args.long_prompts} x {args.long_tokens:,} prompt tokens, {args.streams} streams, short requests"
        machine = where["machine"].get("device") or f"{where['machine']['cores']} cores"
        commit = (where["commit"] or "unknown")[:7]
        text = draw(found, f"Beside long prompts: {args.shape or args.model}", f"{what}; {machine}; commit {commit}")
        picture = args.picture or RESULTS / f"{args.out}.svg"
        picture.write_text(text, encoding="utf-8")
        print(f"written to {picture}")


def without_points(result: dict[str, Any]) -> dict[str, Any]:
    """What a file keeps: the picture has the points."""
    return {name: value for name, value in result.items() if name not in ("gaps", "short_ttfts")}


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def free_memory() -> None:
    """Give an engine's memory back to the device, so that the next one finds it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
