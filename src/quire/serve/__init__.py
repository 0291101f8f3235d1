"""A server over the engine that speaks OpenAI's protocol.

protocol    requests as structs that check themselves
service     an engine as a server has it: who may ask, how much is in flight, the tokenizer
replies     an engine's outputs as completions and chunks
generation  from a request to an answer
responses   OpenAI's responses: requests as chats, answers as items and events (`items`, `response_routes`)
stored      kept responses, which a later request goes on from
pins        pins of the operator, and of breakpoints
operator    the cache by hand, metrics, the page
app         all routes
server      its run and its end
"""
