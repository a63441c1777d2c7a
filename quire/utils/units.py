"""Sizes for people."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


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
