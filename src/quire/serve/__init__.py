"""A server over the engine that speaks OpenAI's protocol."""
