"""Steps that verify drafts against steps without any, on dummy weights, with drafts that are always right or wrong.

    python benchmarks/speculation.py [--model llama-8b] [--parts rows eagle3 grammars] [--batches 1 16 64]
                                     [--drafts 4] [--context 1024] [--tokens 257] [--deterministic]
                                     [--device cuda] [--profile] [--out FILE]

rows: every request may say one token only, so that what holds is known whatever the rounding: the drafter guesses
that token, or another. Rows without drafts ask for the same, so both do the same work for a token.
eagle3: what an EAGLE-3 head of the model's shape with a draft vocabulary of 32,000 adds to a step that verifies.
With --profile also where the time of both goes: the host's parts, kernels, and what the device waits for.
grammars: what 64 rows under a JSON schema add to a step that verifies drafts of 64 free rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu import SHAPES, Bench
from report import environment
from step_profile import show_steps
from structured import SCHEMA, made_up

from quire.config.groups import SpeculativeConfig
from quire.engine.client import InProcClient
from quire.platform.transfer import Download
from quire.runner.proposers.base import NoProposer
from quire.runner.proposers.heads import HeadProposer
from quire.runner.runner import Runner
from quire.sched.drafters.proposed import ProposedDrafter
from quire.sched.drafts import Drafter, Drafts, NoDrafts
from quire.sched.request import Request
from quire.structured.sources import make_source
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.structured import GrammarSource, StructuredOutputsParams
from quire.worker.inproc import InProcExecutor

TOKEN, OTHER = 7, 8
TARGETS = {1: 3.6, 16: 2.5, 64: 1.5}  # speed-up with four right drafts, llama-8b on an H200
DRAFT_VOCAB = 32000
LONG = {"type": "array", "items": SCHEMA, "minItems": 1000}  # no row comes to its end while it is measured


class Constant(Drafter):
    """Guesses the same token again and again."""

    name = "constant"
    default_tokens = 64

    def __init__(self, token: int, count: int) -> None:
        self._token, self._count = token, count

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        return [self._token] * min(limit, self._count)


class Known(Drafter):
    """Guesses what the same request said before."""

    name = "known"
    default_tokens = 64

    def __init__(self, outputs: Mapping[str, Sequence[int]], count: int) -> None:
        self._outputs, self._count = outputs, count

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        first = len(request.token_ids) - request.num_prompt_tokens + num_in_flight
        count = min(limit, self._count)
        tokens = list(self._outputs[request.request_id][first : first + count])
        return tokens + [OTHER] * (count - len(tokens))


def draft(bench: Bench, drafting: Drafts | NoDrafts) -> None:
    assert isinstance(bench.client, InProcClient)
    bench.client._core.scheduler._state.drafting = drafting


def runner_of(bench: Bench) -> Runner:
    assert isinstance(bench.client, InProcClient)
    executor = bench.client._core.executor
    assert isinstance(executor, InProcExecutor)
    return executor._worker.runner


def decode_rate(bench: Bench, prompts: list[list[int]], num_tokens: int, **sampling: Any) -> float:
    """Output tokens/s of rows whose prompts are cached."""
    count = len(prompts)
    bench.run(prompts, [num_tokens // 4] * count, **sampling)

    def once() -> float:
        whole = bench.run(prompts, [num_tokens] * count, **sampling)
        return whole - bench.run(prompts, [1] * count, **sampling)

    return count * (num_tokens - 1) / bench.best(3, once)


def measure_rows(
    bench: Bench, batches: list[int], count: int, context: int, num_tokens: int
) -> dict[str, dict[str, float]]:
    """Output tokens/s of each batch, without drafts, with right ones and with wrong ones."""
    kinds = {"none": NoDrafts(), "right": Drafts(Constant(TOKEN, count)), "wrong": Drafts(Constant(OTHER, count))}
    found: dict[str, dict[str, float]] = {}
    for batch in batches:
        rates, prompts = dict[str, float](), [bench.prompt(context) for _ in range(batch)]
        for name, drafting in kinds.items():
            draft(bench, drafting)
            rates[name] = decode_rate(bench, prompts, num_tokens, allowed_token_ids=[TOKEN])
        rates["speed-up"] = rates["right"] / rates["none"]
        found[f"batch {batch}"] = rates
        target = TARGETS.get(batch)
        print(
            f"batch {batch}: {rates['none']:.0f} tok/s, with {count} right drafts {rates['right']:.0f} "
            f"({rates['speed-up']:.2f} x{f', target {target}' if target else ''}), with wrong ones "
            f"{rates['wrong']:.0f} ({rates['wrong'] / rates['none']:.2f} x)",
            flush=True,
        )
    return found


def write_head(model: str, draft_vocab: int) -> Path:
    """The config of an EAGLE-3 head for this model; its weights are made up."""
    folder = Path(tempfile.mkdtemp())
    shape = {"num_hidden_layers": 1, "draft_vocab_size": draft_vocab, "architectures": ["LlamaForCausalLMEagle3"]}
    config = {"max_position_embeddings": 40960, "hidden_act": "silu", **SHAPES[model], **shape}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def profile_steps(bench: Bench, name: str, prompts: list[list[int]], num_steps: int) -> None:
    """Print where the time of steps goes that give one token a row."""
    assert isinstance(bench.client, InProcClient)
    core, runner = bench.client._core, runner_of(bench)
    parts = {
        "core.step, of which": (core, "step"),
        "  scheduler.schedule": (core.scheduler, "schedule"),
        "  executor.execute, of which": (core.executor, "execute"),
        "    proposer.begin": (runner.proposer, "begin"),
        "  runner.finish, of which": (runner, "finish"),
        "    proposer.propose": (runner.proposer, "propose"),
        "  scheduler.update": (core.scheduler, "update"),
        "waiting for copies from the device": (Download, "get"),
    }
    show_steps(name, lambda: bench.run(prompts, [num_steps] * len(prompts)), num_steps, parts)


def measure_head(
    bench: Bench, batches: list[int], count: int, context: int, num_tokens: int, *, profile: bool = False
) -> dict[str, dict[str, float]]:
    """Milliseconds of a token, no draft being right: of plain steps, of verifying drafts, of drafting them too."""
    assert isinstance(bench.client, InProcClient)
    runner = runner_of(bench)
    head = runner.proposer
    assert isinstance(head, HeadProposer)
    kinds = {
        "target step, ms": (NoProposer(), NoDrafts()),
        "verifying, ms": (NoProposer(), Drafts(Constant(OTHER, count))),
        "followed by the head, ms": (head, NoDrafts()),
        "drafting and verifying, ms": (head, Drafts(ProposedDrafter(SpeculativeConfig(method="eagle3")), most=count)),
    }
    found: dict[str, dict[str, float]] = {}
    for batch in batches:
        times, prompts = dict[str, float](), [bench.prompt(context) for _ in range(batch)]
        for name, (proposer, drafting) in kinds.items():
            runner.proposer = proposer
            draft(bench, drafting)
            times[name] = 1e3 * batch / decode_rate(bench, prompts, num_tokens)
            if profile and "verifying" in name:
                profile_steps(bench, f"batch {batch}, {name.removesuffix(', ms')}", prompts, num_tokens)
        times["drafting, ms"] = times["drafting and verifying, ms"] - times["verifying, ms"]
        times["drafting, of a target step"] = times["drafting, ms"] / times["target step, ms"]
        stats = bench.client._core.scheduler.stats()
        times["accepted share of all drafts so far"] = stats.num_accepted_tokens / max(1, stats.num_draft_tokens)
        found[f"batch {batch}"] = times
        print(f"batch {batch}: " + ", ".join(f"{name} {value:.3f}" for name, value in times.items()), flush=True)
    return found


def step_ms(
    bench: Bench, prompts: list[list[int]], steps: int, grammar: GrammarSource | None
) -> tuple[float, dict[str, list[int]]]:
    """Median milliseconds from one step's outputs to the next's, all rows decoding, and what each row said."""
    params = SamplingParams(max_tokens=5 * steps, ignore_eos=True, detokenize=False, temperature=0.0)
    said: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        said[str(index)] = []
        bench.client.add_request(
            EngineRequest(
                request_id=str(index), token_ids=prompt, params=params, max_tokens=5 * steps, grammar=grammar
            )
        )
    times = []
    while bench.client.has_unfinished():
        outputs = bench.client.get_outputs().outputs
        assert all(output.error is None for output in outputs), outputs
        for output in outputs:
            said[output.request_id] += output.token_ids
        if len(outputs) == len(prompts):
            times.append(time.perf_counter())
    times = times[: steps + 1]
    return 1e3 * statistics.median(later - earlier for earlier, later in pairwise(times)), said


def measure_grammars(
    bench: Bench, model: str, count: int, rows: int = 64, steps: int = 60, context: int = 64
) -> dict[str, float]:
    bench.client.call("set_vocabulary", made_up(SHAPES[model]["vocab_size"]))
    grammar = make_source(StructuredOutputsParams(json=LONG))
    prompts = [bench.prompt(context) for _ in range(rows)]
    draft(bench, NoDrafts())
    plain, said = step_ms(bench, prompts, steps, grammar)
    found = {"schema, no drafts, ms": plain}
    for _ in range(2):  # the first run captures steps
        draft(bench, Drafts(Constant(OTHER, count)))
        found["drafts, ms"], _ = step_ms(bench, prompts, steps, None)
        draft(bench, Drafts(Known(said, count)))
        found["drafts and schema, ms"], again = step_ms(bench, prompts, steps, grammar)
    same = sum(again[name] == said[name] for name in said)
    found["added, ms"] = found["drafts and schema, ms"] - found["drafts, ms"]
    print(", ".join(f"{name} {value:.3f}" for name, value in found.items()) + f"; {same} of {rows} answers the same")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--parts", nargs="+", choices=["rows", "eagle3", "grammars"], default=["rows"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=257)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    settings: dict[str, Any] = {"device": given.device, "deterministic": given.deterministic}
    speculative: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": given.drafts}
    sizes = (given.batches, given.drafts, given.context, given.tokens)
    results: dict[str, Any] = {}
    if "rows" in given.parts or "grammars" in given.parts:
        bench = Bench(given.model, **settings, speculative_config=speculative)
        if "rows" in given.parts:
            results["rows"] = measure_rows(bench, *sizes)
        if "grammars" in given.parts:
            results["grammars"] = measure_grammars(bench, given.model, given.drafts)
        bench.client.shutdown()
        del bench
    if "eagle3" in given.parts:
        head = write_head(given.model, min(DRAFT_VOCAB, SHAPES[given.model]["vocab_size"]))
        speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": given.drafts}
        bench = Bench(given.model, **settings, speculative_config=speculative)
        results["eagle3"] = measure_head(bench, *sizes, profile=given.profile)
        bench.client.shutdown()
    if given.out is not None:
        report = {"environment": environment("torch", "triton"), "results": results}
        given.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
