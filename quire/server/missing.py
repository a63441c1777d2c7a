"""Routes of other servers that this one does not have: which of its capabilities is missing, for the 404."""

from __future__ import annotations

_NO_SPEECH = "it neither hears nor speaks"
_NO_FILES = "it keeps no files and runs no batches"

_NO_CHANGES = "it changes no models of this machine; use the command line"

# By the beginning of the path: whole segments.
MISSING = {
    "/v1/audio": _NO_SPEECH,
    "/v1/realtime": _NO_SPEECH,
    "/v1/images": "it makes no images",
    "/v1/videos": "it makes no videos",
    "/v1/classify": "its classes are at /classify",
    "/v1/moderations": "it moderates nothing; classify with a model for that, at /classify",
    "/embeddings": "its embeddings are at /v1/embeddings",
    "/v1/messages/batches": f"{_NO_FILES}; send each message to /v1/messages",
    "/v1/batches": f"{_NO_FILES}; send each request by itself",
    "/v1/files": _NO_FILES,
    "/v1/uploads": _NO_FILES,
    "/v1/vector_stores": _NO_FILES,
    "/v1/fine_tuning": "it does not train",
    "/api/pull": f"{_NO_CHANGES}: quire pull NAME",
    "/api/delete": f"{_NO_CHANGES}: quire rm NAME",
    "/api/create": f"{_NO_CHANGES}: quire quantize, or put a .gguf file into Quire's folder of models",
    "/api/copy": f"{_NO_CHANGES}: quire list says where models are",
    "/api/push": f"{_NO_CHANGES}: it pushes models nowhere",
    "/api/blobs": f"{_NO_CHANGES}: quire list says where models are",
    "/v1/assistants": "it keeps no assistants; use /v1/responses",
    "/v1/threads": "it keeps no threads; use /v1/responses with previous_response_id",
    "/v1/conversations": "it keeps no conversations; use /v1/responses with previous_response_id",
}


def missing_capability(path: str) -> str | None:
    """The missing capability behind a path of another server, if the path is a known one."""
    segments = path.split("/")
    beginnings = ("/".join(segments[:count]) for count in range(len(segments), 1, -1))
    return next((MISSING[beginning] for beginning in beginnings if beginning in MISSING), None)
