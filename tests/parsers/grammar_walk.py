"""A model that says anything a grammar allows: walks through grammars, token by token, at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from quire.parsers.format import ToolFormat
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from quire.structured.guidance import GuidanceBackend, GuidanceMatcher
from quire.types.structured import GrammarSource, Vocabulary
from tests.parsers.helpers import markers

NUM_BYTES = 256
CLOSERS = frozenset(b'"<]})[')


class Walker:
    """Its tokens are the bytes, the format's special tokens if it has any, and an end."""

    def __init__(self, tool_format: str, reasoning_format: str) -> None:
        self.tool_format = tool_format
        layouts = (TOOL_FORMATS.get(tool_format), REASONING_FORMATS.get(reasoning_format))
        self.markers = [mark.strip() for mark in markers(tool_format, reasoning_format)]
        special = [mark for mark in self.markers if mark[0] in "<[" and mark[-1] in ">]" and len(mark) > 3]
        names = special if any(layout.special for layout in layouts) else []
        self.special = {name: NUM_BYTES + index for index, name in enumerate(dict.fromkeys(names))}
        self._texts = {token_id: name for name, token_id in self.special.items()}
        self.eos = NUM_BYTES + len(self.special)
        pieces = [bytes([byte]) for byte in range(NUM_BYTES)]
        pieces += [name.encode() for name in self.special] + [b"<eos>"]
        self._backend = GuidanceBackend(Vocabulary(pieces, [*self.special.values(), self.eos], [self.eos]))

    def matcher(self, grammar: str) -> GuidanceMatcher:
        matcher = self._backend.compile(GrammarSource("grammar", grammar)).matcher()
        assert isinstance(matcher, GuidanceMatcher)
        return matcher

    def tokens(self, text: str) -> list[int]:
        """Special tokens as such, the rest as bytes."""
        found: list[int] = []
        while text:
            name = next((name for name in sorted(self.special, key=len, reverse=True) if text.startswith(name)), None)
            if name is None:
                found += text[0].encode()
            else:
                found.append(self.special[name])
            text = text[len(name or "x") :]
        return found

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether the output may be this, and end here."""
        matcher = self.matcher(grammar).inner
        tokens = self.tokens(text)
        return (
            matcher.validate_tokens(tokens) == len(tokens)
            and matcher.consume_tokens(tokens)
            and matcher.is_accepting()
        )

    def begins(self, grammar: str, text: str) -> bool:
        matcher = self.matcher(grammar).inner
        tokens = self.tokens(text)
        return matcher.validate_tokens(tokens) == len(tokens)

    def walk(
        self, grammar: str, seed: int, limit: int = 2_000, start: str = "", stop: Callable[[str], bool] | None = None
    ) -> str | None:
        """An output that the grammar allows and that begins with `start`; None if it did not come to an end."""
        random = Random(seed)
        matcher = self.matcher(grammar).inner
        assert matcher.consume_tokens(self.tokens(start))
        said = start.encode()
        for _ in range(limit):
            if stop is not None and said[-1:] in b">]})" and stop(said.decode(errors="ignore")):
                return said.decode()
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            token = self._choose(np.flatnonzero(bits[: self.eos + 1]).tolist(), said, random)
            if token == self.eos:
                return said.decode()
            assert matcher.consume_token(token), matcher.get_error()
            said += bytes([token]) if token < NUM_BYTES else self._texts[token].encode()
            if matcher.is_stopped():
                return said.decode()
        return None

    def _choose(self, allowed: Sequence[int], said: bytes, random: Random) -> int:
        if self.eos in allowed and random.random() < 0.5:
            return self.eos
        special = [token for token in allowed if NUM_BYTES <= token < self.eos]
        if special and random.random() < 0.3:
            return random.choice(special)
        if random.random() < 0.95:
            # A marker that was begun is mostly finished, as by chance alone it would never be.
            for mark in random.sample(self.markers, len(self.markers)):
                spelled = mark.encode()
                for length in range(len(spelled) - 1, 0, -1):
                    if said.endswith(spelled[:length]) and spelled[length] in allowed:
                        return spelled[length]
        closers = [token for token in allowed if token in CLOSERS]
        if closers and random.random() < 0.3:
            return random.choice(closers)
        readable = [token for token in allowed if 32 <= token < 127 or token == 10]
        return random.choice(readable or list(allowed))


def begin_of_calls(tool_format: str) -> str:
    """What a call begins with in running text; empty if it needs a new line only."""
    layout = TOOL_FORMATS.get(tool_format)
    if not isinstance(layout, ToolFormat) or layout.bare:
        return ""
    return layout.begin[0] if layout.begin else layout.call_begin
