"""`quire run PROMPT`: one prompt in, the answer streamed to stdout; or, with --explain, what it would run with."""

from __future__ import annotations

import argparse
import sys

from quire.cli.stream import print_answer
from quire.config.args import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_config_from,
    engine_settings_from,
    sampling_params_from,
)
from quire.types.errors import RequestError

# Greedy by default, so that scripts get the same output every time.
DEFAULTS = {"temperature": 0.0, "max_tokens": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to answer; absent or -: read from stdin")
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
    if args.explain:
        return explain(args)
    params = sampling_params_from(args, **DEFAULTS, output_kind="delta")
    prompt = read_prompt(args.prompt)
    from quire import LLM  # after the arguments are known to be good: this import is slow

    llm = LLM(**engine_settings_from(args))
    request = prompt if args.raw else messages(prompt, args.system)
    answer = print_answer(llm.stream(request, params), sys.stdout)
    if sys.stderr.isatty():
        print(answer.stats(), file=sys.stderr)
    if answer.interrupted:
        raise KeyboardInterrupt
    return 0


def explain(args: argparse.Namespace) -> int:
    """Print what the engine would run with. Loads no weights and reads no prompt."""
    config = engine_config_from(args)
    from quire.engine.settings import check_settings

    check_settings(config)
    from quire.worker.planning import plan_engine  # imports torch: only once the arguments are known to be good

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
