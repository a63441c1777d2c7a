"""Where chat templates run: jinja2's immutable sandbox with the additions that published templates rely on.

A template comes with a model or with a request, so it may not touch Python, run for ever or eat the memory:
time and the size of what is made are held to a budget. One operation in C cannot be stopped, so operands are looked
at before it begins. Knows nothing of conversations.
"""

from __future__ import annotations

import functools
import itertools
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
MAX_SECONDS = 5.0
MAX_INTEGER_BITS = 4096
MAX_DEPTH = 300  # of lists and objects; what a template is given has at most 256 levels
MAX_INDENT = 64
_QUICK_SECONDS = 0.02
_QUICK_CHARACTERS = 4 * 2**20
_MOST_MADE = 32  # times what one value may have: all values together
# "%100000000d" makes a hundred million characters; "%*d" and "{:{}}" take the width from what they format.
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]{0,20}?\d{5,}|\{[^{}]*\d{5,}")
_WIDTH_FROM_ARGUMENTS = re.compile(r"%[^a-zA-Z%]{0,20}\*|\{[^{}]*\{")
_MOST_DIGITS = 400  # that a number is rounded to
_NUMBER_METHODS = frozenset({"bit_length", "bit_count", "conjugate", "is_integer"})
SYSTEM_DATE = "quire_system_date"
"""The variable that says what day it is for a template, as YYYY-MM-DD; plain text, so that it can go anywhere."""


class RaisedByTemplateError(jinja2.TemplateError):
    """The template called raise_exception: it refuses this conversation, in its own words."""


class BudgetError(jinja2.TemplateError):
    """The template ran too long or made something too large."""


class Budget:
    """What one rendering may use."""

    clock = staticmethod(time.monotonic)

    def __init__(self, max_characters: int = MAX_CHARACTERS, max_seconds: float = MAX_SECONDS) -> None:
        self._max_characters = max_characters
        self._max_seconds = max_seconds
        self._deadline = self.clock() + max_seconds
        self._num_made = 0
        # By id: the container, kept so that its id stays its own, its size and its depth.
        self._measured: dict[int, tuple[Any, int, int]] = {}

    def step(self) -> None:
        """Count a loop round, a call, an operator or a filter."""
        if self.clock() > self._deadline:
            raise BudgetError(f"it ran for more than {self._max_seconds:g} seconds")

    def allow(self, size: int) -> None:
        """Refuse a text or a list that would be larger than the limit, or one too many."""
        self._num_made += max(size, 0)
        if size > self._max_characters or self._num_made > _MOST_MADE * self._max_characters:
            raise BudgetError(f"it made more than {self._max_characters:,} characters or items")

    def allow_value(self, value: Any) -> None:
        """Refuse a value whose text would be larger than the limit, or that is nested too deeply."""
        if isinstance(value, str):
            self.allow(len(value))
        elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise BudgetError(f"it made an integer of more than {MAX_INTEGER_BITS} bits")
        elif isinstance(value, _CONTAINERS):
            self.allow(self._measure(value)[0])

    def _measure(self, value: Any) -> tuple[int, int]:
        """(characters and items, depth) of a value. What stands in it twice counts twice, and is measured once."""
        if isinstance(value, str):
            return len(value), 0
        if not isinstance(value, _CONTAINERS):
            return 1, 0
        known = self._measured.get(id(value))
        if known is None:
            size, depth = 1 + len(value), 1
            items = itertools.chain(value.keys(), value.values()) if isinstance(value, dict) else value
            for item in items if size <= self._max_characters else ():
                inner_size, inner_depth = self._measure(item)
                size, depth = size + inner_size, max(depth, 1 + inner_depth)
            if depth > MAX_DEPTH or size > self._max_characters:
                raise BudgetError(f"it made lists of more than {self._max_characters:,} items or {MAX_DEPTH} levels")
            known = self._measured[id(value)] = (value, size, depth)
        return known[1:]


class QuickBudget(Budget):
    """What a rendering may use where others wait for it: a few milliseconds of this thread's time."""

    clock = staticmethod(time.thread_time)

    def __init__(self) -> None:
        super().__init__(_QUICK_CHARACTERS, _QUICK_SECONDS)


_CONTAINERS = (list, tuple, dict, set, frozenset)


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
    """Makes loops count rounds, and `~` and literals check what they make: the sandbox has no hook for these."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filter(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, "_made")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, "_made")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, "_made") if node.ctx == "load" else node

    def _filter(self, node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _join_within_budget(parts: Iterable[str]) -> str:
    """How macros and `{% set %}` blocks gather what their bodies wrote."""
    parts = list(parts)
    _budget.get().allow(sum(map(len, parts)))
    return "".join(parts)


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """Counts calls, and looks at sizes before texts and lists are multiplied or joined."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    concat = staticmethod(_join_within_budget)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        for name in list(self.filters):
            self.filters[name] = _checked_filter(name, self.filters[name])
        del self.globals["lipsum"]
        self.filters["_counted"] = _counted
        self.filters["_concat"] = _concat
        self.filters["_made"] = _made
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Instrument().generic_visit(template)
        template.set_environment(self)
        return template

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        owner = function.__self__ if isinstance(function, BuiltinMethodType) else None
        if isinstance(owner, str):
            _check_text_operation(function.__name__, owner, [*args, *kwargs.values()])
        elif isinstance(owner, bytes | int | float) and function.__name__ not in _NUMBER_METHODS:
            raise BudgetError(f"it calls {function.__name__} of a {type(owner).__name__}, which no chat needs")
        result = super().call(context, function, *args, **kwargs)
        _budget.get().allow_value(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        # The sandbox has its own str.format, which `call` does not see as a method of str.
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            return _checked_format(value.__self__, wrapped)
        return None

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        _check_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        budget.allow_value(result)
        return result


def _check_operator(operator: str, left: Any, right: Any) -> None:
    allow = _budget.get().allow
    sequences = (str, list, tuple)
    if isinstance(left, int) and isinstance(right, int):
        bits = {"**": left.bit_length() * max(right, 0), "*": left.bit_length() + right.bit_length()}
        most = max(left.bit_length(), right.bit_length(), bits.get(operator, 0))
        if most > MAX_INTEGER_BITS:
            raise BudgetError(f"it made an integer of more than {MAX_INTEGER_BITS} bits")
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
        if _WIDTH_FROM_ARGUMENTS.search(str(subject)):
            raise BudgetError("it formats with a width that is not written out")
        numbers = []
        fields = str(subject).count("{") + str(subject).count("%")
        allow(len(str(subject)) + fields * max((_length(value) for value in arguments), default=0))
    elif name == "round" and sum(numbers) > _MOST_DIGITS:
        raise BudgetError(f"it rounds to more than {_MOST_DIGITS} digits")
    elif name == "translate":
        raise BudgetError("it calls translate, whose result may have any size")
    elif name == "expandtabs":
        allow(len(subject) + subject.count("\t") * max([*numbers, 8]))
    elif name == "replace" and len(texts) >= 2:
        subject = str(subject)
        allow(len(subject) + subject.count(texts[0]) * len(texts[1]))
    elif name == "join":
        # As a method the separator is the subject; as a filter it is the argument.
        items, separator = (arguments[0], subject) if isinstance(subject, str) and arguments else (subject, "")
        if isinstance(items, (list, tuple)):
            allow(sum(len(item) for item in items if isinstance(item, str)) + len(separator) * len(items))
    if name in _WIDENING:
        lines = str(subject).count("\n") + 1 if name == "indent" else 1
        allow(sum(numbers) * lines)


# Filters and methods of str that take a width or a number of parts.
_WIDENING = frozenset({"batch", "center", "indent", "slice", "wordwrap", "ljust", "rjust", "zfill"})


def _length(value: Any) -> int:
    """Characters of a value as text, about."""
    if isinstance(value, str):
        return len(value)
    return _budget.get()._measure(value)[0] * 2 if isinstance(value, _CONTAINERS) else 64


def _checked_format(subject: str, function: Callable[..., str]) -> Callable[..., str]:
    def checked(*args: Any, **kwargs: Any) -> str:
        _check_text_operation("format", subject, [*args, *kwargs.values()])
        return function(*args, **kwargs)

    return checked


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # jinja2 passes the context or environment first to filters that carry a mark, which `wraps` keeps.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        _check_text_operation(name, args[first] if len(args) > first else "", [*args[first + 1 :], *kwargs.values()])
        result = function(*args, **kwargs)
        budget.allow_value(result)
        return result

    return checked


@pass_context
def _counted(_context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    step = _budget.get().step
    for item in iterable:
        step()
        yield item


@pass_context
def _made(_context: Context, value: Any) -> Any:
    _budget.get().allow_value(value)
    return value


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
    _budget.get().allow_value(value)
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise BudgetError(f"it indents by {indent}, more than {MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise RaisedByTemplateError(str(message))


@pass_context
def _strftime_now(context: Context, format: str) -> str:
    """The time now, or midnight of the date that SYSTEM_DATE pins."""
    pinned = context.get(SYSTEM_DATE)
    return (datetime.now() if pinned is None else datetime.fromisoformat(pinned)).strftime(format)
