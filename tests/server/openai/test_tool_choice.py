"""Words for who decides about calls."""

from __future__ import annotations

import pytest

from quire.server.conversation.request import AUTO, NONE, REQUIRED
from quire.server.openai.tool_choice import choice_of_word
from quire.types.errors import RequestError


def test_words() -> None:
    assert [choice_of_word(word) for word in ("auto", "none", "required")] == [AUTO, NONE, REQUIRED]
    with pytest.raises(RequestError, match="tool_choice is 'always' but must be auto, none, required") as refused:
        choice_of_word("always")
    assert refused.value.field == "tool_choice"
