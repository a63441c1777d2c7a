"""A hostile template ends with an error, soon and without eating the memory."""

from __future__ import annotations

import resource
import time

import pytest

from quire.frontend.template_sandbox import Budget, BudgetError, SandboxEnvironment, render_within

BOMBS = {
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "silent loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "multiplied text": "{{ 'x' * 10 ** 10 }}",
    "multiplied list": "{{ ([1] * 10 ** 10)|length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "doubling by +": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by block": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}"
        "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}"
    ),
    "doubling by join": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = [n.x, n.x]|join %}{% endfor %}"
    ),
    "doubling by replace": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x|replace('x', 'xx') %}{% endfor %}"
    ),
    "doubling by method": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x.replace('x', 'xx') %}{% endfor %}"
    ),
    "joined method": "{{ ('x' * 1000000).join(['y'] * 1000000) }}",
    "wide method": "{{ 'x'.ljust(10 ** 10) }}",
    "wide filter": "{{ 'x'|center(10 ** 10) }}",
    "wide format": "{{ '{:10000000000}'.format(1) }}",
    "wide percent": "{{ '%10000000000d' % 1 }}",
    "division of integers": "{% set a=3**9000000 %}{% set b=7**2000000 %}{{ (a//b)%7 }}",
    "squares": "{% set n = namespace(x=7) %}{% for i in range(30) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "compared lists": (
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(40) %}"
        "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"
    ),
    "printed lists": (
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ n.x }}"
    ),
    "lists by +": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x] + [n.x] %}{% endfor %}",
    "json": "{% set n = namespace(x={}) %}{% for i in range(40) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}",
    "dict()": "{% set n = namespace(x={}) %}{% for i in range(40) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
    "deep lists": "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor %}",
    "kept texts": (
        "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + ['x' * 1000000 ~ i] %}{% endfor %}"
    ),
    "indented json": "{{ {'a': [1, 2]}|tojson(indent=100000000) }}",
    "repeated field": "{{ ('{0}' * 10000).format('x' * 1000000) }}",
    "repeated percent": "{{ ('%(a)s' * 10000) % {'a': 'x' * 1000000} }}",
    "width in arguments": "{{ '%*d' % (10000000000, 1) }}",
    "width in format": "{{ '{:{}}'.format(1, 10000000000) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "tabs": "{{ ('\\t' * 1000000).expandtabs(100000) }}",
    "bytes": "{{ 'x'.encode().ljust(10000000000) }}",
    "bytes of a number": "{{ (1).to_bytes(10000000000, 'big') }}",
    "rounded": "{{ 5|round(-1000000000) }}",
    "rounded up": "{{ 5|round(1000000000, 'ceil') }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_stopped(source: str) -> None:
    template = SandboxEnvironment().from_string(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    with pytest.raises((BudgetError, OverflowError)):
        render_within(template, {}, Budget(max_characters=2**20, max_seconds=0.2))
    assert time.monotonic() - begin < 5  # 0.2 s, and what a busy machine makes of it
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024


def test_an_honest_template_stays_within_the_budget() -> None:
    source = "{% for i in range(5000) %}{{ '%05d' % i }}{{ 'a' ~ i }}{{ ['a', i]|join('-') }}{% endfor %}"
    text = render_within(SandboxEnvironment().from_string(source), {}, Budget())
    assert text == "".join(f"{i:05d}a{i}a-{i}" for i in range(5000))


def test_the_loop_variable_knows_the_whole_loop() -> None:
    source = "{% for i in items %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex }},{% endfor %}"
    text = render_within(SandboxEnvironment().from_string(source), {"items": "ab"}, Budget())
    assert text == "1/2False2,2/2True1,"
