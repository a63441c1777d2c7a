"""The scanner agrees with Python's own JSON on what is JSON, wherever the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.parsers.codec import Status
from quire.parsers.json_scan import JsonScanner, escaped, parse_object, to_json
from tests.parsers.helpers import SEEDS, TEXTS, cuts, values

SOUP = st.lists(
    st.sampled_from(
        ['"', "\\", "{", "}", "[", "]", ",", ":", " ", "1", "-", ".", "e", "true", "null", "a", "\\u12", "\n"]
    ),
    max_size=12,
).map("".join)


def scan(pieces: list[str]) -> tuple[Status, str, str]:
    """How it ends, what was read, and what was left."""
    scanner, held, read = JsonScanner(), "", ""
    for piece in pieces:
        held += piece
        held = held[scanner.scan(held, 0) :]
        read += scanner.take()
    held = held[scanner.scan(held, 0, final=True) :]
    return scanner.status, read + scanner.take(), held


def is_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, strict=False, parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(values(TEXTS), SEEDS)
def test_values_are_read_to_their_end(value: object, seed: int) -> None:
    for text in (to_json(value), json.dumps(value, indent=1)):
        for pieces in cuts(text + "<rest>", seed, 3):
            status, read, left = scan(pieces)
            assert (status, read, left) == (Status.DONE, text, "<rest>")


@given(SOUP, SEEDS)
def test_what_is_wrong_is_wrong_wherever_it_is_cut(text: str, seed: int) -> None:
    whole = scan([text])
    assert all(scan(pieces) == whole for pieces in cuts(text, seed, 4))
    status, read, left = whole
    # Its white space is JSON's, which is less than what strip() takes off.
    if status is Status.DONE and not left.strip(" \t\n\r"):
        assert is_json(text)
        assert json.loads(read) == json.loads(text, strict=False)
    else:
        assert not is_json(text)


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "01", "1.", "+1", ".5", '"\\x"', "{a: 1}", "'a'", "[1,]", '{"a"}']
)
def test_only_json_is_json(text: str) -> None:
    status, _, left = scan([text])
    assert status is not Status.DONE or left


def test_line_breaks_in_strings_become_escapes() -> None:
    assert scan(['{"a": "x\n\ty"}'])[1] == '{"a": "x\\n\\ty"}'


def test_an_escape_is_waited_for() -> None:
    scanner = JsonScanner()
    assert scanner.scan('"a\\u00', 0) == 2
    assert scanner.scan("\\u00e9b", 0) == 7
    assert scanner.take() == '"a\\u00e9b'
    assert scanner.in_string


@given(st.text(alphabet=st.characters()))
def test_text_can_be_put_into_strings(text: str) -> None:
    inside = escaped(text)
    assert json.loads(f'"{inside}"') == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    inside.encode()  # also text that has no UTF-8 form


@given(st.lists(st.sampled_from(["\\ud83d", "\\uDE00", "\\\\", "\\n", "ude00", "x", "\\u0041"]), max_size=8), SEEDS)
def test_half_of_a_surrogate_pair_is_replaced_wherever_it_is_cut(parts: list[str], seed: int) -> None:
    text = f'{{"a": "{"".join(parts)}"}}'
    wanted = json.loads(text)["a"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for pieces in cuts(text, seed, 4):
        status, read, left = scan(pieces)
        assert (status, left) == (Status.DONE, "")
        assert json.loads(read) == {"a": wanted}
    assert parse_object(text) == {"a": wanted}


@pytest.mark.parametrize("text", ["[1]", '{"a": NaN}', '{"a": tru', '{"a": ' + "[" * 5000])
def test_what_is_no_object_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"it is of type list|it holds NaN|Expecting value|nested too deep"):
        parse_object(text)


def test_deep_nesting_is_no_danger() -> None:
    assert scan(["[" * 100_000])[0] is Status.MORE
