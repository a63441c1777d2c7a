"""LoRA adapters as PEFT stores them: a folder with adapter_config.json and adapter_model.safetensors. Torch-free."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quire.loader.model_config import PICKLED
from quire.loader.module_patterns import compile_pattern, is_plain
from quire.types.errors import AdapterError
from quire.types.request import AdapterRef
from quire.utils.turns import no_rest

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
_MOST_PATTERNS, _MOST_PATTERN_TEXT, _MOST_COMPLEX_TEXT = 4096, 256 << 10, 4 << 10
_CHUNK = 1 << 18
_MOST_WEIGHT_BYTES = 16 << 30  # rank 512 on all layers of a model of 70 billion parameters


class PeftConfig(msgspec.Struct, frozen=True):
    """What adapter_config.json says; other keys are about training."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    modules_to_save: list[str] | None = None
    trainable_token_indices: Any = None

    def scale(self, module: str, rank: int) -> float:
        """The factor on what an adapter of this rank adds to a module."""
        alpha = next((value for key, value in self.alpha_pattern.items() if _names(key, module)), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, module: str) -> int:
        return next((value for key, value in self.rank_pattern.items() if _names(key, module)), self.r)


def _names(pattern: str, module: str) -> bool:
    """Whether a key of a pattern means this module, as PEFT reads it: at the end of the module's path."""
    return compile_pattern(pattern)(module)


def _check_patterns(path: Path, config: PeftConfig) -> None:
    keys = [*config.rank_pattern, *config.alpha_pattern]
    length = sum(map(len, keys))
    if len(keys) > _MOST_PATTERNS or length > _MOST_PATTERN_TEXT:
        raise AdapterError(
            f"{path}: rank_pattern and alpha_pattern have {len(keys)} keys of {length} characters; at most"
            f" {_MOST_PATTERNS} keys of {_MOST_PATTERN_TEXT} characters are read"
        )
    if (length := sum(len(key) for key in keys if not is_plain(key))) > _MOST_COMPLEX_TEXT:
        raise AdapterError(
            f"{path}: patterns that are more than names have {length} characters; at most {_MOST_COMPLEX_TEXT}"
        )
    for key in keys:
        compile_pattern(key)


def adapter_ref(name: str, path: str) -> AdapterRef:
    """The adapter in a folder, once its config is known to be one that can be served; AdapterError if it is not."""
    folder = Path(path)
    if not folder.is_dir():
        raise AdapterError(f"adapter {name!r}: {path} is no folder; give one that PEFT has saved an adapter into")
    config = read_peft_config(folder)
    size = existing(folder, WEIGHTS_FILE).stat().st_size
    if size > _MOST_WEIGHT_BYTES:
        raise AdapterError(f"{folder / WEIGHTS_FILE} has {size} bytes; an adapter has at most {_MOST_WEIGHT_BYTES}")
    return AdapterRef(name, digest_of(folder), str(folder.resolve()), max(config.r, *config.rank_pattern.values(), 0))


def digest_of(folder: Path, rest: Callable[[], None] = no_rest) -> str:
    """Of the bytes of an adapter's files. `rest` is called often."""
    found = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        of_file = hashlib.sha256()
        with existing(folder, name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                of_file.update(chunk)
                rest()
        found.update(of_file.digest())
    return found.hexdigest()


def existing(folder: Path, name: str) -> Path:
    path = folder / name
    if path.is_file():
        return path
    pickled = sorted(each.name for each in folder.glob("adapter_model*") if each.suffix in PICKLED)
    hint = f"; {', '.join(pickled)} is pickled (it could run code): save it as safetensors" if pickled else ""
    raise AdapterError(f"{folder} has no {name}{hint or '; give a folder that PEFT has saved an adapter into'}")


def read_peft_config(folder: Path) -> PeftConfig:
    path = existing(folder, CONFIG_FILE)
    if path.stat().st_size > _MOST_CONFIG_BYTES:
        raise AdapterError(f"{path} has {path.stat().st_size} bytes; a config has at most {_MOST_CONFIG_BYTES}")
    try:
        config = msgspec.json.decode(path.read_bytes(), type=PeftConfig)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; save or download the adapter again") from None
    refusals = {
        f"peft_type is {config.peft_type!r}; only LORA can be served": config.peft_type.upper() != "LORA",
        "use_dora is set; merge the adapter into its base model (merge_and_unload) and serve that": config.use_dora,
        f"modules_to_save has {config.modules_to_save}: whole modules beside the adapter; merge it into its base"
        " model (merge_and_unload) and serve that": bool(config.modules_to_save),
        "trainable_token_indices is set; merge the adapter into its base model": bool(config.trainable_token_indices),
        f"bias is {config.bias!r}; only adapters that train no biases can be served": config.bias != "none",
        "fan_in_fan_out is set, which no model here has": config.fan_in_fan_out,
    }
    _check_patterns(path, config)
    for refusal, applies in refusals.items():
        if applies:
            raise AdapterError(f"{path}: {refusal}")
    return config
