"""What is served, as Ollama's clients ask for it: /api/tags, /api/ps, /api/show."""

from __future__ import annotations

from quire.server.context import LATEST, ServerContext
from quire.server.ollama.answer import timestamp
from quire.server.ollama.protocol import (
    Details,
    ModelEntry,
    ModelInfo,
    ModelList,
    RunningModel,
    RunningModels,
    ShowRequest,
)

_NEVER = "2318-01-01T00:00:00Z"  # what Ollama says of models that are not to be unloaded


def model_list(*contexts: ServerContext) -> ModelList:
    return ModelList([entry for context in contexts for entry in _entries(context)])


def _entries(context: ServerContext) -> list[ModelEntry]:
    described, details = context.description, _details(context)
    when = timestamp(described.modified or context.created)
    return [
        ModelEntry(tagged(name), tagged(name), when, described.num_bytes, _digest(context, name), details)
        for name in context.served_names
    ]


def running_models(*contexts: ServerContext) -> RunningModels:
    """Those models that are loaded and do not sleep."""
    return RunningModels([model for context in contexts for model in _running(context)])


def _running(context: ServerContext) -> list[RunningModel]:
    longest, keep_alive = context.max_model_len(), context.keep_alive
    if longest is None or (keep_alive is not None and keep_alive.is_asleep):
        return []
    described, details = context.description, _details(context)
    expires = None if keep_alive is None else keep_alive.expires_at
    until = _NEVER if expires is None else timestamp(expires)
    return [
        RunningModel(
            tagged(name), tagged(name), described.num_bytes, _digest(context, name), details, until, 0, longest
        )
        for name in context.served_names
    ]


def show_model(context: ServerContext, body: ShowRequest) -> ModelInfo:
    name = context.check_model(body.model or body.name)
    described = context.description
    info: dict[str, str | int] = {"general.architecture": described.family}
    if described.num_parameters is not None:
        info["general.parameter_count"] = described.num_parameters
    longest = context.max_model_len() or described.context_length
    for key, value in (("context_length", longest), ("embedding_length", described.embedding_length)):
        if value is not None:
            info[f"{described.family or 'model'}.{key}"] = value
    adapter = "" if context.adapters.get(name) is None else f"ADAPTER {name}\n"
    template = context.text.own_template(with_tools=True)
    return ModelInfo(
        modelfile=f"# Served by Quire.\nFROM {tagged(context.model_names[0] if adapter else name)}\n{adapter}",
        parameters="",
        template="" if template is None else template.source,
        details=_details(context),
        model_info=info,
        capabilities=capabilities(context),
        modified_at=timestamp(described.modified or context.created),
    )


def capabilities(context: ServerContext) -> list[str]:
    """In Ollama's words."""
    able, formats = context.tasks() or ("generate",), context.formats
    if "generate" not in able:
        return ["embedding"]
    extra = [("tools", formats.tool is not None), ("thinking", formats.reasoning is not None)]
    return ["completion", *(name for name, has in (*extra, ("embedding", "embed" in able)) if has)]


def tagged(name: str) -> str:
    """Names of models have a tag in Ollama."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _digest(context: ServerContext, name: str) -> str:
    adapter = context.adapters.get(name)
    return context.description.digest if adapter is None else adapter.digest


def _details(context: ServerContext) -> Details:
    described = context.description
    return Details(
        "",
        described.format,
        described.family,
        [described.family] if described.family else [],
        described.parameter_size,
        described.quantization,
    )
