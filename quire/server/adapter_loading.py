"""AdapterLoader: adapters come and go while the server runs, by vLLM's routes and by verbs of the admin surface."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from pathlib import Path

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.responses import PlainTextResponse, Response

from quire.loader.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_ref
from quire.server.adapters import ServedAdapters
from quire.server.body import JsonRoute
from quire.server.context import EngineProvider
from quire.server.errors import NotFoundError
from quire.types.errors import AdapterError, RequestError
from quire.types.request import AdapterRef
from quire.utils.log import get_logger

logger = get_logger(__name__)

_LONGEST_NAME = 256


class LoadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be served under which name; the fields are vLLM's."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # whether the name may be an adapter's already


class UnloadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None  # means nothing here


class AdapterLoader:
    """Changes the adapters that are served. Whatever is wrong with one is said before anything changes."""

    def __init__(
        self,
        served: ServedAdapters,
        provider: EngineProvider,
        root: str | None,
        model_names: Sequence[str],
        taken_names: Container[str] = (),
    ) -> None:
        """`root` is the folder that all adapters are below; None: none can be loaded. Others have `taken_names`."""
        self._served, self._provider, self._model_names = served, provider, model_names
        self._taken_names = taken_names
        self._root = None if root is None else Path(root).expanduser().resolve()

    async def load(self, wanted: LoadAdapter) -> AdapterRef:
        """Serve an adapter, once the engine has read and checked it. RequestError, and no change, if it cannot be.

        Requests that run with what the name stood for before go on with that.
        """
        name = wanted.lora_name
        self._check_name(name, wanted.load_inplace)
        folder = self._folder(wanted.lora_path)
        try:
            ref = await asyncio.to_thread(adapter_ref, name, str(folder))
        except (AdapterError, OSError) as error:
            raise RequestError(f"lora_path: {error}", "lora_path") from error
        await self._provider.engine.load_adapter(ref)
        self._check_name(name, wanted.load_inplace)  # another call may have come first
        self._served.put(ref)
        logger.info("adapter %r is served now, from %s", name, ref.path)
        return ref

    async def unload(self, wanted: UnloadAdapter) -> AdapterRef:
        """Serve an adapter no more; requests that run with it go on."""
        ref = self._served.remove(wanted.lora_name)
        if ref is None:
            known = ", ".join(self._served.names) or "none"
            raise NotFoundError(f"there is no adapter {wanted.lora_name[:100]!r}; known: {known}", "lora_name")
        logger.info("adapter %r is served no more", ref.name)
        return ref

    def _check_name(self, name: str, in_place: bool) -> None:
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            raise RequestError(f"lora_name is {name[:100]!r} but must be a name", "lora_name")
        if name in self._model_names:
            raise RequestError(f"lora_name is {name!r}, which is the model's own name; give another", "lora_name")
        if name in self._taken_names:
            raise RequestError(f"lora_name is {name!r}, which is another model's name; give another", "lora_name")
        if not in_place and self._served.get(name) is not None:
            raise RequestError(
                f"the adapter {name!r} is loaded already; set load_inplace, or unload it first", "lora_name"
            )

    def _folder(self, path: str) -> Path:
        """The folder that is meant, and nothing of it outside of the root, wherever symbolic links lead."""
        if self._root is None:
            raise RequestError("adapters cannot be loaded here; start the server with --lora-root DIR", "lora_path")
        try:
            folder = (self._root / path).resolve()
            found = [folder, *((folder / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE))]
        except (OSError, ValueError, RuntimeError) as error:
            raise RequestError(f"lora_path is {path[:200]!r}, which is no path: {error}", "lora_path") from error
        if not all(each.is_relative_to(self._root) for each in found):
            raise RequestError(f"lora_path {path[:200]!r} is not below --lora-root {self._root}", "lora_path")
        return folder


class LoadLoRARequest(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"lora_name": "sql", "lora_path": "sql"}]})

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoRARequest(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"lora_name": "sql"}]})

    lora_name: str
    lora_int_id: int | None = None


def adapters_router(loader: AdapterLoader) -> APIRouter:
    router = APIRouter(tags=["Server"], route_class=JsonRoute)

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadLoRARequest) -> Response:
        """Serve a LoRA adapter from a folder below --lora-root. Needs the admin key."""
        ref = await loader.load(LoadAdapter(body.lora_name, body.lora_path, body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter {ref.name!r} added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadLoRARequest) -> Response:
        """Serve a LoRA adapter no more. Needs the admin key."""
        ref = await loader.unload(UnloadAdapter(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter {ref.name!r} removed successfully.")

    return router
