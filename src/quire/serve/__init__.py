"""A server over the engine that speaks OpenAI's protocol.

protocol  requests as structs, every refusal as OpenAI's error object
chat      conversations to prompts, answers to tool calls
replies   an engine's outputs as completions and chunks
"""
