"""CostTable: how long steps of one model take on one machine, as `quire bench steps` measured them. Imports no torch.

A step's time is read off curves that were measured: rows that decode, and tokens of prompts. What attention adds is
proportional to the tokens it reads. A step of both takes what its tokens take as one prompt, since weights are read
once for all of them, and what the rows that sample take more than tokens of a prompt.
"""

from __future__ import annotations

from bisect import bisect_left
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
    ends: int = 0  # prompts whose last token is among them: these rows sample too


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    model: str
    decode: Curve  # by rows, each with `decode_context` tokens before
    decode_context: int
    prefill: Curve  # by tokens of one prompt, from its beginning
    per_context: float  # seconds for each token that a row that decodes reads
    per_pair: float
    beside: float  # seconds that a step with prompts and rows that decode takes more than this adds up to
    host: Curve  # by rows: seconds between two steps in which the device may wait; outputs leave at their end
    idle: float = 0.0  # seconds that a step takes more which no other step was prepared before
    delivery: float = 0.0  # seconds that a message takes between an engine and its client
    sending: float = 0.0  # seconds between two requests that a client sends at once
    admission: float = 0.0  # seconds of the host to take in a request and to plan its first step
    setup: SchedulerSetup
    environment: dict[str, Any]
    """Where, when and at which commit it was measured."""

    def __post_init__(self) -> None:
        """ValueError where a simulation would divide by nothing, or run backwards in time."""
        for name, least in (("decode", 1e-9), ("prefill", 1e-9), ("host", 0.0)):
            sizes, seconds = [size for size, _ in getattr(self, name)], [time for _, time in getattr(self, name)]
            # A size may have been measured twice; only the last two say how a curve goes on.
            if not sizes or sizes != sorted(sizes) or len(set(sizes[-2:])) < len(sizes[-2:]):
                raise ValueError(f"{name} must have sizes that grow")
            if min(seconds) < least:
                raise ValueError(f"{name} holds {min(seconds)} seconds")

    def seconds(self, load: StepLoad) -> float:
        """Return the time of a step on the device."""
        context = self.per_context * (load.context - load.rows * self.decode_context)
        if not load.prompt_tokens:
            return max(1e-6, interpolated(self.decode, load.rows) + context)
        seconds = interpolated(self.prefill, self._padded(load.rows + load.prompt_tokens))
        seconds += self.per_pair * load.pairs
        # A prompt that was measured ended in its step, so that one row sampled.
        seconds += max(0.0, self._sampling(load.rows + load.ends) - self._sampling(1))
        return max(1e-6, seconds + context + self.beside if load.rows else seconds)

    def _padded(self, num_tokens: int) -> int:
        sizes = self.setup.step_sizes
        return sizes[bisect_left(sizes, num_tokens)] if sizes and num_tokens <= sizes[-1] else num_tokens

    def _sampling(self, rows: int) -> float:
        """What rows that decode take more than as many tokens of a prompt: logits and the choice among them."""
        return interpolated(self.decode, rows) - interpolated(self.prefill, rows) if rows else 0.0

    def host_seconds(self, rows: int) -> float:
        return interpolated(self.host, rows)


def interpolated(curve: Curve, size: int) -> float:
    """The curve at a size: on the line between its neighbours, or through the last two behind the end."""
    if len(curve) == 1 or size <= curve[0][0]:
        return curve[0][1]
    index = min(max(1, bisect_left(curve, (size, 0.0))), len(curve) - 1)
    (low, first), (high, second) = curve[index - 1], curve[index]
    # Behind the end a larger step is never said to be faster.
    slope = (second - first) / (high - low)
    return first + slope * (size - low) if size <= high else second + max(0.0, slope) * (size - high)


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
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{str(path)!r} is not a cost table: {error}; `quire bench steps --table` writes one"
        ) from error
