"""Checks an answer against its schema, where the grammar could not enforce all of it, and reports the result."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from quire.server.conversation.request import Conversation, OutputFormat
from quire.server.errors import addressed
from quire.structured.instance import InvalidError, NotCheckedError, Validator
from quire.structured.registry import BACKENDS
from quire.structured.sources import relax_schema
from quire.types.structured import GrammarLimits


class SchemaReport(msgspec.Struct, frozen=True):
    """The result for an answer whose schema was not enforced as a whole."""

    not_enforced: list[str]
    """Keywords with their places in the schema."""
    valid: bool | None
    """Whether the answer obeys the whole schema; None if it could not be checked."""
    error: str | None = None
    """What it breaks and where, or why it was not checked."""


class SchemaCheck:
    """For the answers to one conversation."""

    def __init__(self, schema: Any, not_enforced: list[str], limits: GrammarLimits) -> None:
        self._schema = schema
        self._not_enforced = not_enforced
        self._check_text = BACKENDS.get(limits.backend).check_text

    def report(self, answer: str) -> SchemaReport:
        try:
            Validator(self._schema, self._check_text).check(self._schema, json.loads(answer))
        except RecursionError:
            return SchemaReport(self._not_enforced, None, "not checked: it is nested too deep")
        except ValueError:
            return SchemaReport(self._not_enforced, False, "the answer is no JSON as a whole")
        except InvalidError as error:
            return SchemaReport(self._not_enforced, False, str(error))
        except NotCheckedError as error:
            return SchemaReport(self._not_enforced, None, f"not checked: {error}")
        return SchemaReport(self._not_enforced, True)


def relax(conversation: Conversation, limits: GrammarLimits) -> tuple[Conversation, SchemaCheck | None]:
    """The conversation with a format that can be enforced, and a check of the rest if there is any.

    Only a format that is not strict is changed. RequestError if the schema is wrong.
    """
    wanted = conversation.output_format
    if wanted is None or wanted.is_strict or not isinstance(wanted.constraint.json, dict):
        return conversation, None
    with addressed({"structured_outputs": wanted.where}):
        relaxed, not_enforced = relax_schema(wanted.constraint, limits)
    if not not_enforced:
        return conversation, None
    check = SchemaCheck(wanted.constraint.json, not_enforced, limits)
    return replace(conversation, output_format=OutputFormat(relaxed, wanted.where)), check
