"""Leaves out the oldest messages of a conversation that is too long for the model."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial

from quire.frontend.tokenizer import TooManyTokensError
from quire.server.context import ServerContext
from quire.server.conversation.prepare import render_conversation
from quire.server.conversation.request import Conversation


async def fitted(context: ServerContext, conversation: Conversation, room: int) -> Conversation:
    """Leave out the oldest messages until the prompt has at most `room` tokens.

    System messages and the last message stay, and no result stays without its call. The engine refuses what is too
    long even then.
    """

    async def fits(candidate: Conversation) -> bool:
        prompt = await render_conversation(context, candidate)
        try:
            await asyncio.to_thread(partial(context.tokenizer().encode, prompt, False, max_tokens=room))
        except TooManyTokensError:
            return False
        return True

    cuts = [cut for cut in range(1, len(conversation.messages)) if _may_begin(conversation, cut)]
    if not cuts or await fits(conversation):
        return conversation
    low, high = 0, len(cuts) - 1  # the least cut that fits is at or after low
    while low < high:
        middle = (low + high) // 2
        if await fits(_without(conversation, cuts[middle])):
            high = middle
        else:
            low = middle + 1
    return _without(conversation, cuts[low])


def _may_begin(conversation: Conversation, cut: int) -> bool:
    return bool(conversation.messages[cut]["role"] != "tool")


def _without(conversation: Conversation, cut: int) -> Conversation:
    kept = [message for message in conversation.messages[:cut] if message["role"] == "system"]
    return dataclasses.replace(conversation, messages=[*kept, *conversation.messages[cut:]])
