"""Size, perplexity and speed of the default model in each scheme that `quire quantize` writes, and by activations.

    python benchmarks/quantization.py [SCHEME ...] [--folder DIR] [--speed-only]

The model is a GGUF file of 4 bits (Q4_1) already, so this is what a second quantization adds to a first. Texts are
pages of docs/; activations are float32, keys and values too, for perplexity; for speed they are as by default. With
names of schemes, rows of the others stay. For speed all engines take turns, so that a slow minute is everybody's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from report import RESULTS, environment, write_results

from quire import LLM, SamplingParams
from quire.cli.quantize import SCHEMES, perplexity, write_checkpoint
from quire.config.engine import EngineConfig
from quire.config.groups import DEFAULT_MODEL
from quire.planning.engine_plan import plan_engine, plan_memory

DOCS = Path(__file__).parent.parent / "docs"
RESULT = RESULTS / "quantization.json"
PAGES = ("architecture.md", "guides/structured-output.md", "internals/adding-a-model.md")
CHARACTERS = 4000  # of each page
GOES = 3
PLAIN = "as it is (Q4_1)"
ACTIVATIONS = ("float32", "int16", "int8")
SETTINGS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_dtype": "float32", "activations": "float32"}


def weights_in_memory(config: EngineConfig) -> float:
    entries = plan_memory(config).entries
    return next(entry.num_bytes for entry in entries if entry.name == "weights") / 1e6


def speeds(models: dict[str, dict[str, str | None]]) -> dict[str, dict[str, float]]:
    """Tokens a second of a prompt of 512 and of 64 that follow it; the best of GOES, all models taking turns."""
    prompt = {"prompt_token_ids": [7 + 31 * index % 900 for index in range(512)]}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}

    def seconds(llm: LLM, outputs: int) -> float:
        started = time.perf_counter()
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - started

    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(max_model_len=1024, enable_prefix_caching=False, **flags))
            for name, flags in models.items()
        }
        for _ in range(GOES):
            for name, llm in llms.items():
                found[name].append((seconds(llm, 1), seconds(llm, 65)))
    best = {name: [min(times) for times in zip(*goes, strict=True)] for name, goes in found.items()}
    return {
        name: {"prefill_tok_s": round(512 / first, 1), "decode_tok_s": round(64 / (both - first), 1)}
        for name, (first, both) in best.items()
    }


def quality(config: EngineConfig, num_bytes: int, text: str, before: float | None) -> dict[str, float]:
    found = perplexity(config, text)
    return {
        "file_mb": round(num_bytes / 1e6, 1),
        "perplexity": round(found, 4),
        "percent": round(100 * (found / (before or found) - 1), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schemes", nargs="*", metavar="SCHEME")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept for the next time; else they go")
    parser.add_argument("--speed-only", action="store_true", help="the file's sizes and perplexities stay")
    args = parser.parse_args()
    chosen = args.schemes or list(SCHEMES)
    text = "\n".join((DOCS / page).read_text()[:CHARACTERS] for page in PAGES)
    config = EngineConfig.from_flat(model=DEFAULT_MODEL, **SETTINGS)
    plan = plan_engine(config)
    known: dict[str, Any] = json.loads(RESULT.read_text())["results"] if args.schemes or args.speed_only else {}
    rows: dict[str, dict[str, Any]] = known.get("schemes", {})
    activations: dict[str, dict[str, Any]] = known.get("activations", {})
    with tempfile.TemporaryDirectory() as temporary:
        models: dict[str, dict[str, str | None]] = {PLAIN: {"model": DEFAULT_MODEL}}
        models |= {name: {"model": DEFAULT_MODEL, "activations": name} for name in ACTIVATIONS}
        for scheme in chosen:
            folder = (args.folder or Path(temporary)) / scheme
            if not folder.exists():
                folder.mkdir(parents=True)
                write_checkpoint(plan, scheme, None, folder)
            models[scheme] = {"model": str(folder), "tokenizer": str(plan.source.path)}
        for name, flags in models.items():
            row = (activations if name in ACTIVATIONS else rows).setdefault(name, {})
            checked = EngineConfig.from_flat(**(SETTINGS | flags))
            if name not in ACTIVATIONS:
                row["memory_mb"] = round(weights_in_memory(checked), 1)
            if not args.speed_only:
                path = plan.source.path if name == PLAIN else Path(str(flags["model"])) / "model.safetensors"
                found = quality(checked, path.stat().st_size, text, rows[PLAIN].get("perplexity"))
                row |= {"perplexity": found["perplexity"]} if name in ACTIVATIONS else found
        for name, found in speeds(models).items():
            row = (activations if name in ACTIVATIONS else rows)[name]
            row |= found
            print(name, row, flush=True)
    results = {"texts": PAGES, "characters": len(text), "schemes": rows, "activations": activations}
    print(write_results("quantization", environment("quire", "torch"), results))


if __name__ == "__main__":
    main()
