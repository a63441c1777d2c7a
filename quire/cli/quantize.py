"""`quire quantize MODEL --scheme w4a16 --out DIR`: a quantized checkpoint, and what it costs in perplexity."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.args import add_engine_arguments, engine_config_from
from quire.config.engine import EngineConfig
from quire.config.groups import ModelConfig
from quire.types.errors import ConfigError, TokenizerError

if TYPE_CHECKING:
    from quire.loader.hub import ModelSource
    from quire.planning.engine_plan import EnginePlan

SCHEMES = ("w8a8-int8", "w8a8-fp8", "w8a16", "w4a16", "w4a16-asym", "nvfp4", "mxfp4")
WINDOW = 1024  # tokens that are judged at a time
# What a folder has besides its weights and its config.
BESIDE = (
    "tokenizer*",
    "generation_config.json",
    "*.jinja",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.model",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--scheme", required=True, choices=SCHEMES, help="How weights are quantized.")
    parser.add_argument("--out", required=True, metavar="DIR", help="An empty or new folder for the checkpoint.")
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="Inputs that share a scale (w4a16: 128, 64 or 32, as fits; w4a16-asym: 32).",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="A text: its perplexity is printed before and after. Unset: none is."
    )


def run(args: argparse.Namespace) -> int:
    config, folder = engine_config_from(args), Path(args.out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out is {args.out!r}, which is not an empty folder; name another one")
    if args.group_size is not None and args.group_size < 1:
        raise ConfigError(f"group_size is {args.group_size}; it must be at least 1")
    text = None if args.text is None else _read(Path(args.text))
    from quire.engine.settings import check_settings

    check_settings(config)
    from quire.planning.engine_plan import plan_engine  # imports torch: only once the arguments are known to be good

    plan = plan_engine(config)
    before = None if text is None else perplexity(config, text)
    num_bytes = write_checkpoint(plan, args.scheme, args.group_size, folder)
    if plan.source.kind == "gguf":
        write_text_files(config.model, plan.source, folder)
    print(f"{folder}: {num_bytes / 1e6:.1f} MB of weights, {args.scheme}")
    if text is not None and before is not None:
        tokenizer = config.model.tokenizer or str(plan.source.path)
        after = perplexity(EngineConfig.from_flat(model=str(folder), tokenizer=tokenizer), text)
        print(f"perplexity {before:.4f} before, {after:.4f} after ({100 * (after / before - 1):+.2f} %)")
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text is {str(path)!r}, which cannot be read ({error}); name a text file") from error


def write_checkpoint(plan: EnginePlan, scheme: str, group_size: int | None, folder: Path) -> int:
    """Write a model quantized by a scheme to a folder; return the bytes of its weights."""
    import torch

    from quire.loader.quantize import choose_group_size, handled_tensors, quantize_checkpoint
    from quire.models.registry import generator_class

    checkpoint = plan.checkpoint
    if checkpoint is None:
        raise ConfigError("load_format is 'dummy', which has no weights to quantize; leave --load-format out")
    with torch.device("meta"):
        model = generator_class(plan.model_config).from_config(plan.model_config, plan.context)
    handled, plain = handled_tensors(model, checkpoint.tensors())
    inputs = {name: how.inputs for name, how in handled.items() if how.inputs is not None}
    group = choose_group_size(scheme, group_size, inputs)
    folder.mkdir(parents=True, exist_ok=True)
    named = plan.model_config.get("dtype") or plan.model_config.get("torch_dtype")
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(str(named))
    if dtype is None:  # scales of GGUF blocks are float16
        dtype = torch.float16 if plan.source.kind == "gguf" else torch.bfloat16
    size = quantize_checkpoint(checkpoint, handled, plain, scheme, group, folder, dtype, _show)
    if plan.source.kind == "folder":
        for path in {path for pattern in BESIDE for path in plan.source.path.glob(pattern)}:
            shutil.copy(path, folder / path.name)
    return size


def write_text_files(model: ModelConfig, source: ModelSource, folder: Path) -> None:
    """Write what a GGUF file says of text and sampling as the files that a folder has for it."""
    from quire.frontend.tokenizer import load_tokenizer, save_tokenizer
    from quire.loader.hub import resolve_model
    from quire.loader.model_config import load_generation_config

    given = load_generation_config(source)
    try:
        tokenizer = load_tokenizer(source.path if model.tokenizer is None else resolve_model(model.tokenizer).path)
    except TokenizerError as error:
        print(f"{folder} has no tokenizer, so name one to serve it (--tokenizer FOLDER): {error}", file=sys.stderr)
    else:
        save_tokenizer(tokenizer, folder)
        given["eos_token_id"] = list(tokenizer.eos_token_ids)
    (folder / "generation_config.json").write_text(json.dumps(given, indent=2) + "\n")


def _show(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rtensor {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def perplexity(config: EngineConfig, text: str) -> float:
    """exp of the mean negative log-probability of the tokens of a text, in windows of their own."""
    import torch

    from quire.frontend.text_model import load_text_model
    from quire.worker.direct import DirectModel

    tokenizer = load_text_model(config.model).tokenizer
    assert tokenizer is not None
    direct = DirectModel(config)
    ids = tokenizer.encode(text, add_special_tokens=False)
    window, loss, count = min(WINDOW, direct.max_model_len), 0.0, 0
    if len(ids) < 2:
        raise ConfigError(f"text has {len(ids)} tokens; give one of at least 2")
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, window):
            part = ids[start : start + window]
            if len(part) < 2:
                break
            logits = direct.logits(part)[:-1].double()
            loss += float(torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="sum"))
            count += len(part) - 1
    return math.exp(loss / count)
