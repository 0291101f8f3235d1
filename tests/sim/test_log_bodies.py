"""Bodies of requests become sections with their places, in the order of caches."""

import base64

import pytest

from quire_sim.logs import api_of, sections_of

TOOL = {"type": "function", "function": {"name": "find", "description": "Finds."}}
CLAUDE_TOOL = {
    "name": "find",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (64).to_bytes(4, "big") + (32).to_bytes(4, "big")
IMAGE = "data:image/png;base64," + base64.b64encode(PNG).decode()

CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ],
    "tools": [TOOL],
}  # fmt: skip
MESSAGES = {
    "model": "claude-x",
    "max_tokens": 9,
    "tools": [CLAUDE_TOOL],
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "t", "name": "find", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "found"}]}]},
    ],
}  # fmt: skip
RESPONSES = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}]},
        {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
    ],
}


def places(body):
    return [(each.path, each.role, each.kind) for each in sections_of(body, api_of(body))]


def test_a_chat_is_its_tools_then_its_messages_part_by_part():
    assert places(CHAT) == [
        ("tools[0]", "tools", "tool"),
        ("messages[0].content", "system", "text"),
        ("messages[1].content[0]", "user", "text"),
        ("messages[1].content[1]", "user", "media"),
        ("messages[2].tool_calls[0]", "assistant", "call"),
        ("messages[3].content", "tool", "result"),
    ]


def test_messages_of_anthropic_are_tools_system_and_blocks_with_their_breakpoints():
    assert places(MESSAGES) == [
        ("tools[0]", "tools", "tool"),
        ("system[0]", "system", "text"),
        ("messages[0].content", "user", "text"),
        ("messages[1].content[0]", "assistant", "thinking"),
        ("messages[1].content[1]", "assistant", "call"),
        ("messages[2].content[0].content[0]", "tool", "text"),
    ]
    tool, system, *rest = sections_of(MESSAGES, "messages")
    assert (tool.breakpoint_s, system.breakpoint_s) == (300, 3600)
    assert "cache_control" not in tool.text
    assert not any(each.breakpoint_s for each in rest)


def test_items_of_responses_are_sections():
    assert places(RESPONSES) == [
        ("instructions", "system", "text"),
        ("input[0].content[0]", "user", "text"),
        ("input[1]", "assistant", "call"),
        ("input[2].content", "tool", "result"),
    ]


def test_an_image_is_a_digest_of_its_bytes_with_its_size():
    image = sections_of(CHAT, "chat")[3]
    assert image.text == "image/png 64x32 low"
    assert len(image.media) == 32
    other = {"type": "image", "source": {"type": "base64", "data": base64.b64encode(PNG).decode()}}
    body = {"model": "m", "messages": [{"role": "user", "content": [other]}]}
    assert sections_of(body, "messages")[0].media == image.media


@pytest.mark.parametrize(
    ("body", "url", "api"),
    [
        (CHAT, "", "chat"),
        (MESSAGES, "", "messages"),
        (RESPONSES, "", "responses"),
        ({"model": "m", "prompt": "x"}, "", "completions"),
        (CHAT, "https://api/v1/messages?beta=true", "messages"),
        ({"model": "text-embedding-3", "input": "x"}, "", None),
        ({"model": "m", "input": "x"}, "/v1/embeddings", None),
        ({"conversations": []}, "", None),
    ],
)
def test_the_form_of_a_body_is_its_keys_unless_the_url_says(body, url, api):
    assert api_of(body, url) == api
