"""CostTable: how long steps of one model take on one machine, as `quire bench steps` measured them. Imports no torch.

A step's time is read off curves that were measured: rows that decode, and tokens of prompts. What attention adds is
proportional to the tokens it reads. A step of both takes less than the two: weights are read once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.setup import SchedulerSetup
from quire.types.errors import ConfigError

Curve = list[tuple[int, float]]
"""Seconds at some sizes, by size; straight lines between them."""


class StepLoad(msgspec.Struct, frozen=True):
    """What a step computes, as far as its time depends on it."""

    rows: int = 0  # that decode
    context: int = 0  # tokens that these rows read, summed
    prompt_tokens: int = 0
    pairs: float = 0.0  # of a prompt token and a token that was computed in a step before


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    model: str
    decode: Curve  # by rows, each with `decode_context` tokens before
    decode_context: int
    prefill: Curve  # by tokens of one prompt, from its beginning
    per_context: float  # seconds for each token that a row that decodes reads
    per_pair: float
    shared: float  # part of the cheaper of a step's two halves that the other has paid for
    host: Curve  # by rows: seconds between two steps in which the device may wait
    setup: SchedulerSetup
    environment: dict[str, Any]
    """Where, when and at which commit it was measured."""

    def seconds(self, load: StepLoad) -> float:
        """Return the time of a step on the device."""
        decode = prefill = 0.0
        if load.rows:
            decode = interpolated(self.decode, load.rows)
            decode += self.per_context * (load.context - load.rows * self.decode_context)
        if load.prompt_tokens:
            prefill = interpolated(self.prefill, load.prompt_tokens) + self.per_pair * load.pairs
        return max(1e-6, decode + prefill - self.shared * min(decode, prefill))

    def host_seconds(self, rows: int) -> float:
        return interpolated(self.host, rows)


def interpolated(curve: Curve, size: int) -> float:
    """The curve at a size: on the line between its neighbours, or through the last two behind the end."""
    if len(curve) == 1 or size <= curve[0][0]:
        return curve[0][1]
    index = min(max(1, bisect_left(curve, (size, 0.0))), len(curve) - 1)
    (low, first), (high, second) = curve[index - 1], curve[index]
    return first + (second - first) * (size - low) / (high - low)


def shipped_tables() -> dict[tuple[str, str], CostTable]:
    """The tables that come with the package, by machine and model."""
    folder = resources.files("quire.replay").joinpath("tables")
    files = folder.iterdir() if folder.is_dir() else ()
    found = (read_table(Path(str(file))) for file in files if file.name.endswith(".json"))
    return {(table.machine, table.model): table for table in found}


def find_table(machine: str, model: str) -> CostTable:
    """A table of the package, or a file that `quire bench steps` wrote; ConfigError that names those there are."""
    path = Path(machine).expanduser()
    if path.is_file():
        return read_table(path)
    tables = shipped_tables()
    if (machine, model) in tables:
        return tables[machine, model]
    known = ", ".join(sorted(f"{name} ({of})" for name, of in tables)) or "none"
    raise ConfigError(
        f"no cost table of {model!r} on {machine!r}; there are: {known}. Measure one there with"
        f" `quire bench steps {model} --table FILE`, and give the file as --machine"
    )


def read_table(path: Path) -> CostTable:
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostTable)
    except OSError as error:
        raise ConfigError(f"the cost table {str(path)!r} cannot be read: {error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{str(path)!r} is not a cost table: {error}; `quire bench steps --table` writes one"
        ) from error


def monotone(points: Sequence[tuple[int, float]]) -> Curve:
    """A measured curve without its dents: a larger step is never said to be faster."""
    curve: Curve = []
    for size, seconds in sorted(points):
        curve.append((size, max(seconds, curve[-1][1] if curve else 0.0)))
    return curve
