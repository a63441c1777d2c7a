"""Machines by name: how many cards, of how much memory."""

from __future__ import annotations

import pytest

from quire.config.machines import CARDS, Machine, parse_machine
from quire.types.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "card", "cards", "hosts"),
    [
        ("h200", "h200", None, 1),
        ("8xH200", "h200", 8, 1),
        ("2x8xh100", "h100", 8, 2),
        ("rtx4090", "rtx4090", None, 1),
        ("4xrtx4090", "rtx4090", 4, 1),
        ("2x4xRTXPRO6000", "rtxpro6000", 4, 2),
        ("a100-40gb", "a100-40gb", None, 1),
    ],
)
def test_names(text: str, card: str, cards: int | None, hosts: int) -> None:
    assert parse_machine(text) == Machine(card, int(CARDS[card] * (1 << 30)), cards, hosts)


@pytest.mark.parametrize(
    "text", ["", "x", "8", "8x", "h2000", "0xh200", "64xh200", "1x1x1xh200", "-1xh200", "8 x h200"]
)
def test_what_no_machine_is_called(text: str) -> None:
    with pytest.raises(ConfigError, match="machine is"):
        parse_machine(text)


def test_machines_are_named_for_people() -> None:
    assert [str(parse_machine(text)) for text in ("h200", "8xh200", "2x8xh200")] == [
        "H200",
        "8 x H200",
        "2 x 8 x H200",
    ]
