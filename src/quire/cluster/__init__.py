"""Many replicas as one service.

index     which replica holds which prefix in which tier, from the events of their caches
keys      blocks by their tokens and all before them
numbers   64-bit names to small numbers, in arrays
proxy     a reverse proxy for OpenAI's API
prefixes  what it knows of prompts: from events, or from what it sent
upstreams servers behind it
"""
