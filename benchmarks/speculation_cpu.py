"""Speculation on the default model: a copy task with `prediction`, wrong predictions, and the picture of the guide.

    python benchmarks/speculation_cpu.py [--parts copy picture] [--repeats 3] [--tokens 400]

copy: the prediction is the model's own greedy answer with two words changed; then one of which every token is wrong.
Both take turns with no prediction in one run, and the best of each counts, so that other work disturbs all alike.
picture: `quire bench spec`, whose picture goes to docs/images.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import environment, write_results

from quire import LLM, SamplingParams

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PROMPT = "Write a long story about a lighthouse keeper who finds a message in a bottle."


def changed(llm: LLM, tokens: list[int]) -> list[int]:
    """The same text with two words of it replaced."""
    words = llm.get_tokenizer().decode(tokens).split(" ")
    for place in (len(words) // 3, 2 * len(words) // 3):
        words[place] = "umbrella"
    return llm.get_tokenizer().encode(" ".join(words), add_special_tokens=False)


def measure_copy(repeats: int, num_tokens: int) -> dict[str, Any]:
    with LLM("smollm2", max_model_len=2048) as llm:
        prompt = llm.get_tokenizer().encode(PROMPT)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

        def run(prediction: list[int] | None) -> tuple[float, list[int], int, int]:
            request = {"prompt_token_ids": prompt, **({} if prediction is None else {"prediction": prediction})}
            begin = time.perf_counter()
            (output,) = llm.generate(request, params, use_tqdm=False)
            said = output.outputs[0]
            took = time.perf_counter() - begin
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


def draw_picture(options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "quire", "bench", "spec", *options, "--output-dir", folder]
        subprocess.run(command, check=True)
        (picture,) = Path(folder).rglob("*speedup*.svg")
        shutil.copy(picture, IMAGES / "speculation.svg")
        (table,) = Path(folder).rglob("*.json")
        shutil.copy(table, Path(__file__).parent / "results" / "speculation-picture.json")
    print(f"written to {IMAGES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["copy", "picture"], default=["copy", "picture"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--bench-spec", nargs=argparse.REMAINDER, default=[], help="flags of quire bench spec")
    given = parser.parse_args()
    if "copy" in given.parts:
        results = measure_copy(given.repeats, given.tokens)
        print(f"written to {write_results('speculation-cpu', environment('torch'), results)}")
    if "picture" in given.parts:
        draw_picture(given.bench_spec)


if __name__ == "__main__":
    main()
