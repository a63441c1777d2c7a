"""What the type of activations costs: perplexity of the default model in float32, float16 and bfloat16.

    python benchmarks/precision.py [TEXT ...]

As a GPU computes from a GGUF file, on a CPU: weights dequantized and rounded to the type, each layer's inputs and
outputs, the residual stream and the KV cache rounded to it, sums in float32. (torch multiplies float16 on a CPU one
number at a time, so the model runs in float32 and hooks round.) Texts are pages of docs/ unless others are named.
Besides perplexity: how far logits are from float32's, and how often the greedy token is another one.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from report import environment, write_results
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.config.groups import DEFAULT_MODEL, ModelConfig
from quire.frontend.text_model import load_text_model
from quire.layers.attention import Attention
from quire.layers.embedding import LMHead, VocabParallelEmbedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.base import CausalLM
from quire.worker.direct import DirectModel

DTYPES = ("float32", "float16", "bfloat16")
PAGES = ("architecture.md", "guides/structured-output.md", "internals/adding-a-model.md")
WINDOW = 1024
QUESTION = "What is the capital of France?"


def rounded(value: Any, dtype: torch.dtype) -> Any:
    """The same with every float32 tensor in it rounded to the type."""
    if isinstance(value, tuple | list):
        return tuple(rounded(part, dtype) for part in value)
    return value.to(dtype).float() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def round_everything(model: CausalLM, dtype: torch.dtype) -> None:
    """Make a float32 model round wherever one of this type would."""
    for parameter in model.parameters():
        parameter.data = rounded(parameter.data, dtype)
    for module in model.modules():
        if isinstance(module, Linear | Attention | VocabParallelEmbedding | LMHead):
            module.register_forward_pre_hook(lambda module, inputs: rounded(inputs, dtype))
            module.register_forward_hook(lambda module, inputs, output: rounded(output, dtype))
        if isinstance(module, RMSNorm):
            merge = module.merge
            module.merge = lambda *given, merge=merge: rounded(merge(*given), dtype)  # type: ignore[method-assign]


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    paths = paths or [Path(__file__).parent.parent / "docs" / page for page in PAGES]
    text = load_text_model(ModelConfig())
    assert text.tokenizer is not None
    windows = []
    for path in paths:
        ids = text.tokenizer.encode(path.read_text(), add_special_tokens=False)
        windows.append(ids[:WINDOW])
    prompt = text.render_chat([{"role": "user", "content": QUESTION}])
    question = text.tokenizer.encode(prompt, add_special_tokens=False)
    expected: list[Tensor] = []
    results: dict[str, Any] = {"texts": [path.name for path in paths], "tokens": sum(map(len, windows)), "types": {}}
    for dtype in DTYPES:
        config = EngineConfig.from_flat(
            model=DEFAULT_MODEL, dtype="float32", kv_cache_dtype=dtype, max_model_len=WINDOW, device="cpu"
        )
        model = DirectModel(config)
        round_everything(model.model, getattr(torch, dtype))
        with torch.inference_mode():
            logits = [model.logits(ids) for ids in windows]
            first = model.logits(question)[-1].log_softmax(-1).topk(2)
        expected = expected or logits
        row = {**compare(windows, logits, expected), "first_token_of_the_answer": describe(first, text.tokenizer)}
        results["types"][dtype] = row
        print(dtype, row)
    print(write_results("precision", environment("quire", "torch"), results))


def compare(windows: list[list[int]], logits: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    loss = count = squares = size = changed = 0.0
    for ids, ours, theirs in zip(windows, logits, expected, strict=True):
        targets = torch.tensor(ids[1:])
        loss += float(torch.nn.functional.cross_entropy(ours[:-1].double(), targets, reduction="sum"))
        count += len(targets)
        squares, size = squares + float((ours - theirs).double().square().sum()), size + ours.numel()
        changed += float((ours.argmax(-1) != theirs.argmax(-1)).sum())
    return {
        "perplexity": round(math.exp(loss / count), 5),
        "logits_differ_by": round(math.sqrt(squares / size), 5),
        "greedy_tokens_changed_percent": round(100 * changed / sum(map(len, windows)), 3),
    }


def describe(top: Any, tokenizer: Any) -> dict[str, float]:
    return {
        tokenizer.token_text(token): round(logprob, 4)
        for token, logprob in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    }


if __name__ == "__main__":
    main()
