"""The prompt of a chat's next turn: what it will not have of an answer is demoted in the cache."""

from contextlib import suppress
from functools import partial

from quire import ops
from quire.core.tokens import common_prefix, key_of
from quire.engines.loop import Engine
from quire.errors import QuireError
from quire.scope import Scope
from quire.serve.message_requests import MessageChat
from quire.serve.protocol import ChatRequest, Ids
from quire.serve.replies import Reply
from quire.serve.service import ServedModel


def has_next_turn(asked: ChatRequest) -> bool:
    """Whether the next prompt of a chat has this one, the answer, and one message more."""
    is_whole = not (asked.continue_final_message or asked.truncate_prompt_tokens)
    return is_whole and not (isinstance(asked, MessageChat) and asked.is_silent)


async def demote_dropped(
    service: ServedModel, asked: ChatRequest, prompt: Ids, reply: Reply, scope: Scope
) -> None:
    """Demote the blocks of a chat and its answers that the next prompt will not have.

    They depend on reasoning that the template drops. Nothing is demoted if the next prompt has the reasoning of an
    answer, as within a loop of tool calls.
    """
    with suppress(QuireError):  # of a template that refuses the next turn, or a server that ends
        for choice in reply.choices:
            known = [*prompt, *choice.token_ids]
            after = await service.reader.ids(asked.followed_by(choice.message()))
            shared = common_prefix(bytes(key_of(known)), bytes(key_of(after)))
            if shared < len(prompt) + choice.reasoning_tokens:
                await service.running.call(partial(_demote, known, shared, scope))


def _demote(tokens: Ids, start: int, scope: Scope, engine: Engine) -> None:
    ops.demote(engine.manager, tokens, start, engine.scope(scope))
