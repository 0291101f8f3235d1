"""Prompts of a log as token ids of a model."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np

from quire.core.tokens import INT32, IntArray
from quire.errors import ConfigError
from quire_sim.caches.joints import AnswerJoints
from quire_sim.caches.pieces import cache_prompt
from quire_sim.caches.prompts import CachePrompt
from quire_sim.logs import LoggedRequest


class IdRenderer(Protocol):
    """A tokenizer of transformers, and prompts as segments of tokens, each token a character."""

    tokenizer: Any

    def segments(self, request: LoggedRequest) -> list[str]:
        """Return the prompt of a request. Raises `ConfigError`."""
        ...

    def answered(self, request: LoggedRequest) -> list[str]:
        """Return the prompt of a request, its answer with calls, and what follows. Raises `ConfigError`."""
        ...

    def text(self, tokens: str) -> str:
        """Return tokens as text."""
        ...


class ExactTokens:
    """Prompts by a renderer such as `PromptRenderer`. Requests that it refuses are counted in `num_refused`."""

    def __init__(self, renderer: IdRenderer) -> None:
        self._renderer = renderer
        self._joints = AnswerJoints(self._text)
        self.num_refused = 0

    def prompt(self, request: LoggedRequest) -> CachePrompt | None:
        """Return a logged request as a cache sees it; None for one that the model's server would refuse."""
        try:
            tokens = "".join(self._renderer.segments(request))
        except ConfigError:
            self.num_refused += 1
            return None
        ids = np.frombuffer(tokens.encode("utf-32-le", "surrogatepass"), INT32)
        pieces = [ids[:0]] * (len(request.sections) - 1)
        prompt = cache_prompt(request, [*pieces, ids], self._answer(request, tokens))
        parted_at, merged = self._joints.merged(ids)
        if len(prompt.output) > 1:
            self._joints.add(ids, prompt.output)
        return (
            msgspec.structs.replace(prompt, parted_at=parted_at, merged=merged)
            if merged
            else prompt
        )

    def _text(self, ids: IntArray) -> str:
        return self._renderer.text("".join(map(chr, ids.tolist())))

    def _answer(self, request: LoggedRequest, prompt: str) -> IntArray:
        """Return the ids of an answer, with the one that ended it where the usage counts it."""
        tokenizer, made = self._renderer.tokenizer, request.usage.output_tokens
        if request.calls and made is not None:
            return np.array([ord(each) for each in self._called(request, prompt)[:made]], INT32)
        ids: list[int] = (
            tokenizer(request.answer, add_special_tokens=False)["input_ids"]
            if request.answer
            else []
        )
        if made == len(ids) + 1 and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        return np.array(ids[:made], INT32)

    def _called(self, request: LoggedRequest, prompt: str) -> str:
        """Return the tokens behind a prompt as the next one has them; none where it does not go on from this one."""
        try:
            whole = "".join(self._renderer.answered(request))
        except ConfigError:
            return ""
        return whole[len(prompt) :] if whole.startswith(prompt) else ""
