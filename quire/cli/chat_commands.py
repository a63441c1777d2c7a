"""The commands of a chat, all but the conversation itself: settings, and conversations that are kept in files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from quire.config import env
from quire.config.args import NOT_ON_THE_COMMAND_LINE, sampling_settings
from quire.types.errors import RequestError
from quire.types.sampling import SamplingParams

HELP = """\
/set parameter NAME VALUE  change how tokens are chosen, such as temperature 0.2
/set system TEXT           give the conversation other instructions
/set wordwrap | markdown | plain   how answers are shown
/set verbose | quiet       show or hide the speed after an answer
/show                      what is set
/save NAME, /load NAME     keep the conversation, go on with one that was kept
/clear                     forget the conversation
/help                      this list
/exit, /bye                leave; so does Ctrl-D
\"\"\"                        begins and ends a message of several lines
Ctrl-C stops an answer, not the program."""
# What Ollama calls them.
_OTHER_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_NAME = re.compile(r"[\w.-]{1,100}")


class SavedChat(msgspec.Struct):
    """A conversation in a file."""

    model: str
    messages: list[dict[str, str]]


def with_parameter(params: SamplingParams, text: str) -> SamplingParams:
    """The parameters with one changed, of the form NAME VALUE. RequestError says what is wrong with it."""
    name, _, value = text.strip().partition(" ")
    name = _OTHER_NAMES.get(name, name)
    known = {setting.name: setting for setting in sampling_settings() if setting.name not in NOT_ON_THE_COMMAND_LINE}
    if name not in known:
        raise RequestError(f"there is no parameter {name!r}; there are: {', '.join(known)}")
    if not value:
        raise RequestError(f"give a value too: /set parameter {name} VALUE")
    return msgspec.structs.replace(params, **{name: _converted(name, value.strip(), known[name].type)})


def _converted(name: str, value: str, kind: Any) -> Any:
    if name == "stop":
        return [value]
    if value.lower() in ("none", "unset"):
        return None
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        pass
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError as error:
        raise RequestError(f"{name} cannot be {value!r}: {error}") from error


def chats_folder() -> Path:
    return env.cache_dir() / "chats"


def save_chat(name: str, chat: SavedChat) -> Path:
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(chat)))
    return path


def load_chat(name: str) -> SavedChat:
    path = _path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedChat)
    except FileNotFoundError as error:
        kept = sorted(file.stem for file in path.parent.glob("*.json"))
        raise RequestError(
            f"no conversation {name!r} was saved; there are: {', '.join(kept)}" if kept else "none was saved yet"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error


def _path(name: str) -> Path:
    if _NAME.fullmatch(name) is None or name.startswith("."):
        raise RequestError(f"{name!r} is no name for a conversation; use letters, digits and any of . _ -")
    return chats_folder() / f"{name}.json"
