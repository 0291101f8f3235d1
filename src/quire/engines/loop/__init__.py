"""quire's own engine: many requests at once, each shared prefix computed and read once.

    engine = Engine(model, tokenizer, kv_memory="4GiB")
    for output in engine.generate(["Once upon", "Once more"], SamplingParams(max_tokens=64)):
        print(output.outputs[0].text)

params        what a request asks of its tokens
requests      what else callers ask for
sampling      from logits to tokens, guessed ahead or not
answers       requests while they run, and what is said of them
settings      of an engine
computing     the forward of a step, by `engines.packed`
tiers         KV below the pools
engine        Engine: requests in, outputs out
async_engine  the same for event loops, on a thread

Needs the extra `hf`.
"""

from quire.engines.loop.answers import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from quire.engines.loop.async_engine import AsyncEngine
from quire.engines.loop.engine import Engine
from quire.engines.loop.params import SamplingParams

__all__ = [
    "AsyncEngine",
    "CompletionOutput",
    "Engine",
    "EngineStats",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]
