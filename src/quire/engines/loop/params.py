"""Sampling parameters of a request, under vLLM's names, checked when they are made."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from quire.chat.structured import StructuredOutputs, check_fields
from quire.errors import ConfigError

GREEDY_BELOW = 1e-5
"""A temperature below this chooses the likeliest token, as in vLLM."""

Answers = Annotated[int, Meta(ge=1, le=16384)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Text = Annotated[str, Meta(min_length=1)]
Tokens = Annotated[Sequence[Count], Meta(min_length=1)]
BadWord = Annotated[Text, Meta(max_length=256)]
BadWords = Annotated[Sequence[BadWord], Meta(max_length=256)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one request. Raises `ConfigError` for an invalid value.

    Tokens of equal logits stay or go together in top_k and top_p.
    """

    n: Answers = 1  # answers to one prompt, each with random numbers of its own
    best_of: Answers | None = (
        None  # answers to make, of which the n likeliest per token are returned; None: n
    )
    max_tokens: Count | None = 16  # new tokens; None: as many as fit; 0: prompt_logprobs alone
    min_tokens: Count = 0  # tokens before the answer may end
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0  # 0: always the likeliest token
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # the likeliest, with this share of top_k's
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = 0  # the k likeliest; 0 or -1: all
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0  # those this times as likely as the likeliest
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] = (
        1.0  # of tokens in prompt or answer
    )
    presence_penalty: Penalty = 0.0  # taken from logits of tokens in the answer
    frequency_penalty: Penalty = 0.0  # the same, for each occurrence
    logit_bias: Mapping[Count, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: Tokens | None = None  # the only tokens that may come; end tokens too
    bad_words: BadWords | None = None  # texts whose tokens do not come in a row
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # None: another each time
    stop: Text | Sequence[Text] | None = None  # texts that end the answer
    stop_token_ids: Sequence[Count] | None = None
    ignore_eos: bool = False  # the model's own end tokens do not end it
    include_stop_str_in_output: bool = False  # the stop text stays in the answer
    logprobs: Count | None = None  # number of likeliest tokens returned, before all of the above
    prompt_logprobs: Count | None = None  # the same of the prompt's tokens, computed without a hit
    structured_outputs: StructuredOutputs | None = None  # the form of the answer; a mapping too
    reasoning_tags: tuple[str, str] | None = None  # reasoning may precede the form; "": it is open
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: no text is made
    speculation: Annotated[int, Meta(ge=0, le=64)] = 0  # tokens guessed ahead; changes no answer

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)
        force_setattr(self, "top_k", max(self.top_k, 0))
        if isinstance(self.stop, str):
            force_setattr(self, "stop", [self.stop])
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens, {self.min_tokens}, is above max_tokens, {self.max_tokens}"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ConfigError(
                "max_tokens is 0: give 1 or more, or prompt_logprobs to score a prompt"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise ConfigError(f"best_of is {self.best_of}, below n, {self.n}")
        if self.guided and (self.min_tokens or self.ignore_eos):
            said = "min_tokens and ignore_eos are for answers that end anywhere"
            raise ConfigError(f"{said}; leave them out beside structured_outputs or a forced tool")
        if self.guided and (self.allowed_token_ids or self.bad_words):
            said = "allowed_token_ids and bad_words may forbid what the answer's form requires"
            raise ConfigError(f"{said}; leave them out beside structured_outputs or a forced tool")
        if self.stop and not self.detokenize:
            raise ConfigError("stop needs the text; leave out detokenize, or use stop_token_ids")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def num_answers(self) -> int:
        """Number of answers to make, of which n are returned."""
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens that are computed beside each token.

        None: no log-probabilities are computed, not even that of the token itself.
        """
        return 0 if self.logprobs is None and self.num_answers > self.n else self.logprobs

    @property
    def guided(self) -> bool:
        """Whether a grammar says which tokens may come."""
        return self.structured_outputs is not None

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far matter to the next one."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def narrow(self) -> bool:
        """Whether a rule leaves some tokens only to be drawn."""
        return (self.min_p, self.top_p) != (0, 1) or self.top_k > 0

    @property
    def plain(self) -> bool:
        """Whether each token is the likeliest one by the model alone, and nothing is told of it."""
        limits = (self.allowed_token_ids, self.bad_words)
        asks = (self.logit_bias, self.min_tokens, self.guided, self.penalised, *limits)
        return self.greedy and self.num_logprobs is None and not any(asks)


_KINDS = get_type_hints(SamplingParams, include_extras=True)


def own_sampling(model: Any) -> dict[str, Any]:
    """Return the sampling parameters that a model's generation config names."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    own = {name: getattr(model.generation_config, name, None) for name in names}
    return {name: value for name, value in own.items() if value is not None}
