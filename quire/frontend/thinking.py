"""The marks between which a model thinks, as token ids: what a thinking budget needs to end it."""

from __future__ import annotations

from quire.frontend.text_model import TextModel
from quire.parsers.format import ReasoningFormat
from quire.parsers.registry import REASONING_FORMATS
from quire.parsers.stream import reasoning_is_open
from quire.types.errors import RequestError
from quire.types.sampling import MAX_THINKING_MARK, ThinkingMarks

_FIELD = "thinking_token_budget"
_TAIL = 4096  # tokens at the end of a prompt of token ids in which thinking is looked for


def thinks_between_marks(text: TextModel) -> bool:
    """Whether the model's thinking has a mark that ends it."""
    name = text.reasoning_format
    return name is not None and isinstance(REASONING_FORMATS.get(name), ReasoningFormat)


def thinking_marks(text: TextModel, prompt: str | None, token_ids: list[int]) -> ThinkingMarks | None:
    """The marks of a request with a thinking budget; None where the model does not think."""
    name, tokenizer = text.reasoning_format, text.tokenizer
    if name is None or tokenizer is None:
        return None
    found = REASONING_FORMATS.get(name)
    if not isinstance(found, ReasoningFormat):
        raise RequestError(
            f"{_FIELD} is not supported for a model that thinks in the {name} format, which has no mark that ends"
            " thinking; leave it out",
            _FIELD,
        )
    begin, end = (
        tuple(tokenizer.encode(marks[0].strip(), add_special_tokens=False)) for marks in (found.begin, found.end)
    )
    if max(len(begin), len(end)) > MAX_THINKING_MARK:
        raise RequestError(
            f"{_FIELD} is not supported for this model: a mark of its thinking has more than {MAX_THINKING_MARK}"
            " tokens; leave it out",
            _FIELD,
        )
    if prompt is None:
        prompt = tokenizer.decode(token_ids[-_TAIL:], skip_special_tokens=False)
    return ThinkingMarks(begin, end, reasoning_is_open(name, prompt))
