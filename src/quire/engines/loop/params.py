"""How a request wants its tokens chosen, under vLLM's names, checked when it is said."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, force_setattr

from quire.errors import ConfigError

GREEDY_BELOW = 1e-5
"""A temperature below this chooses the likeliest token, as in vLLM."""

Positive = Annotated[int, Meta(ge=1, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Text = Annotated[str, Meta(min_length=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides the tokens of one request. Raises `ConfigError` for a value that cannot be.

    n                   answers to one prompt, each with random numbers of its own
    max_tokens          new tokens at most; None: as many as there is room for
    min_tokens          so many tokens come before the answer may end
    temperature         0: the likeliest token; top_p, top_k and min_p then say nothing
    top_k               the k likeliest tokens; 0 or -1: all
    top_p               the likeliest tokens that together have this share of what top_k left
    min_p               tokens that are at least this times as likely as the likeliest
    repetition_penalty  divides logits of tokens in prompt or answer (those below 0: multiplies)
    presence_penalty    is taken from logits of tokens in the answer
    frequency_penalty   the same, as many times as the token stands there
    logit_bias          what is added to logits, by token id
    seed                fixes the random numbers, whatever runs beside; None: others each time
    stop                texts that end the answer
    stop_token_ids      tokens that end it; with ignore_eos the model's own do not
    logprobs            so many of the likeliest tokens are told with each, before all of the above
    json_schema, regex  what the answer must match, one of them; a schema as a dict or as JSON
    detokenize          False: no text is made of the tokens
    speculation         tokens guessed ahead from the text, at most; they change no answer

    What ended an answer is left out of its text unless include_stop_str_in_output. Tokens of equal
    logits stay or go together in top_k and top_p.
    """

    n: Positive = 1
    max_tokens: Positive | None = 16
    min_tokens: Count = 0
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = 0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Mapping[Count, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Sequence[Text] | None = None
    stop_token_ids: Sequence[Count] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: Count | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    speculation: Annotated[int, Meta(ge=0, le=64)] = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            try:
                checked = msgspec.convert(value, _KINDS[name])
            except msgspec.ValidationError as error:
                raise ConfigError(f"{name} is {value!r}: {error}") from error
            force_setattr(self, name, checked)
        if isinstance(self.stop, str):
            force_setattr(self, "stop", [self.stop])
        if isinstance(self.json_schema, Mapping):
            force_setattr(self, "json_schema", json.dumps(self.json_schema))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}"
            )
        if self.json_schema is not None and self.regex is not None:
            raise ConfigError("json_schema and regex were both given; give one of them")
        if self.guided and (self.min_tokens or self.ignore_eos):
            raise ConfigError(
                "min_tokens and ignore_eos do not go with json_schema or regex, which say themselves "
                "where the answer ends; leave them out"
            )
        if self.stop and not self.detokenize:
            raise ConfigError("stop needs the text; leave out detokenize, or use stop_token_ids")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def guided(self) -> bool:
        """Whether a grammar says which tokens may come."""
        return self.json_schema is not None or self.regex is not None

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far matter to the next one."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


_KINDS = get_type_hints(SamplingParams, include_extras=True)
