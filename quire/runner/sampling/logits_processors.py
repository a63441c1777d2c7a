"""Custom logits processors: classes of the operator that edit the logits of requests that ask for it.

They are named by --logits-processors (or LLM(logits_processors=...)), never by a request; a request asks by its
SamplingParams, usually by extra_args. Steps with such a request run eagerly.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.runner.sampling.base import Feature, RowState, sampling_params
from quire.types.errors import ConfigError
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart
from quire.utils.log import get_logger

logger = get_logger(__name__)


class LogitsProcessor(ABC):
    """One object serves all rows; what it raises for a row fails that row's request alone."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device

    @abstractmethod
    def add_request(self, row: int, params: SamplingParams, prompt_token_ids: list[int]) -> bool:
        """A request takes this row: whether it asks for this processor. Again after a preemption."""

    def remove_request(self, row: int) -> None:
        """The row is free."""
        return

    @abstractmethod
    def process(self, row: int, output_token_ids: list[int], logits: Tensor) -> None:
        """Edit logits [vocab_size] float32 of a row in place, given what it has generated so far.

        Under speculation also given what it may have generated, so it should depend on nothing else.
        """


def load_processors(names: Sequence[str]) -> list[type[LogitsProcessor]]:
    """The classes that "module:Class" names; ConfigError where there is none."""
    return [_load(name) for name in names]


def _load(name: str) -> type[LogitsProcessor]:
    module, _, attribute = name.partition(":")
    fix = "name it as module:Class, importable from where the engine starts"
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"logits_processors has {name!r}, which cannot be loaded ({error}); {fix}") from error
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(f"logits_processors has {name!r}, which is no subclass of quire.LogitsProcessor; {fix}")
    return found


class LogitsProcessors(Feature):
    name = group = "logits_processors"
    capturable = False

    def __init__(self, classes: Sequence[type[LogitsProcessor]], vocab_size: int, device: torch.device) -> None:
        self._processors = [make(vocab_size, device) for make in classes]
        self._asked: dict[int, list[LogitsProcessor]] = {}
        self._errors: dict[int, str] = {}  # by row, of the request
        self._failed: dict[int, str] = {}  # by place in the last step

    def add_request(self, row: int, start: RowStart) -> bool:
        params, prompt = sampling_params(start), start.token_ids[: start.num_prompt_tokens]
        asked = []
        for processor in self._processors:
            try:
                if processor.add_request(row, params, prompt):
                    asked.append(processor)
            except Exception as error:  # whatever it raises fails this request alone
                self._note(self._errors, row, processor, error)
        if asked or row in self._errors:
            self._asked[row] = asked
        return row in self._asked

    def remove_request(self, row: int) -> None:
        self._errors.pop(row, None)
        if self._asked.pop(row, None) is None:
            return
        for processor in self._processors:
            try:
                processor.remove_request(row)
            except Exception:  # the request is over; the next one of this row begins anew
                logger.exception("logits processor %s failed in remove_request", type(processor).__name__)

    def apply(self, logits: Tensor, rows: Tensor, state: RowState, ahead: Tensor | None = None) -> None:
        """Waits for the device, to tell a processor of the row's outputs."""
        self._failed.clear()
        more = [0] * len(rows) if ahead is None else ahead.tolist()
        for line, row in enumerate(rows.tolist()):
            for processor in self._asked.get(row, ()):
                known = int(state.num_tokens[row]) + more[line]
                outputs = state.token_ids[row, int(state.num_prompt_tokens[row]) : known]
                try:
                    processor.process(row, outputs.tolist(), logits[line])
                except Exception as error:  # whatever it raises fails this request alone
                    self._note(self._failed, line, processor, error)

    def error_of(self, row: int, place: int) -> str | None:
        return self._errors.get(row) or self._failed.get(place)

    def _note(self, errors: dict[int, str], key: int, processor: LogitsProcessor, error: Exception) -> None:
        name = type(processor).__name__
        logger.error("logits processor %s failed", name, exc_info=error)
        errors.setdefault(key, f"logits processor {name} failed: {type(error).__name__}: {error}")
