"""Sizes for people."""

from __future__ import annotations

import re

from quire.types.errors import ConfigError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KB": 10**3,
    "KIB": 1 << 10,
    "M": 1 << 20,
    "MB": 10**6,
    "MIB": 1 << 20,
    "G": 1 << 30,
    "GB": 10**9,
    "GIB": 1 << 30,
    "T": 1 << 40,
    "TB": 10**12,
    "TIB": 1 << 40,
}


def parse_bytes(text: str) -> int:
    """A byte count such as 1000000, 512MiB, 1.5G or 2 GB; KiB and K are 1024, KB is 1000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _FACTORS:
        raise ConfigError(f"{text!r} is no byte count; write it like 512MiB, 2GiB or 1000000")
    factor = _FACTORS[match[2].upper()]
    return int(match[1]) * factor if match[1].isdigit() else int(float(match[1]) * factor)


def format_bytes(num_bytes: int) -> str:
    """Rounded to four digits: 1536 -> "1.5KiB"."""
    value, unit = float(num_bytes), 0
    # 1023.96 would be written 1024.
    while abs(value) >= 1023.95 and unit < len(UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.4g}{UNITS[unit]}"


def exact_bytes(num_bytes: int) -> str:
    """Without rounding, in the largest unit of which it is a whole number: 1536 -> "1536B", 2048 -> "2KiB"."""
    unit = 0
    while num_bytes and num_bytes % 1024 == 0 and unit < len(UNITS) - 1:
        num_bytes //= 1024
        unit += 1
    return f"{num_bytes}{UNITS[unit]}"
