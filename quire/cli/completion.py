"""`quire completion bash | zsh | fish`: the shell's completion of commands, flags and their values.

Made from the commands' own parsers, so that a new flag is completed without a line here.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from quire.cli.main import COMMANDS, build_parser
from quire.loader.aliases import ALIASES
from quire.loader.local import local_models

_WITH_MODELS = ("run", "chat", "serve", "fit", "pull", "show", "rm", "quantize", "verify")


@dataclass(frozen=True)
class Flag:
    name: str
    help: str
    values: tuple[str, ...]  # those that there are, if they can be counted
    takes_value: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")
    parser.add_argument("--models", action="store_true", help="print the names of models, which the script asks for")


def run(args: argparse.Namespace) -> int:
    if args.models:
        print(*sorted({*ALIASES, *(model.name for model in local_models())}), sep="\n")
        return 0
    print(SHELLS[args.shell or "bash"](), end="")
    return 0


@cache
def tree() -> dict[str, list[Flag]]:
    """The flags of each command, and of each of a command's own: "serve", "bench serve"."""
    found: dict[str, list[Flag]] = {}
    for name in COMMANDS:
        parser = build_parser(name)
        (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        _walk(name, commands.choices[name], found)
    return found


def _walk(path: str, parser: argparse.ArgumentParser, found: dict[str, list[Flag]]) -> None:
    found[path] = [flag for action in parser._actions for flag in _flags(action)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                _walk(f"{path} {name}", child, found)


def _flags(action: argparse.Action) -> Iterator[Flag]:
    text = "" if action.help in (None, argparse.SUPPRESS) else str(action.help).replace("%%", "%")
    values = tuple(str(choice) for choice in action.choices or ())
    for name in action.option_strings:
        if name.startswith("--"):
            yield Flag(name, text.partition(". ")[0].rstrip("."), values, action.nargs != 0)


def bash() -> str:
    lines = [
        '# quire\'s completion; put `eval "$(quire completion bash)"` into ~/.bashrc',
        "_quire() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" last="${COMP_WORDS[COMP_CWORD-1]}" path="${COMP_WORDS[1]}"',
        '    [ "$path" = bench ] && [ "$COMP_CWORD" -gt 2 ] && path="bench ${COMP_WORDS[2]}"',
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        COMPREPLY=($(compgen -W {shlex.quote(" ".join(COMMANDS))} -- "$word"))',
        "        return",
        "    fi",
        '    case "$path $last" in',
    ]
    for path, flags in tree().items():
        for flag in flags:
            if flag.values:
                words = shlex.quote(" ".join(flag.values))
                lines.append(f'        "{path} {flag.name}") COMPREPLY=($(compgen -W {words} -- "$word")); return ;;')
    lines += ["    esac", '    case "$path" in']
    for path, flags in tree().items():
        words = shlex.quote(" ".join(_words_after(path) + [flag.name for flag in flags]))
        models = "$(quire completion --models 2>/dev/null)" if path in _WITH_MODELS else ""
        lines.append(f'        "{path}")')
        lines.append(f'            COMPREPLY=($(compgen -W {words}" {models}" -- "$word"))')
        lines.append("            ;;")
    lines += [
        "    esac",
        '    [ "${#COMPREPLY[@]}" -eq 0 ] && COMPREPLY=($(compgen -f -- "$word"))',
        "    return 0",
        "}",
    ]
    return "\n".join([*lines, "complete -o filenames -F _quire quire", ""])


def zsh() -> str:
    lines = [
        "#compdef quire",
        '# quire\'s completion; put `eval "$(quire completion zsh)"` after compinit in ~/.zshrc',
        "_quire() {",
        '    local command="${words[2]}" last="${words[CURRENT-1]}"',  # `path` is a name of zsh's own
        '    [[ "$command" == bench && $CURRENT -gt 3 ]] && command="bench ${words[3]}"',
        "    local -a found",
        "    if (( CURRENT == 2 )); then",
        f"        found=({' '.join(_zsh(name, summary) for name, summary in COMMANDS.items())})",
        "        _describe command found",
        "        return",
        "    fi",
        '    case "$command $last" in',
    ]
    for path, flags in tree().items():
        for flag in flags:
            if flag.values:
                lines.append(f'        "{path} {flag.name}") compadd -- {shlex.join(flag.values)}; return ;;')
    lines += ["    esac", '    case "$command" in']
    for path, flags in tree().items():
        described = " ".join([*map(shlex.quote, _words_after(path)), *(_zsh(flag.name, flag.help) for flag in flags)])
        models = ' compadd -- ${(f)"$(quire completion --models 2>/dev/null)"};' if path in _WITH_MODELS else ""
        lines.append(f'        "{path}") found=({described}); _describe flag found;{models} _files ;;')
    return "\n".join([*lines, "    esac", "}", "compdef _quire quire", ""])


def fish() -> str:
    lines = [
        "# quire's completion; put `quire completion fish | source` into ~/.config/fish/config.fish",
        "function __quire_at",  # whether the words before the cursor begin with these
        "    set -l words (commandline -opc)",
        "    set -l last (math 1 + (count $argv))",
        '    test "$words[2..$last]" = "$argv"',
        "end",
        "function __quire_after",  # whether they are these
        "    __quire_at $argv; and test (count (commandline -opc)) -eq (math 1 + (count $argv))",
        "end",
    ]
    for name, summary in COMMANDS.items():
        lines.append(f"complete -c quire -f -n 'test (count (commandline -opc)) -eq 1' -a {name} -d {_fish(summary)}")
    for path, flags in tree().items():
        seen = f"__quire_at {path}"
        for word in _words_after(path):
            lines.append(f"complete -c quire -f -n '__quire_after {path}' -a {word}")
        if path in _WITH_MODELS:
            lines.append(f"complete -c quire -n '{seen}' -a '(quire completion --models 2>/dev/null)'")
        for flag in flags:
            value = " -r" if flag.takes_value else ""
            values = f" -f -a {_fish(' '.join(flag.values))}" if flag.values else ""
            lines.append(
                f"complete -c quire -n '{seen}' -l {flag.name[2:]}{value}{values}"
                + (f" -d {_fish(flag.help)}" if flag.help else "")
            )
    return "\n".join([*lines, ""])


def _words_after(path: str) -> list[str]:
    """Words that may follow a command."""
    if path == "completion":
        return list(SHELLS)
    return [name.rpartition(" ")[2] for name in tree() if name.rpartition(" ")[0] == path]


def _zsh(name: str, text: str) -> str:
    return shlex.quote(f"{name}:{text}" if text else name)


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
