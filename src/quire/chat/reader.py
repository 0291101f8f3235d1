"""A tokenizer for event loops: prompts to token ids and back, on a thread of its own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

from quire.chat.calls import called_in_template, called_or_formed
from quire.chat.conversation import Conversation, needs_short_ids, template_of
from quire.chat.documents import segmented
from quire.chat.own_template import OwnTemplate, TemplateProcess
from quire.chat.structured import StructuredOutputs
from quire.chat.tools import tool_format
from quire.errors import ConfigError

Made = TypeVar("Made")

SHOWN = 200
"""Characters of a line that are shown on each side of a token."""


class _TooLongError(ConfigError):
    """A text that has more tokens than a prompt may have, whatever it says."""


class PromptReader:
    """Reads prompts of at most `max_tokens`, one after another, with a copy of a tokenizer.

    What is longer than so many tokens can be is not read: it would hold up the texts of others.

    `tokenizer`    the copy
    `tool_format`  how the model writes tool calls
    `needs_short_ids`  whether ids of calls have nine letters
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.tokenizer: Any = deepcopy(tokenizer)
        self.tool_format = tool_format(template_of(tokenizer, with_tools=True))
        self.needs_short_ids = needs_short_ids(tokenizer)
        self._max_tokens = max_tokens
        self._longest_text = max_tokens * max(map(len, tokenizer.get_vocab()))
        self._crew = ThreadPoolExecutor(1, "quire-text")
        self._own_templates: TemplateProcess | None = None

    def trust_templates(self) -> None:
        """Take the chat templates of requests."""
        self._own_templates = TemplateProcess(self._longest_text)

    async def ids(
        self, prompt: str | list[int] | Conversation, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Return a text, or a conversation, which has its special tokens, as token ids. Raises `ConfigError`."""
        if isinstance(prompt, list):
            return prompt

        def read(tokenizer: Any) -> list[int]:
            field, special, text = "prompt", add_special_tokens, prompt
            if isinstance(text, Conversation) and text.documents:
                return segmented(text, tokenizer, self._encoded)
            if isinstance(text, Conversation):
                field, special, text = "messages", False, text.text(tokenizer)
            self._check_length(field, text)
            return self.tokenizer(text, add_special_tokens=special)["input_ids"]

        return await self._on_crew(read, prompt if isinstance(prompt, Conversation) else None)

    def _encoded(self, text: str) -> list[int]:
        self._check_length("messages", text)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    async def fits(self, asked: Conversation, num_tokens: int) -> bool:
        """Return whether the prompt of a conversation has at most so many tokens. Raises `ConfigError`."""
        try:
            return len(await self.ids(asked)) <= num_tokens
        except _TooLongError:
            return False

    async def call_form(
        self, asked: Conversation, form: StructuredOutputs | None
    ) -> StructuredOutputs | None:
        """Return the form of an answer that must call a tool, or that may in place of its form.

        None for other answers, and for a template that tells no form of calls. Raises `ConfigError`.
        """
        if asked.forced_functions() is not None:
            work = partial(called_in_template, asked)
        elif form is not None and asked.callable_tools:
            work = partial(called_or_formed, asked, form)
        else:
            return None
        return await self._on_crew(work, asked)

    async def text(self, ids: list[int]) -> str:
        """Return token ids as text. Raises `ConfigError`."""
        last = len(self.tokenizer) - 1
        if outside := [token for token in ids if not 0 <= token <= last]:
            raise ConfigError(f"tokens are from 0 to {last}, got {outside[0]}")
        return await self._on_crew(lambda tokenizer: tokenizer.decode(ids))

    async def line(self, ids: list[int], at: int) -> dict[str, Any]:
        """Return the line of a prompt in which a token stands: its number from 1, and its text.

        Of a long line, the text around the token. Raises `ConfigError`.
        """
        before, after = await self.text(ids[:at]), await self.text(ids[at : at + SHOWN])
        text = before.rpartition("\n")[2][-SHOWN:] + after.partition("\n")[0][:SHOWN]
        return {"token": at, "line": before.count("\n") + 1, "text": text}

    async def _on_crew(
        self, work: Callable[[Any], Made], asked: Conversation | None = None
    ) -> Made:
        """Return what work makes with the tokenizer; it has the template of a conversation. Raises `ConfigError`."""
        crew, tokenizer, process = self._crew, self.tokenizer, self._own_templates
        if asked and (template := asked.chat_template):
            if process is None:
                raise ConfigError(
                    "chat_template: the templates of requests are not trusted here; leave it out, or start the server "
                    "with --trust-request-chat-template"
                )
            crew, tokenizer = process.crew, OwnTemplate(tokenizer, template, process)
        return await asyncio.get_running_loop().run_in_executor(crew, partial(work, tokenizer))

    def _check_length(self, field: str, text: str) -> None:
        if len(text) > self._longest_text:
            raise _TooLongError(
                f"{field}: a text of {len(text)} characters has more than {self._max_tokens} tokens, the "
                f"limit: {self._longest_text} characters are too many whatever they say; shorten it"
            )
