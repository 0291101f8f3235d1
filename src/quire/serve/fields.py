"""Fields of requests by name: offered, accepted without effect, refused, unknown.

Offered are those of a request's struct, but for `ELSEWHERE`. docs/serve.md has the same lists.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from quire.serve.protocol import ChatRequest, CompletionRequest, Generation
from quire.serve.responses import ResponseRequest
from quire.web.bodies import read
from quire.web.errors import ApiError

ACCEPTED = frozenset(
    {
        "early_stopping",
        "guided_decoding_backend",
        "length_penalty",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
"""Fields of OpenAI's API and vLLM's that change no answer."""

REFUSED: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "audio": None,
    "background": None,
    "best_of": 1,
    "chat_template": None,
    "chat_template_kwargs": None,
    "context_management": None,
    "continue_final_message": None,
    "conversation": None,
    "documents": None,
    "echo": None,
    "function_call": "none",
    "functions": None,
    "guided_whitespace_pattern": None,
    "kv_transfer_params": None,
    "logits_processors": None,
    "media_io_kwargs": None,
    "messages": None,
    "mm_processor_kwargs": None,
    "moderation": None,
    "modalities": ["text"],
    "n": 1,
    "prediction": None,
    "prompt": None,
    "prompt_embeds": None,
    "prompt_logprobs": None,
    "reasoning_effort": "none",
    "repetition_detection": None,
    "return_token_ids": None,
    "return_tokens_as_token_ids": None,
    "structural_tag": None,
    "suffix": None,
    "thinking_token_budget": None,
    "tool_choice": "none",
    "tools": None,
    "truncation": "disabled",
    "use_beam_search": None,
    "verbosity": "medium",
    "vllm_xargs": None,
    "web_search_options": None,
}
"""Fields of OpenAI's API and vLLM's that would change an answer and are not offered, with a value that asks for nothing.

Neither do null, false, and what is empty. A field that a request's struct has is offered all the same.
"""

ELSEWHERE: Mapping[Any, frozenset[str]] = {
    ChatRequest: frozenset({"prompt"}),
    ResponseRequest: frozenset(
        {
            "best_of",
            "n",
            "prompt",
            "prompt_logprobs",
            "return_token_ids",
            "return_tokens_as_token_ids",
        }
    ),
    CompletionRequest: frozenset(
        {
            "add_generation_prompt",
            "chat_template",
            "chat_template_kwargs",
            "continue_final_message",
            "documents",
            "messages",
            "reasoning_effort",
            "tool_choice",
            "tools",
        }
    ),
}
"""Fields that a request's struct inherits and its path does not offer."""

MAX_TOLD = 20
"""Unknown names that a client is told of."""

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def unknown_in(kind: Any, body: bytes) -> list[str]:
    """Return the names in a body that no API has.

    They are as a header can have them: others are `?`. A null means absent. Raises `ApiError` for a field that is known and not offered.
    """
    offered = {*kind.__struct_encode_fields__} - ELSEWHERE.get(kind, frozenset())
    refused: Mapping[str, Any] = REFUSED if issubclass(kind, Generation) else {}
    unknown: list[str] = []
    for name, raw in read(dict[str, Raw], body).items():
        if name in offered or name in ACCEPTED or bytes(raw) == b"null":
            continue
        if name not in refused:
            unknown.append(name if _NAME.fullmatch(name) else "?")
        elif (value := read(object, bytes(raw))) is not False and value not in (
            "",
            [],
            {},
            refused[name],
        ):
            raise ApiError(400, f"{name} is not offered here; leave it out", param=name)
    return unknown
