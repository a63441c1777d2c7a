"""`quire verify MODEL`: run Quire and transformers on the same tokens and name the first op that differs.

The one place at run time that imports transformers, and only when it is called (extra `verify`).
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from quire.config.args import add_engine_arguments, engine_config_from
from quire.config.engine import EngineConfig
from quire.types.errors import ConfigError, ModelError

DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog. In the year 1969, the first people walked on the moon."
TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-1  # of float32, and of the shorter types
FIRST_LAYER = "layers.0"
_WITHOUT_EFFECT = 1e-4  # of an op's difference, at most this part of it is left behind the layer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--text", default=DEFAULT_TEXT, help="What to run both on.")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="Largest difference relative to an op's scale. Unset: 1e-4, or 0.1 in half precision.",
    )


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
        layer, op = self.place
        return f"{f'layer {layer}, ' if layer else ''}{op} (off by {self.relative:.1e})"

    @property
    def place(self) -> tuple[str, str]:
        """The layer and the op within it."""
        match = re.search(r"layers\.(\d+)\.(.+)", self.name)
        return (match[1], match[2]) if match else ("", self.name)


@dataclass(frozen=True)
class Report:
    num_tokens: int
    compared: list[Difference]  # in the order in which they run
    tolerance: float
    num_agreeing: int  # positions where both would choose the same next token
    left_out: tuple[str, ...] = ()  # modules whose results have other shapes in transformers

    @property
    def first(self) -> Difference | None:
        others = self.without_effect
        return next((d for d in self.compared if not d.relative <= self.tolerance and d not in others), None)

    @property
    def without_effect(self) -> list[Difference]:
        """Ops that differ in some layer behind which nothing does: heads in another order, or scaled later."""
        found: set[str] = set()
        layers = [list(ops) for _, ops in groupby(self.compared, lambda d: d.place[0])]
        for ops, (behind, *_) in pairwise(layers):
            limit = max(self.tolerance, behind.relative / _WITHOUT_EFFECT)
            # What an indexer's difference leaves behind says nothing: it may choose the same keys all the same.
            found |= {d.place[1] for d in ops if d.relative > limit and ".indexer." not in d.name}
        return [d for d in self.compared if d.relative > self.tolerance and d.place[1] in found]

    def format(self) -> str:
        """What was compared, and the verdict as the last line."""
        worst = max(self.compared, key=lambda difference: (math.isnan(difference.relative), difference.relative))
        lines = [
            f"{len(self.compared)} ops compared on {self.num_tokens} tokens, tolerance {self.tolerance:g}",
            f"worst: {worst.describe()}",
            f"greedy next token: the same at {self.num_agreeing} of {self.num_tokens} positions",
        ]
        if others := self.without_effect:
            lines.insert(1, f"other values to the same effect: {', '.join(d.describe() for d in others)}")
        if self.left_out:
            lines.insert(1, f"left out, for their results have other shapes: {', '.join(self.left_out)}")
        if self.first is None:
            return "\n".join([*lines, "EQUAL"])
        last_good = self.compared.index(self.first) - 1
        if last_good >= 0:
            lines.append(f"still equal: {self.compared[last_good].describe()}")
        return "\n".join([*lines, f"DIFFERENT, first at {self.first.describe()}"])


def verify(config: EngineConfig, text: str = DEFAULT_TEXT, tolerance: float | None = None) -> Report:
    """Run both models on `text` and compare them op by op."""
    if config.model.load_format == "dummy":
        raise ConfigError(
            "load_format is 'dummy', but made-up weights have nothing to be compared with; leave it out"
        )
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"--tolerance is {tolerance:g} but must be above 0")
    from quire.engine.settings import check_settings
    from quire.loader.hub import find_model

    check_settings(config)
    token_ids = _encode(config, text)
    auto_model = _import_transformers()
    import torch

    from quire.loader.open import open_checkpoint
    from quire.models.registry import describe, generator_class
    from quire.planning.engine_plan import plan_engine
    from quire.worker.direct import DirectModel

    model_config = open_checkpoint(find_model(config.model)).config
    generator_class(model_config)  # refuses a model without an LM head
    if config.model.max_model_len is None:
        if len(token_ids) > (most := describe(model_config).max_position_embeddings):
            raise ConfigError(f"--text has {len(token_ids)} tokens but the model takes {most}; shorten the text")
        # Some RoPE variants depend on the longest context there may be; transformers takes the one at hand.
        config = replace(config, model=replace(config.model, max_model_len=len(token_ids)))
    if config.cache.kv_cache_dtype == "auto":
        # transformers keeps keys and values in the type it computes in.
        dtype: Any = str(plan_engine(config).dtype).removeprefix("torch.")
        config = replace(config, cache=replace(config.cache, kv_cache_dtype=dtype))
    if config.model.activations == "auto":  # nor does it round what it multiplies
        config = replace(config, model=replace(config.model, activations="float32"))
    direct = DirectModel(config)
    token_ids = [token for token in token_ids if token < direct.vocab_size][: direct.max_model_len]
    reference = _load_reference(auto_model, find_model(config.model).path, direct.dtype)
    with torch.inference_mode():
        ours = _capture(direct.model, lambda: direct.logits(token_ids))
        theirs = _capture(reference, lambda: reference(torch.tensor([token_ids])).logits[0])
    compared, left_out = _compare(direct.model, ours, theirs, len(token_ids))
    agree = int((ours.result.argmax(-1) == theirs.result.argmax(-1)).sum())
    if tolerance is None:
        tolerance = TOLERANCE if direct.dtype == torch.float32 else HALF_TOLERANCE
    return Report(len(token_ids), compared, tolerance, agree, left_out)


def _encode(config: EngineConfig, text: str) -> list[int]:
    from quire.frontend.tokenizer import load_tokenizer
    from quire.loader.hub import find_model, resolve_model

    name = config.model.tokenizer
    source = find_model(config.model) if name is None else resolve_model(name)
    token_ids = load_tokenizer(source.path).encode(text)
    if not token_ids:
        raise ConfigError(f"--text is {text!r}, which gives no tokens; give at least one word")
    return token_ids


def _import_transformers() -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("verify needs transformers; install it with: pip install 'quire[verify]'") from error
    return AutoModelForCausalLM


def _load_reference(auto_model: Any, path: Path, dtype: Any) -> Any:
    # Eager attention: the only one that every architecture's soft-capping goes through.
    options = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    try:
        if path.suffix == ".gguf":
            model, found = auto_model.from_pretrained(path.parent, gguf_file=path.name, **options)
        else:
            model, found = auto_model.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"transformers cannot load {path}, so there is nothing to compare with: {cause}; try a newer"
            " transformers, with the packages that it asks for"
        ) from error
    if found["missing_keys"]:  # which it makes up
        names = sorted(found["missing_keys"])
        raise ModelError(
            f"transformers does not find {len(names)} tensors of its {type(model).__name__} in {path}, such as"
            f" {names[0]}, so there is nothing to compare with; try a newer transformers"
        )
    return model


@dataclass(frozen=True)
class _Captured:
    outputs: dict[str, Any]  # module name -> its output, in the order of execution
    inputs: dict[str, Any]  # module name -> its first input
    result: Any


def _capture(model: Any, run: Callable[[], Any]) -> _Captured:
    """Run with a hook on every module."""
    from quire.layers.weights import WeightedLayer

    outputs: dict[str, Any] = {}
    inputs: dict[str, Any] = {}

    def hook_for(name: str) -> Callable[[Any, tuple[Any, ...], Any], None]:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            outputs[name] = _tensor_of(output).detach().clone().cpu()
            if args:
                inputs[name] = _tensor_of(args[0]).detach().clone().cpu()

        return hook

    watched = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, WeightedLayer)
        or not list(module.children())
        or "attn" in name
        or name.endswith(FIRST_LAYER)
    ]
    with ExitStack() as stack:
        for name, module in watched:
            stack.callback(module.register_forward_hook(hook_for(name)).remove)
            _watch_fused_norms(stack, module, hook_for(name))
        return _Captured(outputs, inputs, run().cpu())


def _tensor_of(passed: Any) -> Any:
    """What one module passes to another as a tensor; of several things the first."""
    from quire.layers.fusion import whole

    passed = whole(passed)
    return _tensor_of(passed[0]) if isinstance(passed, tuple) else passed


def _watch_fused_norms(stack: ExitStack, module: Any, hook: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
    """Norms that are no module of their own while the model runs: with an addition before them, or of each head."""
    from quire.layers.norm import RMSNorm
    from quire.models.blocks import AttentionBlock, PerHeadQKNorm

    if isinstance(module, RMSNorm):
        merge = module.merge

        def watched_merge(hidden: Any, residual: Any) -> Any:
            result = merge(hidden, residual)
            hook(module, (hidden,), result)
            return result

        vars(module)["merge"] = watched_merge
        stack.callback(vars(module).pop, "merge")
    if isinstance(module, AttentionBlock) and isinstance(module.qk_norm, PerHeadQKNorm):
        projection, norm = module.qkv_proj, module.qk_norm

        def run_norms(_: Any, args: tuple[Any, ...]) -> None:
            """Attention applies them itself: apply them to the same heads, for the hooks to see."""
            for layer, piece in ((norm.q, "q_proj"), (norm.k, "k_proj")):
                layer(_piece(projection, piece, _tensor_of(args[0])).unflatten(-1, (-1, layer.weight.shape[0])))

        stack.callback(norm.register_forward_pre_hook(run_norms).remove)


def _compare(
    model: Any, ours: _Captured, theirs: _Captured, num_tokens: int
) -> tuple[list[Difference], tuple[str, ...]]:
    """Match their modules with ours through the model's own weight map, in the order in which theirs ran.

    Also the names of those that match and have results of other shapes, such as a sparse indexer.
    """
    from quire.layers.weights import WeightedLayer

    compared: list[Difference] = []
    left_out: list[str] = []
    for name, output in theirs.outputs.items():
        destination = model.weight_map.resolve(f"{name}.weight")
        if destination is None or destination.module not in ours.outputs or name.endswith(FIRST_LAYER):
            continue
        if name.endswith("o_proj"):
            # What enters the output projection is what attention gave: rotation, mask, softmax, cache.
            compared.append(
                _difference(name.replace("o_proj", "attention"), ours.inputs[destination.module], theirs.inputs[name])
            )
        if name.endswith("embed_tokens"):
            # Some scale embeddings inside this module and some after it: what counts is what the layers get.
            mine, output = _input_of(FIRST_LAYER, ours), _input_of(FIRST_LAYER, theirs)
            compared.append(_difference(name, mine, output))
            continue
        mine, layer = ours.outputs[destination.module], model.get_submodule(destination.module)
        if destination.piece is not None:
            mine = _piece(layer, destination.piece, mine)
        if isinstance(layer, WeightedLayer) and (order := layer.kept_order(destination.piece)) is not None:
            output = output[..., order]
        if not _layouts(mine, output):
            left_out.append(name)
        elif mine.shape[0] >= num_tokens:
            compared.append(_difference(name, mine, output))
    compared.append(_difference("logits", ours.result, theirs.result))
    if len(compared) < 3:
        raise ModelError("no op of the two models could be matched; the weight map names none of their modules")
    return compared, tuple(left_out)


def _input_of(suffix: str, captured: _Captured) -> Any:
    return next(value for name, value in captured.inputs.items() if name.endswith(suffix))


def _piece(layer: Any, piece: str, output: Any) -> Any:
    """The columns of a merged layer's output that belong to one of its pieces."""
    start = 0
    for name, (size, *_) in layer.pieces("weight").items():
        order = layer.kept_order(name)
        size = size if order is None else len(order)
        if name == piece:
            return output[:, start : start + size]
        start += size
    raise ModelError(f"the merged layer has no piece {piece!r}")


def _layouts(ours: Any, theirs: Any) -> list[Any]:
    """Their result in the layouts that ours may have.

    ours: [tokens or more, ...]; theirs: the same with a batch of one before it, heads perhaps before tokens.
    """
    theirs = theirs.squeeze(0).float()
    if ours.dim() == 2:
        return [theirs.reshape(-1, ours.shape[1])] if theirs.numel() % ours.shape[1] == 0 else []
    layouts = [theirs, theirs.transpose(0, 1)] if ours.dim() == 3 and theirs.dim() > 1 else [theirs]
    return [layout for layout in layouts if layout.shape[1:] == ours.shape[1:]]


def _difference(name: str, ours: Any, theirs: Any) -> Difference:
    scale = float(theirs.abs().max().clamp_min(1e-6))
    apart = [
        float((ours[: layout.shape[0]].float() - layout).abs().max()) / scale for layout in _layouts(ours, theirs)
    ]
    # With as many tokens as heads both layouts are possible, and the wrong one is far off.
    return Difference(name, min(apart))
