"""LoRARequest: which adapter a request is to be answered with."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from quire.loader.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_ref
from quire.types.errors import AdapterError, RequestError
from quire.types.request import AdapterRef


class LoRARequest(msgspec.Struct, frozen=True):
    """A LoRA adapter in a folder that PEFT has saved it into. What it is, is the bytes there, whatever its name."""

    lora_name: str
    lora_int_id: int = 0
    """Means nothing here; other engines tell adapters apart by it."""
    lora_path: str = ""


def find_adapter(request: LoRARequest | None) -> AdapterRef | None:
    """RequestError if its folder has no adapter that can be served."""
    if request is None:
        return None
    if not isinstance(request, LoRARequest):
        raise RequestError(f"lora_request is {request!r} but must be LoRARequest(...)", "lora_request")
    folder = Path(request.lora_path)
    try:
        states = [(folder / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
        key = tuple((state.st_mtime_ns, state.st_size, state.st_ino) for state in states)
        return _found(request.lora_name, request.lora_path, key)
    except (OSError, AdapterError) as error:
        raise RequestError(f"lora_request {request.lora_name!r}: {error}", "lora_request") from error


@lru_cache(maxsize=4096)
def _found(name: str, path: str, state: tuple[tuple[int, int, int], ...]) -> AdapterRef:
    """`state` changes with the files."""
    return adapter_ref(name, path)
