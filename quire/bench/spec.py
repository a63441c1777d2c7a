"""`bench spec`: how much faster drafts make the engine, over batch sizes and the share of drafts that hold.

Every batch runs without drafts first. Its answers, with some tokens made wrong, are then the predictions of the same
prompts, so that acceptance is what was asked for and the answers must be the same.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from quire.bench.data import load_samples
from quire.bench.options import DataOptions, check_least
from quire.bench.svg import Panel, Svg, linear_ticks
from quire.bench.tables import Grid
from quire.types.errors import ConfigError
from quire.types.sampling import SamplingParams

if TYPE_CHECKING:
    from quire.frontend.llm import LLM
    from quire.types.outputs import RequestOutput

_COLOURS = ("blue", "orange", "green", "red", "grey")


@dataclass(frozen=True, kw_only=True)
class SpecOptions:
    """Which batches, and which shares of predicted tokens are right."""

    batch_sizes: Sequence[int]
    acceptances: Sequence[float]
    input_len: int
    output_len: int
    repeats: int

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "repeats"):
            check_least(name, getattr(self, name), 1)
        for size in self.batch_sizes:
            check_least("batch_sizes", size, 1)
        for share in self.acceptances:
            if not 0 <= share <= 1:
                raise ConfigError(f"--acceptances has {share} but must have shares from 0 to 1")


class SpecPoint(msgspec.Struct, frozen=True, kw_only=True):
    batch_size: int
    acceptance: float  # share of predicted tokens that are right
    plain_tokens_per_s: float
    tokens_per_s: float
    speedup: float
    num_accepted: int  # drafts that held, of the median run
    num_rejected: int
    is_same: bool  # the answers are those without drafts

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def bench_spec(llm: LLM, options: SpecOptions, *, seed: int, say: Callable[[str], None]) -> list[SpecPoint]:
    """Measure every batch size at every acceptance; plain runs and runs with drafts take turns."""
    vocab_size = llm.get_tokenizer().vocab_size
    points = []
    for batch_size in options.batch_sizes:
        data = DataOptions(
            input_len=options.input_len,
            output_len=options.output_len,
            num_prompts=batch_size,
            token_ids=True,
            seed=seed,
        )
        prompts = [sample.token_ids or [] for sample in load_samples(data, tokenizer=llm.get_tokenizer())]
        _, answers = _run(llm, [{"prompt_token_ids": prompt} for prompt in prompts], options, speculate=False)
        expected = [output.outputs[0].token_ids for output in answers]
        for acceptance in options.acceptances:
            draw = random.Random(seed)
            requests = [
                {"prompt_token_ids": prompt, "prediction": _spoilt(draw, tokens, acceptance, vocab_size)}
                for prompt, tokens in zip(prompts, expected, strict=True)
            ]
            point = _measure(llm, requests, expected, options, acceptance)
            say(f"batch {batch_size}, {acceptance:.0%} of the predicted tokens right: {point.speedup:.2f} x")
            points.append(point)
    return points


def _measure(
    llm: LLM, requests: list[dict[str, Any]], expected: list[list[int]], options: SpecOptions, acceptance: float
) -> SpecPoint:
    plain: list[float] = []
    drafted: list[float] = []
    _, outputs = _run(llm, requests, options, speculate=True)  # not counted: kernels of new shapes are compiled in it
    llm.capture_graphs()
    for _ in range(options.repeats):
        plain.append(_run(llm, requests, options, speculate=False)[0])
        seconds, outputs = _run(llm, requests, options, speculate=True)
        drafted.append(seconds)
    num_tokens = sum(map(len, expected))
    completions = [output.outputs[0] for output in outputs]
    return SpecPoint(
        batch_size=len(requests),
        acceptance=acceptance,
        plain_tokens_per_s=num_tokens / median(plain),
        tokens_per_s=num_tokens / median(drafted),
        speedup=median(plain) / median(drafted),
        num_accepted=sum(completion.num_accepted_predictions for completion in completions),
        num_rejected=sum(completion.num_rejected_predictions for completion in completions),
        is_same=[completion.token_ids for completion in completions] == expected,
    )


def _run(
    llm: LLM, requests: Sequence[dict[str, Any]], options: SpecOptions, *, speculate: bool
) -> tuple[float, list[RequestOutput]]:
    params = SamplingParams(
        temperature=0.0, max_tokens=options.output_len, ignore_eos=True, detokenize=False, speculate=speculate
    )
    begin = time.perf_counter()
    outputs = llm.generate(list(requests), params, use_tqdm=False)
    return time.perf_counter() - begin, outputs


def _spoilt(draw: random.Random, tokens: Sequence[int], acceptance: float, vocab_size: int) -> list[int]:
    """The tokens, of which the share `acceptance` is right."""
    return [token if draw.random() < acceptance else (token + 1) % vocab_size for token in tokens]


def spec_grids(points: Sequence[SpecPoint]) -> list[Grid]:
    grid = Grid(["batch", "right", "tok/s without", "tok/s", "speed-up", "accepted", "same answers"])
    for point in points:
        total = point.num_accepted + point.num_rejected
        grid.rows.append(
            (
                str(point.batch_size),
                f"{point.acceptance:.0%}",
                f"{point.plain_tokens_per_s:.1f}",
                f"{point.tokens_per_s:.1f}",
                f"{point.speedup:.2f} x",
                f"{point.num_accepted} of {total}",
                "yes" if point.is_same else "no",
            )
        )
    return [grid]


def spec_chart(points: Sequence[SpecPoint], title: str, subtitle: str = "") -> str:
    """Speed-up over acceptance, one line for each batch size, as an SVG file's text."""
    svg = Svg(640, 400, title, subtitle)
    sizes = list(dict.fromkeys(point.batch_size for point in points))
    colours = {size: _COLOURS[index % len(_COLOURS)] for index, size in enumerate(sizes)}
    svg.legend(616, 76, [(f"batch {size}", colours[size]) for size in sizes])
    y_ticks = linear_ticks(0, max((point.speedup for point in points), default=1.0))
    x_ticks = [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    panel = Panel(
        svg,
        (72, 104, 532, 234),
        x_ticks,
        y_ticks,
        title="Speed-up",
        x_label="share of predicted tokens that are right",
    )
    svg.stroke([panel.at(0, 1), panel.at(1, 1)], "grey", dashed=True, width=1.5)
    for size in sizes:
        places = [panel.at(point.acceptance, point.speedup) for point in points if point.batch_size == size]
        svg.stroke(places, colours[size])
        for x, y in places:
            svg.dot(x, y, colours[size])
    return svg.render()
