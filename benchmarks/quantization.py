"""Size and perplexity of the default model in each scheme that `quire quantize` writes.

    python benchmarks/quantization.py [SCHEME ...]

The model is a GGUF file of 4 bits (Q4_1) already, so this is what a second quantization adds to a first. Texts are
pages of docs/; activations are float32, keys and values too. With names of schemes, rows of the others stay.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import RESULTS, environment, write_results

from quire.cli.quantize import SCHEMES, perplexity, write_checkpoint
from quire.config.engine import EngineConfig
from quire.config.groups import DEFAULT_MODEL
from quire.worker.planning import plan_engine, plan_memory

DOCS = Path(__file__).parent.parent / "docs"
RESULT = RESULTS / "quantization.json"
PAGES = ("architecture.md", "structured-output.md", "adding-a-model.md")
CHARACTERS = 4000  # of each page
SETTINGS = {"max_model_len": 1024, "kv_cache_dtype": "float32", "activations": "float32"}


def weights_in_memory(config: EngineConfig) -> float:
    entries = plan_memory(config).entries
    return next(entry.num_bytes for entry in entries if entry.name == "weights") / 1e6


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
        }
    }
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
            }
        print(scheme, rows[scheme], flush=True)
    results = {"texts": PAGES, "characters": len(text), "schemes": rows}
    print(write_results("quantization", environment("quire", "torch"), results))


if __name__ == "__main__":
    main()
