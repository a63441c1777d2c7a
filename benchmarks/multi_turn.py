"""A conversation with a hybrid model, turn by turn: how much comes from the cache, and the time to first token.

    python benchmarks/multi_turn.py [--shape granite-4.0-h-350m] [--turns 8] [--tokens 300] [--device cpu]

Dummy weights; every turn adds a number of tokens, half of them the user's and half the answer's. Of turns 2 on, the
tokens that an earlier turn already held (prompt and answer) should come from the cache. The same conversation runs
without a prefix cache beside it. Writes JSON and a picture.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu import SHAPES
from report import RESULTS, environment, write_results

from quire.bench.svg import Panel, Svg, linear_ticks
from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.core import EngineCore
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams


def start(shape: str, **settings: Any) -> EngineCore:
    folder = Path(tempfile.mkdtemp())
    config = {"max_position_embeddings": 32768, "hidden_act": "silu", "eos_token_id": 2, **SHAPES[shape]}
    (folder / "config.json").write_text(json.dumps(config))
    engine = EngineConfig.from_flat(model=str(folder), load_format="dummy", max_model_len=8192, **settings)
    return build_engine(engine)[0]


def ask(core: EngineCore, name: str, token_ids: list[int], count: int) -> tuple[list[int], int, float]:
    """The answer's tokens, how many of the prompt's were cached, and seconds to the first token."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    request = EngineRequest(request_id=name, token_ids=token_ids, params=params, max_tokens=count)
    began, first, cached, answer = time.perf_counter(), 0.0, 0, []
    core.add_request(request)
    while core.has_work():
        for output in core.step().outputs:
            if output.token_ids and not answer:
                first = time.perf_counter() - began
            answer += output.token_ids
            cached = max(cached, output.num_cached_tokens)
    return answer, cached, first


def converse(core: EngineCore, turns: int, tokens: int, seed: int) -> list[dict[str, float]]:
    draw, history, found = random.Random(seed), [], []
    for turn in range(turns):
        held = max(0, len(history) - 1)  # the last token of an answer is never computed
        history = history + [draw.randrange(3, 30_000) for _ in range(tokens - tokens // 2)]
        answer, cached, seconds = ask(core, f"{seed}-{turn}", history, tokens // 2)
        history = history + answer
        found.append({"turn": turn + 1, "held": held, "cached": cached, "ttft_ms": 1e3 * seconds})
    return found


def draw_picture(with_cache: list[dict[str, float]], without: list[dict[str, float]], title: str) -> str:
    svg = Svg(760, 300, title, "share of held tokens that come from the cache, and time to first token, by turn")
    turns = [row["turn"] for row in with_cache]
    ticks = [float(turn) for turn in turns]
    shares = Panel(svg, (60, 90, 290, 160), ticks, linear_ticks(0, 100), title="cached, %", x_label="turn")
    rates = [(row["turn"], 100 * row["cached"] / row["held"]) for row in with_cache if row["held"]]
    svg.stroke([shares.at(*point) for point in rates], "blue")
    highest = max(row["ttft_ms"] for row in (*with_cache, *without))
    times = Panel(svg, (440, 90, 290, 160), ticks, linear_ticks(0, highest), title="TTFT, ms", x_label="turn")
    for rows, colour in ((with_cache, "blue"), (without, "orange")):
        svg.stroke([times.at(row["turn"], row["ttft_ms"]) for row in rows], colour)
    svg.legend(736, 32, [("with the cache", "blue"), ("without", "orange")])
    return svg.render()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="granite-4.0-h-350m", choices=list(SHAPES))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    runs = {}
    for name, caches in (("with", True), ("without", False)):
        core = start(given.shape, device=given.device, enable_prefix_caching=caches)
        converse(core, 2, given.tokens, seed=1)  # warm
        runs[name] = converse(core, given.turns, given.tokens, seed=2)
        del core
    print("turn  held  cached  share   TTFT ms  without")
    for row, other in zip(runs["with"], runs["without"], strict=True):
        share = 100 * row["cached"] / row["held"] if row["held"] else 0.0
        line = f"{row['turn']:>4.0f} {row['held']:>5.0f} {row['cached']:>7.0f} {share:5.1f} %"
        print(f"{line} {row['ttft_ms']:9.1f} {other['ttft_ms']:8.1f}")
    write_results("multi_turn", environment(), {"shape": given.shape, **runs})
    title = f"{given.turns} turns of {given.tokens} tokens, {given.shape}"
    (RESULTS / "multi_turn.svg").write_text(draw_picture(runs["with"], runs["without"], title))


if __name__ == "__main__":
    main()
