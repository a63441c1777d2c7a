"""Speculation on the default model: a copy task with `prediction`, wrong predictions, and the picture of the guide.

    python benchmarks/speculation_cpu.py [--parts copy forced picture] [--repeats 3] [--tokens 400] [--wall]

copy: the prediction is the model's own greedy answer with two words changed; then one of which every token is wrong.
Both take turns with no prediction in one run, and the best of each counts.
forced: an answer under a JSON schema with long keys, and a text without one, by an engine as it is by default and by
one with method none, by turns. Steps are those that gave tokens.
picture: the picture of `quire bench spec`, which goes to docs/images.
One thread computes, and its processor time counts, which other work on the machine changes little; the length policy
itself goes by elapsed time, as it always does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from report import environment, write_results

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.bench import spec
from quire.bench.spec import SpecOptions, bench_spec, spec_chart

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PROMPT = "Write a long story about a lighthouse keeper who finds a message in a bottle."


def changed(llm: LLM, tokens: list[int]) -> list[int]:
    """The same text with two words of it replaced."""
    words = llm.get_tokenizer().decode(tokens).split(" ")
    for place in (len(words) // 3, 2 * len(words) // 3):
        words[place] = "umbrella"
    return llm.get_tokenizer().encode(" ".join(words), add_special_tokens=False)


def measure_copy(repeats: int, num_tokens: int, clock: Callable[[], float]) -> dict[str, Any]:
    with LLM("smollm2", max_model_len=2048, num_threads=1) as llm:
        prompt = llm.get_tokenizer().encode(PROMPT)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

        def run(prediction: list[int] | None) -> tuple[float, list[int], int, int]:
            request = {"prompt_token_ids": prompt, **({} if prediction is None else {"prediction": prediction})}
            begin = clock()
            (output,) = llm.generate(request, params, use_tqdm=False)
            said = output.outputs[0]
            took = clock() - begin
            return took, said.token_ids, said.num_accepted_predictions, said.num_rejected_predictions

        _, answer, _, _ = run(None)
        vocab_size = llm.get_tokenizer().vocab_size
        wrong = [(token + 1) % vocab_size for token in answer]
        kinds = {"no prediction": None, "two words changed": changed(llm, answer), "every token wrong": wrong}
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        counts: dict[str, tuple[int, int]] = {}
        for _ in range(repeats):
            for name, prediction in kinds.items():
                seconds, said, accepted, rejected = run(prediction)
                assert said == answer, "drafts never change an answer"
                rates[name].append(num_tokens / seconds)
                counts[name] = accepted, rejected
    plain = max(rates["no prediction"])
    found: dict[str, Any] = {}
    for name, values in rates.items():
        found[name] = {
            "tok/s": max(values),
            "of no prediction": max(values) / plain,
            "each tok/s": values,
            "accepted, rejected": counts[name],
        }
        print(f"{name}: {max(values):.1f} tok/s, {max(values) / plain:.2f} x, drafts {counts[name]}", flush=True)
    return found


KEYS = {
    "customer_identification_number": {"type": "integer"},
    "preferred_delivery_address": {"type": "string", "maxLength": 30},
    "estimated_arrival_date": {"type": "string", "format": "date"},
    "number_of_items_in_the_order": {"type": "integer"},
    "payment_was_confirmed": {"type": "boolean"},
}
ORDER = "Order 4711 of Mrs. Miller, 12 Oak Street, two lamps and a chair, paid, comes on 3 May 2026. "


def measure_forced(repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    schema = {"type": "object", "properties": KEYS, "required": [*KEYS], "additionalProperties": False}
    named = f"{ORDER}A JSON object with the fields {', '.join(KEYS)}:\n"
    asked = {"fields in the prompt": named, "fields not in the prompt": f"{ORDER}As JSON: ", "no schema": PROMPT}
    with (
        LLM("smollm2", max_model_len=2048, num_threads=1) as default,
        LLM("smollm2", max_model_len=2048, num_threads=1, speculative_config={"method": "none"}) as off,
    ):
        found: dict[str, Any] = {}
        for name, prompt in asked.items():
            structured = None if name == "no schema" else StructuredOutputsParams(json=schema)
            params = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=structured)
            seconds: dict[str, list[float]] = {"default": [], "none": []}
            steps: dict[str, int] = {}
            answers: dict[str, list[int]] = {}
            for _ in range(1 + repeats):  # the first time, sampling is traced
                for kind, llm in (("default", default), ("none", off)):
                    begin = clock()
                    outputs = list(llm.stream(prompt, params))
                    seconds[kind].append(clock() - begin)
                    steps[kind] = len(outputs)
                    answers[kind] = [token for output in outputs for token in output.outputs[0].token_ids]
            assert answers["default"] == answers["none"], "drafts never change an answer"
            count, best = len(answers["none"]), {kind: min(values) for kind, values in seconds.items()}
            found[name] = {
                "tokens": count,
                "steps": steps,
                "tok/s": {kind: count / value for kind, value in best.items()},
                "speed-up": best["none"] / best["default"],
            }
            print(f"{name}: {found[name]}", flush=True)
    return found


def draw_picture(options: SpecOptions, clock: str) -> None:
    with LLM("smollm2", max_model_len=2048, num_threads=1) as llm:
        points = bench_spec(llm, options, seed=0, say=print)
    subtitle = f"smollm2 on one core: {options.input_len} tokens in, {options.output_len} out, {clock}"
    (IMAGES / "speculation.svg").write_text(spec_chart(points, "Speed-up by draft tokens", subtitle))
    results = {"clock": clock, "points": [point.to_dict() for point in points]}
    print(f"written to {IMAGES} and {write_results('speculation-picture', environment('torch'), results)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=["copy", "forced", "picture"], default=["copy", "forced", "picture"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--acceptances", type=float, nargs="+", default=[0.0, 0.5, 0.8, 0.9, 1.0])
    parser.add_argument(
        "--wall", action="store_true", help="measure elapsed time: the machine has nothing else to do"
    )
    given = parser.parse_args()
    clock = "elapsed time" if given.wall else "processor time"
    if not given.wall:
        spec.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    if "copy" in given.parts:
        results = measure_copy(given.repeats, given.tokens, time.perf_counter if given.wall else time.process_time)
        print(f"written to {write_results('speculation-cpu', environment('torch'), {'clock': clock, **results})}")
    if "forced" in given.parts:
        results = measure_forced(given.repeats, time.perf_counter if given.wall else time.process_time)
        print(f"written to {write_results('jump-forward-cpu', environment('torch'), {'clock': clock, **results})}")
    if "picture" in given.parts:
        options = SpecOptions(
            batch_sizes=given.batch_sizes,
            acceptances=given.acceptances,
            input_len=64,
            output_len=given.tokens,
            repeats=given.repeats,
        )
        draw_picture(options, clock)


if __name__ == "__main__":
    main()
