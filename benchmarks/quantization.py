"""Size, perplexity and speed of the default model in each scheme that `quire quantize` writes, and by activations.

    python benchmarks/quantization.py [SCHEME ...]

The model is a GGUF file of 4 bits (Q4_1) already, so this is what a second quantization adds to a first. Texts are
pages of docs/; activations are float32, keys and values too, for perplexity; for speed they are as by default. With
names of schemes, rows of the others stay.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
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
SETTINGS = {"max_model_len": 1024, "kv_cache_dtype": "float32", "activations": "float32"}


def weights_in_memory(config: EngineConfig) -> float:
    entries = plan_memory(config).entries
    return next(entry.num_bytes for entry in entries if entry.name == "weights") / 1e6


def speed(model: str, tokenizer: str | None = None, **flags: str) -> dict[str, float]:
    """Tokens a second of a prompt of 512 and of 64 that follow it; the best of three."""
    with LLM(model, tokenizer=tokenizer, max_model_len=1024, enable_prefix_caching=False, **flags) as llm:
        prompt = {"prompt_token_ids": [7 + 31 * index % 900 for index in range(512)]}

        def seconds(outputs: int) -> float:
            started = time.perf_counter()
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True), use_tqdm=False)
            return time.perf_counter() - started

        first = min(seconds(1) for _ in range(3))
        rest = min(seconds(65) for _ in range(3)) - first
    return {"prefill_tok_s": round(512 / first, 1), "decode_tok_s": round(64 / rest, 1)}


def by_activations(text: str) -> dict[str, Any]:
    """The default model as it is, by what activations are rounded to."""
    rows: dict[str, Any] = {}
    for name in ("float32", "int16", "int8"):
        config = EngineConfig.from_flat(model=DEFAULT_MODEL, **(SETTINGS | {"activations": name}))
        rows[name] = {"perplexity": round(perplexity(config, text), 4), **speed(DEFAULT_MODEL, activations=name)}
        print(name, rows[name], flush=True)
    return rows


def main() -> None:
    chosen = sys.argv[1:] or list(SCHEMES)
    text = "\n".join((DOCS / page).read_text()[:CHARACTERS] for page in PAGES)
    config = EngineConfig.from_flat(model=DEFAULT_MODEL, **SETTINGS)
    plan = plan_engine(config)
    before = perplexity(config, text)
    rows: dict[str, Any] = json.loads(RESULT.read_text())["results"]["schemes"] if sys.argv[1:] else {}
    rows |= {
        "as it is (Q4_1)": {
            "file_mb": round(plan.source.path.stat().st_size / 1e6, 1),
            "memory_mb": round(weights_in_memory(config), 1),
            "perplexity": round(before, 4),
            "percent": 0.0,
            **speed(DEFAULT_MODEL),
        }
    }
    activations = by_activations(text)
    for scheme in chosen:
        with tempfile.TemporaryDirectory() as folder:
            size = write_checkpoint(plan, scheme, None, Path(folder))
            stored = EngineConfig.from_flat(model=folder, tokenizer=str(plan.source.path), **SETTINGS)
            after = perplexity(stored, text)
            rows[scheme] = {
                "file_mb": round(size / 1e6, 1),
                "memory_mb": round(weights_in_memory(stored), 1),
                "perplexity": round(after, 4),
                "percent": round(100 * (after / before - 1), 2),
                **speed(folder, str(plan.source.path)),
            }
        print(scheme, rows[scheme], flush=True)
    results = {"texts": PAGES, "characters": len(text), "schemes": rows, "activations": activations}
    print(write_results("quantization", environment("quire", "torch"), results))


if __name__ == "__main__":
    main()
