"""`quire verify MODEL`: run Quire and transformers on the same tokens and name the first op that differs.

The one place at run time that imports transformers, and only when it is called (extra `verify`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.config.args import add_engine_arguments, engine_config_from
from quire.config.engine import EngineConfig
from quire.types.errors import ConfigError, ModelError

HELP = "compare a model with transformers, op by op"
DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog. In the year 1969, the first people walked on the moon."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--text", default=DEFAULT_TEXT, help="What to run both on.")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="Largest difference relative to an op's scale.")


def run(args: argparse.Namespace) -> int:
    report = verify(engine_config_from(args), args.text, args.tolerance)
    print(report.format())
    return 0 if report.first is None else 1


@dataclass(frozen=True)
class Difference:
    """How far one op's outputs are apart, relative to the largest value of the reference's output."""

    name: str
    relative: float

    def describe(self) -> str:
        match = re.search(r"layers\.(\d+)\.(.+)", self.name)
        return f"layer {match[1]}, {match[2]}" if match else self.name


@dataclass(frozen=True)
class Report:
    num_tokens: int
    compared: list[Difference]  # in the order in which they run
    tolerance: float
    tokens_agree: bool

    @property
    def first(self) -> Difference | None:
        return next((d for d in self.compared if not d.relative <= self.tolerance), None)

    def format(self) -> str:
        worst = max(self.compared, key=lambda difference: difference.relative)
        summary = (
            f"{len(self.compared)} ops on {self.num_tokens} tokens, worst {worst.relative:.2e} ({worst.describe()})"
        )
        if self.first is not None:
            return (
                f"DIFFERENT: first at {self.first.describe()} (relative {self.first.relative:.2e}, "
                f"tolerance {self.tolerance:.0e}); {summary}"
            )
        agree = "agree" if self.tokens_agree else "differ, within the tolerance of the logits"
        return f"EQUAL within {self.tolerance:.0e}: {summary}; greedy next tokens {agree}"


def verify(config: EngineConfig, text: str, tolerance: float) -> Report:
    import torch

    from quire.frontend.tokenizer import load_tokenizer
    from quire.worker.direct import DirectModel

    direct = DirectModel(config)
    token_ids = load_tokenizer(direct.source.path).encode(text)
    token_ids = [token for token in token_ids if token < direct.vocab_size][: direct.max_model_len]
    reference = _load_reference(direct.source.path, direct.dtype)
    with torch.inference_mode():
        ours = _capture(direct.model, lambda: direct.logits(token_ids))
        theirs = _capture(reference, lambda: reference(torch.tensor([token_ids])).logits[0])
    compared = _compare(direct.model, ours, theirs, len(token_ids))
    agree = bool((ours.result.argmax(-1) == theirs.result.argmax(-1)).all())
    return Report(len(token_ids), compared, tolerance, agree)


def _load_reference(path: Any, dtype: Any) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("verify needs transformers; install it with: pip install 'quire[verify]'") from error
    # Eager attention: the only one that every architecture's soft-capping goes through.
    options = {"dtype": dtype, "attn_implementation": "eager"}
    if path.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
    return AutoModelForCausalLM.from_pretrained(path, **options)


@dataclass(frozen=True)
class _Captured:
    outputs: dict[str, Any]  # module name -> its output, in the order of execution
    inputs: dict[str, Any]  # module name -> its first input
    result: Any


def _capture(model: Any, run: Callable[[], Any]) -> _Captured:
    """Run with a hook on every module."""
    outputs: dict[str, Any] = {}
    inputs: dict[str, Any] = {}

    def hook_for(name: str) -> Callable[[Any, tuple[Any, ...], Any], None]:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            outputs[name] = tensor.detach().clone()
            if args:
                inputs[name] = args[0].detach().clone()

        return hook

    leaves = [
        (name, module) for name, module in model.named_modules() if not list(module.children()) or "attn" in name
    ]
    handles = [module.register_forward_hook(hook_for(name)) for name, module in leaves]
    try:
        return _Captured(outputs, inputs, run())
    finally:
        for handle in handles:
            handle.remove()


def _compare(model: Any, ours: _Captured, theirs: _Captured, num_tokens: int) -> list[Difference]:
    """Match their modules with ours through the model's own weight map, in the order in which theirs ran."""
    compared: list[Difference] = []
    for name, output in theirs.outputs.items():
        destination = model.weight_map.resolve(f"{name}.weight")
        if destination is None or destination.module not in ours.outputs:
            continue
        if name.endswith("o_proj"):
            # What enters the output projection is what attention gave: rotation, mask, softmax, cache.
            compared.append(
                _difference(name.replace("o_proj", "attention"), ours.inputs[destination.module], theirs.inputs[name])
            )
        mine = ours.outputs[destination.module]
        if destination.piece is not None:
            mine = _piece(model.get_submodule(destination.module), destination.piece, mine)
        if mine.shape[0] >= num_tokens:
            compared.append(_difference(name, mine, output))
    compared.append(_difference("logits", ours.result, theirs.result))
    if len(compared) < 3:
        raise ModelError("no op of the two models could be matched; the weight map names none of their modules")
    return compared


def _piece(layer: Any, piece: str, output: Any) -> Any:
    """The columns of a merged layer's output that belong to one of its pieces."""
    start = 0
    for name, (size, *_) in layer.pieces("weight").items():
        if name == piece:
            return output[:, start : start + size]
        start += size
    raise ModelError(f"the merged layer has no piece {piece!r}")


def _difference(name: str, ours: Any, theirs: Any) -> Difference:
    theirs = theirs.reshape(-1, theirs.shape[-1]) if ours.dim() == 2 else theirs.reshape(-1, *theirs.shape[-2:])
    ours = ours[: theirs.shape[0]].reshape(theirs.shape).float()
    scale = theirs.float().abs().max().clamp_min(1e-6)
    return Difference(name, float((ours - theirs.float()).abs().max() / scale))
