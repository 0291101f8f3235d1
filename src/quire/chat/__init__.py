"""Conversations: the prompts that a model reads, and the text and tool calls of its answers.

conversation  messages and tools, laid out by a model's chat template
calls         tool calls that an answer must make, as the template writes them
tools         tool calls in an answer, in the forms that models write them
tokens        the bytes of tokens
text          from tokens to text, as an answer comes
structured    the required form of an answer: JSON of a schema, a regular expression, a choice, a grammar
grammars      which tokens may come next in an answer of a required form
reader        a tokenizer for event loops
own_template  chat templates of requests, in a process of their own
documents     texts that the template places, and the prompt in segments around them
"""

from quire.chat.conversation import ChatMessage, Conversation, Function, Tool
from quire.chat.structured import StructuredOutputs
from quire.chat.tools import ToolCall, parse_tools, tool_format

__all__ = [
    "ChatMessage",
    "Conversation",
    "Function",
    "StructuredOutputs",
    "Tool",
    "ToolCall",
    "parse_tools",
    "tool_format",
]
