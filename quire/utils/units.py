"""Sizes for people."""

from __future__ import annotations


def format_bytes(num_bytes: int) -> str:
    """1536 -> "1.5KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g}{unit}"
        value /= 1024
    return f"{value:.4g}TiB"
