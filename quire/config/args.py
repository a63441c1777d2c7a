"""Command-line flags and the settings page, both generated from the settings' own fields and help texts."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from quire.config import env
from quire.config.engine import GROUP_TYPES, EngineConfig
from quire.config.groups import ServerConfig
from quire.config.server import check_server
from quire.types.errors import ConfigError
from quire.types.sampling import SamplingParams
from quire.utils.units import exact_bytes, parse_bytes

# The CLI prints one text and nothing else, so these have nothing to say there.
NOT_ON_THE_COMMAND_LINE = frozenset(
    {
        "n",
        "logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "detokenize",
        "output_kind",
        "stream_interval",
        "bad_words_token_ids",
        "thinking_marks",
        "extra_args",
        "return_routed_experts",
    }
)

_ENGINE = "engine."
_SAMPLING = "sampling."
_SERVER = "server."
_UNSET = (None, (), "")  # defaults that say nothing


@dataclass(frozen=True)
class Setting:
    """One field, as far as a flag or a table row needs to know it."""

    name: str
    type: Any  # without None
    default: Any
    help: str
    unit: str | None = None
    positional: bool = False
    short: str | None = None  # a second flag

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def engine_settings() -> dict[str, list[Setting]]:
    """Every engine setting, by group."""
    return {group: _dataclass_settings(group_type) for group, group_type in GROUP_TYPES.items()}


def server_settings() -> list[Setting]:
    """Every setting of `quire serve` that is not the engine's."""
    return _dataclass_settings(ServerConfig)


def sampling_settings() -> list[Setting]:
    """Every field of SamplingParams; its help is the docstring below it."""
    help_texts = _attribute_docstrings(SamplingParams)
    return [
        Setting(f.name, _without_none(f.type), f.default, help_texts.get(f.name, ""))
        for f in msgspec.structs.fields(SamplingParams)
    ]


def add_engine_arguments(
    parser: argparse.ArgumentParser, *, positional: bool = True, without: Iterable[str] = (), model: str | None = None
) -> None:
    """Add a flag for every engine setting, except the names in `without`.

    With `positional`, settings that are so marked (the model) may be given without their flag too. `model` is the
    command's own default, where it has one.
    """
    skipped = set(without)
    for group, settings in engine_settings().items():
        section = parser.add_argument_group(f"{group} settings", inspect.getdoc(GROUP_TYPES[group]))
        for setting in settings:
            if setting.name in skipped:
                continue
            default = setting.default if model is None or setting.name != "model" else model
            _add_flag(section, setting, _ENGINE, default)
            if positional and setting.positional:
                parser.add_argument(
                    _ENGINE + setting.name,
                    nargs="?",
                    default=argparse.SUPPRESS,
                    metavar=setting.name.upper(),
                    help=_help(setting, default),
                )


def add_sampling_arguments(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Add a flag for every sampling parameter; `defaults` are the command's own, where they differ."""
    section = parser.add_argument_group("sampling", "How to choose tokens and when to stop.")
    for setting in sampling_settings():
        if setting.name not in NOT_ON_THE_COMMAND_LINE:
            _add_flag(section, setting, _SAMPLING, defaults.get(setting.name, setting.default))


def add_server_arguments(parser: argparse.ArgumentParser, only: Container[str] | None = None) -> None:
    """Add a flag for every setting of the HTTP server, or for those named in `only`."""
    section = parser.add_argument_group("server settings", inspect.getdoc(ServerConfig))
    for setting in server_settings():
        if only is None or setting.name in only:
            _add_flag(section, setting, _SERVER, setting.default)


def engine_settings_from(namespace: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that were given, as flat keyword arguments for LLM or EngineConfig.from_flat."""
    return _given(namespace, _ENGINE)


def engine_config_from(namespace: argparse.Namespace) -> EngineConfig:
    return EngineConfig.from_flat(**engine_settings_from(namespace))


def server_config_from(namespace: argparse.Namespace) -> ServerConfig:
    given = _given(namespace, _SERVER)
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    config = ServerConfig(**values)
    check_server(config)
    return config


def sampling_params_from(namespace: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """SamplingParams of the flags that were given, over the command's own defaults."""
    return SamplingParams(**{**defaults, **_given(namespace, _SAMPLING)})


def reference_markdown() -> str:
    """The settings page: every engine and server setting, sampling parameter and environment variable."""
    parts = [
        "# Settings",
        "Generated from the settings' own definitions by `python tools/gen_docs.py`; edit those, not this page.",
        "An engine setting is a flag of the command line and, with underscores, a keyword argument of `LLM` and"
        " of `EngineConfig.from_flat`. `unset` means that the value is decided at start from the model and the"
        " machine; `quire run --explain` says how, and why.",
    ]
    for group, settings in engine_settings().items():
        parts += [f"## {group.capitalize()}", inspect.getdoc(GROUP_TYPES[group]) or "", _table(settings)]
    parts += [
        "## Server",
        inspect.getdoc(ServerConfig) or "",
        _table(server_settings()),
        "## Sampling",
        "Fields of `SamplingParams`. Those with a flag are also understood by `quire run` and `quire chat`,"
        " which have their own defaults for some (see their `--help`), and where `--seed` is this one.",
        _table(sampling_settings(), without_flag=NOT_ON_THE_COMMAND_LINE),
        "## Environment",
        _environment_table(),
    ]
    return "\n\n".join(parts) + "\n"


def _dataclass_settings(group_type: type[Any]) -> list[Setting]:
    hints = get_type_hints(group_type)
    return [
        Setting(
            name=f.name,
            type=_without_none(hints[f.name]),
            default=f.default,
            help=f.metadata["help"],
            unit=f.metadata["unit"],
            positional=f.metadata["positional"],
            short=f.metadata["short"],
        )
        for f in fields(group_type)
    ]


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        left = [part for part in get_args(annotation) if part is not NoneType]
        return Union[tuple(left)]  # noqa: UP007  (built at run time from a list)
    return annotation


def _attribute_docstrings(owner: type[Any]) -> dict[str, str]:
    """The strings that stand below a class's annotated attributes."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _add_flag(section: argparse._ArgumentGroup, setting: Setting, prefix: str, default: Any) -> None:
    """Absent flags leave no trace in the namespace, so that a default is written in one place only."""
    kind = setting.type
    options: dict[str, Any] = {"metavar": _metavar(setting)}
    if kind is bool:
        options = {"action": argparse.BooleanOptionalAction}
    elif get_origin(kind) is Literal:
        options = {"choices": get_args(kind)}
    elif setting.unit == "bytes":
        options["type"] = _read_bytes
    elif kind in (int, float, str):
        options["type"] = kind
    elif get_origin(kind) is tuple and get_args(kind)[0] in (int, str):
        options |= {"type": get_args(kind)[0], "action": "append"}
    else:
        options["type"] = _json_reader(setting)
    section.add_argument(
        *([] if setting.short is None else [setting.short]),
        setting.flag,
        dest=prefix + setting.name,
        default=argparse.SUPPRESS,
        help=_help(setting, default),
        **options,
    )


def _read_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _json_reader(setting: Setting) -> Callable[[str], Any]:
    # A dataclass is made of its fields by EngineConfig.from_flat, which names those that are unknown.
    kind = dict[str, Any] if is_dataclass(setting.type) else setting.type

    def read(text: str) -> Any:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not the JSON expected here: {error}") from error

    return read


def _metavar(setting: Setting) -> str:
    if setting.unit is not None:
        return setting.unit.upper()
    return {int: "N", float: "X", str: "TEXT"}.get(setting.type) or (
        {int: "N", str: "TEXT"}[get_args(setting.type)[0]] if get_origin(setting.type) is tuple else "JSON"
    )


def _help(setting: Setting, default: Any) -> str:
    parts = [setting.help] if setting.help else []
    if get_origin(setting.type) is tuple:
        parts.append("May be given several times.")
    if default not in _UNSET:
        parts.append(f"Default: {_shown(default, setting.unit)}.")
    return " ".join(parts).replace("%", "%%")


def _given(namespace: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in vars(namespace).items() if name.startswith(prefix)}


def _shown(value: Any, unit: str | None) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if unit == "bytes":
        return exact_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type_text(setting: Setting) -> str:
    kind = setting.type
    if setting.unit is not None:
        return setting.unit
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else f"`{kind}`"


def _table(settings: Iterable[Setting], without_flag: frozenset[str] = frozenset()) -> str:
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for setting in settings:
        name = f"`{setting.name}`" if setting.name in without_flag else f"`{setting.flag}`"
        default = "unset" if setting.default in _UNSET else f"`{_shown(setting.default, setting.unit)}`"
        rows.append(f"| {name} | {_type_text(setting)} | {default} | {setting.help} |")
    return "\n".join(rows)


def _environment_table() -> str:
    rows = ["| variable | meaning |", "|---|---|"]
    for _, reader in inspect.getmembers(env, inspect.isfunction):
        text = inspect.getdoc(reader) or ""
        variables = sorted(set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", text)))
        if variables:
            rows.append(f"| {', '.join(f'`{name}`' for name in variables)} | {' '.join(text.split())} |")
    return "\n".join(rows)
