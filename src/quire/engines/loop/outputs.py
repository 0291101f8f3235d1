"""What an engine says of its requests and of itself; names as users of vLLM know them."""

from array import array
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.errors import QuireError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class CompletionOutput:
    """One of the answers to a request, as far as it is there.

    text           what the tokens say, without what a stop string may still begin with; "" without a tokenizer
    num_tokens     how many there are
    logprobs       per token what `SamplingParams.logprobs` asks for; None: nothing
    finish_reason  None while it goes on
    stop_reason    the stop string or the id of the stop token that ended it; None for the model's own end
    """

    index: int
    text: str
    num_tokens: int
    logprobs: list[Any] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    _start: int = field(repr=False)
    _known: "array[int]" = field(repr=False, compare=False)

    @property
    def token_ids(self) -> list[int]:
        """The tokens, a list of its own each time: who streams seldom asks for all from the beginning."""
        return self._known[self._start : self._start + self.num_tokens].tolist()


@dataclass(slots=True)
class RequestOutput:
    """A request with news: all of its answers from their beginning.

    num_cached_tokens  tokens of the prompt whose KV was there when the request was first admitted
    error              why it ended before its time, with `finish_reason` "error"
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    finished: bool
    error: QuireError | None = None


@dataclass(slots=True)
class EngineStats:
    """What an engine has done since it was made, and what it is doing."""

    steps: int = 0
    requests: int = 0
    failed_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
