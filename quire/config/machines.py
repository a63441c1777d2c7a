"""Machines by name, for plans of ones that are not at hand: `8xh200` is eight H200, `2x8xh200` two hosts of eight."""

from __future__ import annotations

from dataclasses import dataclass

from quire.types.errors import ConfigError

# GiB that CUDA reports of a card, rounded down. Of these only an H200 was at hand.
CARDS = {
    "a10": 22.0,
    "a100-40gb": 39.4,
    "a100": 79.1,
    "l4": 22.0,
    "l40s": 44.4,
    "rtx3090": 23.6,
    "rtx4090": 23.5,
    "rtx5090": 31.3,
    "rtxpro6000": 94.9,
    "h100": 79.1,
    "h200": 139.7,
    "b200": 178.3,
}
CONTEXT_MEMORY = 768 << 20  # of a GPU, for the CUDA context and the libraries of a process, asleep or not
_MOST = 63  # of hosts and of cards of each: no engine has more ranks


@dataclass(frozen=True)
class Machine:
    card: str
    memory: int  # bytes of a card
    cards: int | None = None  # of each host; None: as many as are asked for
    hosts: int = 1

    def __str__(self) -> str:
        count = "" if self.cards is None else f"{self.cards} x "
        return (f"{self.hosts} x " if self.hosts > 1 else "") + count + self.card.upper()


def parse_machine(text: str) -> Machine:
    """[[HOSTSx]CARDSx]NAME; ConfigError names what there is."""
    *counts, name = text.lower().split("x")
    while counts and not counts[-1].isdecimal():  # the x is of the card's own name
        name = f"{counts.pop()}x{name}"
    if name not in CARDS:
        raise ConfigError(f"machine is {text!r}, but {name!r} is none of {', '.join(CARDS)}; such as 8xh200")
    numbers = [int(count) for count in counts]
    if len(numbers) > 2 or any(not 1 <= number <= _MOST for number in numbers):
        raise ConfigError(
            f"machine is {text!r} but must be CARDS, such as h200, 8xh200 or 2x8xh200 (hosts, cards of each), with"
            f" numbers of 1 to {_MOST}"
        )
    hosts = numbers[0] if len(numbers) == 2 else 1
    return Machine(name, int(CARDS[name] * (1 << 30)), numbers[-1] if numbers else None, hosts)
