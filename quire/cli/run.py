"""`quire run [MODEL] [PROMPT]`: one prompt in, the answer streamed to stdout; or its settings, with --explain.

As with Ollama, a model without a prompt is talked with on a terminal.
"""

from __future__ import annotations

import argparse
import sys

from quire.cli.chat import converse
from quire.cli.loading import open_llm
from quire.cli.parser import Parser
from quire.cli.screen import screen
from quire.cli.stream import print_answer
from quire.config.args import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_settings_from,
    sampling_params_from,
)
from quire.config.engine import EngineConfig
from quire.loader.hub import names_model
from quire.types.errors import ConfigError, RequestError

COMMON = (
    *("--model", "--system", "--raw", "--temperature", "--max-tokens", "--stop", "--seed"),
    *("--max-model-len", "--quantization", "--explain"),
)
# Greedy by default, so that scripts get the same output every time.
DEFAULTS = {"temperature": 0.0, "max_tokens": None}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] [PROMPT]",
        help="what to answer, and before it the model; without a prompt, or with -, it is read from stdin, and on a"
        " terminal a model alone is talked with",
    )
    parser.words, parser.common = "words", COMMON
    parser.usage = "quire run [MODEL] [PROMPT] [flags]"
    parser.add_argument("--system", metavar="TEXT", help="instructions to put before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="only print every setting with its reason, and the planned memory",
    )
    add_sampling_arguments(parser, DEFAULTS)
    add_engine_arguments(parser, positional=False, without={"seed"})


def run(args: argparse.Namespace) -> int:
    settings = engine_settings_from(args)
    model, prompt = model_and_prompt(args.words, has_model="model" in settings)
    if model is not None:
        settings["model"] = model
    if args.explain:
        return explain(EngineConfig.from_flat(**settings))
    if model is not None and prompt is None and sys.stdin.isatty():
        return converse(args, settings)
    params = sampling_params_from(args, **DEFAULTS, output_kind="delta")
    prompt = read_prompt(prompt)
    llm = open_llm(settings)  # after the arguments are known to be good: this is slow
    request = prompt if args.raw else messages(prompt, args.system)
    with screen("wrap") as out:
        answer = print_answer(llm.stream(request, params), out)
    if sys.stderr.isatty():
        print(answer.stats(), file=sys.stderr)
    if answer.interrupted:
        raise KeyboardInterrupt
    return 0


def model_and_prompt(words: list[str], *, has_model: bool) -> tuple[str | None, str | None]:
    """What the words of the command line mean: two are a model and a prompt, one is a model if it can be."""
    if len(words) > 2 or (len(words) == 2 and has_model):
        raise ConfigError(f"unexpected argument {words[-1]!r}; put quotation marks around the prompt")
    if len(words) == 2:
        return words[0], words[1]
    if len(words) == 1 and not has_model and names_model(words[0]):
        return words[0], None
    return None, words[0] if words else None


def explain(config: EngineConfig) -> int:
    """Print what the engine would run with. Loads no weights and reads no prompt."""
    from quire.engine.settings import check_settings

    check_settings(config)
    from quire.planning.engine_plan import plan_engine  # imports torch: only once the arguments are known to be good

    plan = plan_engine(config, needs_weights=False)
    print(*plan.settings.explain(), plan.ledger.format(), sep="\n")
    return 0


def read_prompt(argument: str | None) -> str:
    prompt = argument
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            print("Reading the prompt from the terminal; end it with Ctrl-D.", file=sys.stderr)
        prompt = sys.stdin.read().strip()
    if not prompt:
        raise RequestError("the prompt is empty; give a text as the argument or on stdin", "prompt")
    return prompt


def messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    instructions = [{"role": "system", "content": system}] if system else []
    return [*instructions, {"role": "user", "content": prompt}]
