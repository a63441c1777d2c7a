"""The page of commands, made of their own parsers: what each does, its words, and its flags but for the settings."""

from __future__ import annotations

import argparse

from quire.cli.main import TASKS, build_parser

_SETTINGS = ("engine.", "server.", "sampling.")
_EVERYWHERE = ("-h", "--debug", "--help-all")


def reference_markdown() -> str:
    parts = [
        "# Commands",
        "Generated from the commands' own definitions by `python tools/gen_docs.py`; edit those, not this page.",
        "Flags that are [settings](settings.md) are not repeated here; `quire COMMAND --help-all` lists those of a"
        " command. Every command has `--help`, and `--debug`, which shows debug messages and tracebacks.",
    ]
    for task, commands in TASKS.items():
        parts.append(f"## {task}")
        for name, summary in commands.items():
            parts += [f"### quire {name}", f"{summary[0].upper()}{summary[1:]}."]
            top = build_parser(name)
            (found,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
            parts += _described(found.choices[name])
    return "\n\n".join(parts) + "\n"


def _described(parser: argparse.ArgumentParser) -> list[str]:
    rows = [
        f"| {_name(action)} | {_text(action)} |"
        for action in parser._actions
        if not action.dest.startswith(_SETTINGS) or not action.option_strings
        if not set(action.option_strings) & set(_EVERYWHERE) and not isinstance(action, argparse._SubParsersAction)
    ]
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in kinds:
        rows += [f"| `{choice.dest}` | {_text(choice)} |" for choice in action._choices_actions]
    return ["\n".join(["| | |", "|---|---|", *rows])] if rows else []


def _name(action: argparse.Action) -> str:
    shown = action.option_strings or [str(action.metavar or action.dest)]
    return ", ".join(f"`{name}`" for name in shown)


def _text(action: argparse.Action) -> str:
    text = ((action.help or "") % vars(action)).replace("|", "\\|")
    return f"{text[:1].upper()}{text[1:]}"
