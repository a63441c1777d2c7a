"""Where chat templates run: jinja2's immutable sandbox with the additions that published templates rely on.

A template comes with a model or with a request, so it may not touch Python, run for ever or eat the memory:
loop rounds, calls and the size of what is made are held to a budget. Knows nothing of conversations.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 32 * 2**20  # of one rendering, and of any value made on the way
MAX_SECONDS = 20.0
_STEPS_PER_CLOCK_READING = 256
_WIDE_FIELD = re.compile(r"\d{8,}")  # "%100000000d" makes a hundred million characters


class RaisedByTemplateError(jinja2.TemplateError):
    """The template called raise_exception: it refuses this conversation, in its own words."""


class BudgetError(jinja2.TemplateError):
    """The template ran too long or made something too large."""


class Budget:
    """What one rendering may use."""

    def __init__(self, max_characters: int = MAX_CHARACTERS, max_seconds: float = MAX_SECONDS) -> None:
        self._max_characters = max_characters
        self._max_seconds = max_seconds
        self._deadline = time.monotonic() + max_seconds
        self._num_steps = 0

    def step(self) -> None:
        """Count a loop round or a call."""
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_CLOCK_READING == 0 and time.monotonic() > self._deadline:
            raise BudgetError(f"it ran for more than {self._max_seconds:g} seconds")

    def allow(self, size: int) -> None:
        """Refuse a text, a list or a number of bits that would be larger than the limit."""
        if size > self._max_characters:
            raise BudgetError(f"it made more than {self._max_characters:,} characters or items")


# A rendering runs in one thread from start to end; the environment is shared by all of them.
_budget: ContextVar[Budget] = ContextVar("template_budget")


def render_within(template: jinja2.Template, variables: dict[str, Any], budget: Budget) -> str:
    """Render, raising BudgetError as soon as the budget is spent."""
    token = _budget.set(budget)
    chunks: list[str] = []
    size = 0
    try:
        for chunk in template.generate(variables):
            size += len(chunk)
            budget.step()
            budget.allow(size)
            chunks.append(chunk)
    finally:
        _budget.reset(token)
    return "".join(chunks)


class GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote; for inference its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Instrument(NodeTransformer):
    """Makes loops count their rounds and `~` check its result, which no hook of the sandbox sees."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filter(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def _filter(self, node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _join_within_budget(parts: Iterable[str]) -> str:
    """How macros and `{% set %}` blocks gather what their bodies wrote."""
    parts = list(parts)
    _budget.get().allow(sum(map(len, parts)))
    return "".join(parts)


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """Counts calls, and looks at sizes before texts and lists are multiplied or joined."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(_join_within_budget)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        for name in ("batch", "center", "format", "indent", "join", "replace", "slice", "wordwrap"):
            self.filters[name] = _checked_filter(name, self.filters[name])
        self.filters["tojson"] = _tojson
        self.filters["_counted"] = _counted
        self.filters["_concat"] = _concat
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Instrument().generic_visit(template)
        template.set_environment(self)
        return template

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        if isinstance(function, BuiltinMethodType) and isinstance(function.__self__, str):
            _check_text_operation(function.__name__, function.__self__, [*args, *kwargs.values()])
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        # The sandbox has its own str.format, which `call` does not see as a method of str.
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_text_operation("format", value.__self__, [])
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _check_operator(operator: str, left: Any, right: Any) -> None:
    allow = _budget.get().allow
    sequences = (str, list, tuple)
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            allow(left.bit_length() * max(right, 0))
        elif operator == "*":
            allow(left.bit_length() + right.bit_length())
    elif operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
        allow(len(left) + len(right))
    elif operator == "*" and isinstance(left, sequences) and isinstance(right, int):
        allow(len(left) * right)
    elif operator == "*" and isinstance(right, sequences) and isinstance(left, int):
        allow(len(right) * left)
    elif operator == "%" and isinstance(left, str):
        _check_text_operation("format", left, [right])


def _check_text_operation(name: str, subject: Any, arguments: Sequence[Any]) -> None:
    """Bound the result of a filter or a method of str before it is made."""
    allow = _budget.get().allow
    numbers = [abs(value) for value in arguments if isinstance(value, int)]
    texts = [value for value in arguments if isinstance(value, str)]
    if name == "format":
        if _WIDE_FIELD.search(str(subject)):
            allow(10**8)
        numbers = []
    elif name == "replace" and len(texts) >= 2:
        subject = str(subject)
        allow(len(subject) + subject.count(texts[0]) * len(texts[1]))
    elif name == "join":
        # As a method the separator is the subject; as a filter it is the argument.
        items, separator = (arguments[0], subject) if isinstance(subject, str) and arguments else (subject, "")
        if isinstance(items, (list, tuple)):
            allow(sum(len(item) for item in items if isinstance(item, str)) + len(separator) * len(items))
    lines = str(subject).count("\n") + 1 if name in ("indent", "expandtabs") else 1
    allow(sum(numbers) * lines)


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # jinja2 passes the context or environment first to filters that carry a mark, which `wraps` keeps.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_text_operation(name, args[first], [*args[first + 1 :], *kwargs.values()])
        return function(*args, **kwargs)

    return checked


@pass_context
def _counted(_context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    step = _budget.get().step
    for item in iterable:
        step()
        yield item


@pass_context
def _concat(_context: Context, values: list[Any]) -> str:
    return _join_within_budget(map(str, values))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML and sorts keys, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise RaisedByTemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
