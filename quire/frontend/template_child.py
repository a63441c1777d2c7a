"""The process that renders chat templates that may not be trusted, or take long; its parent kills it when it is late.

Reads requests from stdin and writes answers to stdout, each JSON after its length. Imports only what rendering needs.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import struct
import sys
from typing import IO, Any

from quire.frontend.chat_template import ChatTemplate
from quire.types.errors import RequestError, TokenizerError

MAX_MEMORY = 1 << 30  # bytes of address space
_SPARE_SECONDS = 1.0
_LENGTH = struct.Struct("<Q")


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """None at the end of the stream, or where it ends too early."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


@functools.lru_cache(maxsize=8)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The prompt, or what is wrong with the template or the conversation."""
    try:
        template = _compiled(request["source"], tuple(request["special_tokens"].items()))
        return {"prompt": template.render(**request["arguments"])}
    except RequestError as error:
        return {"error": str(error), "field": error.field}
    except TokenizerError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "the chat template takes too much memory; give another with chat_template"}


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not disturb the answers
    write_frame(answers, b"")  # ready
    while (data := read_frame(requests)) is not None:
        request = json.loads(data)
        # The parent kills a process that is late; should it be gone, the system does.
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + request["seconds"] + _SPARE_SECONDS) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        write_frame(answers, json.dumps(answer(request)).encode())
        del request, data
    return 0


if __name__ == "__main__":
    sys.exit(main())
