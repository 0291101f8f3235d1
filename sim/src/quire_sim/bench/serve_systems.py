"""The systems that `quire bench serve` measures, each behind the same call: prompts in, tokens and their times out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from quire.bench.process import BenchProcess
from quire.bench.timing import Stamp
from quire.config import parse_bytes
from quire.engines.hf import PrefixCache
from quire.engines.loop import Engine, SamplingParams
from quire.errors import ConfigError

MAX_RUNNING = 64
"""Requests that run at once, in all systems that batch."""
KV_MEMORY = "2GiB"
NUM_CB_BLOCKS, NUM_CB_TOKENS, NUM_CB_RUNNING = 1024, 512, 4
"""For transformers: KV pages of 256 tokens, tokens of one step, and requests that run at once.

Its steps score the tokens of each request against those of all others, so that more than four are slower.
"""


Systems: TypeAlias = "Mapping[tuple[str, str], Any]"
"""What is measured, by name and mode."""


class ServedModelFiles(NamedTuple):
    """The folder of a model, the type that it computes in, and the interpreter of an environment that has vLLM."""

    folder: Path
    dtype: str
    vllm: Path


class ServedRun(NamedTuple):
    """A run: seconds in all, and from its beginning to each request's first and last token; tokens that were cached.

    `token_ids` are what was generated, for each request.
    """

    seconds: float
    first_s: list[float]
    last_s: list[float]
    num_cached: int
    token_ids: list[list[int]]


class QuireServed:
    """quire's engine."""

    def __init__(self, files: ServedModelFiles) -> None:
        self._engine = Engine(_model(files), kv_memory=KV_MEMORY, max_running=MAX_RUNNING)

    def run(self, prompts: list[list[int]], num_new: int) -> ServedRun:
        """Generate for all prompts at once; the times of tokens are the engine's own."""
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        start = time.perf_counter()
        outputs = self._engine.generate(prompts, params)
        seconds = time.perf_counter() - start
        times = [output.metrics for output in outputs]
        return ServedRun(
            seconds,
            [cast("float", each.first_token_latency) for each in times],
            [cast("float", each.last_token_ts) - each.arrival_time for each in times],
            sum(output.num_cached_tokens for output in outputs),
            [output.outputs[0].token_ids for output in outputs],
        )

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


class CachedServed:
    """`PrefixCache.generate`, one request after the other."""

    def __init__(self, files: ServedModelFiles) -> None:
        self._cache = PrefixCache(_model(files), KV_MEMORY)

    def run(self, prompts: list[list[int]], num_new: int) -> ServedRun:
        """Generate for the prompts one by one; the times count what stood before."""
        first: list[float] = []
        last: list[float] = []
        tokens: list[list[int]] = []
        num_cached = 0
        start = time.perf_counter()
        for prompt in prompts:
            stamp = Stamp()
            generated = self._cache.generate(
                input_ids=torch.tensor([prompt]),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                streamer=stamp,
            )
            first.append(stamp.first_at - start)
            last.append(time.perf_counter() - start)
            tokens.append(generated[0, len(prompt) :].tolist())
            num_cached += self._cache.last.cached_tokens
        return ServedRun(time.perf_counter() - start, first, last, num_cached, tokens)

    def close(self) -> None:
        """Do nothing: it ends with its blocks."""


class TransformersServed:
    """transformers' own continuous batching."""

    def __init__(self, files: ServedModelFiles) -> None:
        self._model = _model(files)
        self._settings = ContinuousBatchingConfig(
            num_blocks=NUM_CB_BLOCKS,
            max_batch_tokens=NUM_CB_TOKENS,
            max_requests_per_batch=NUM_CB_RUNNING,
        )

    def run(self, prompts: list[list[int]], num_new: int) -> ServedRun:
        """Generate for all prompts at once; how much of them was shared is not told."""
        wanted = GenerationConfig(
            max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        start = time.perf_counter()
        done = self._model.generate_batch(
            prompts,
            generation_config=wanted,
            continuous_batching_config=self._settings,
            persistent_manager=True,  # what is cached stays
            record_timestamps=True,
        )
        seconds = time.perf_counter() - start
        each = [done[key] for key in sorted(done, key=lambda key: int(key.rpartition("_")[2]))]
        return ServedRun(
            seconds,
            [one.timestamps[0] - start for one in each],
            [one.timestamps[-1] - start for one in each],
            0,
            [one.generated_tokens for one in each],
        )

    def close(self) -> None:
        """End its threads."""
        self._model.destroy_cached_continuous_batching_manager()


class VllmServed:
    """vLLM on the CPU, a process of its own environment."""

    def __init__(self, files: ServedModelFiles, mode: str) -> None:
        script = Path(__file__).with_name("vllm_serve.py")
        words = [str(files.vllm), str(script), str(files.folder), files.dtype, mode]
        self._process = BenchProcess(
            [*words, str(MAX_RUNNING)], vllm_environment(files.vllm), is_asked=True
        )
        self._answer()

    def run(self, prompts: list[list[int]], num_new: int) -> ServedRun:
        """Generate for all prompts at once; the times of tokens are vLLM's own."""
        self._process.input.write(json.dumps({"prompts": prompts, "num_new": num_new}) + "\n")
        self._process.input.flush()
        return ServedRun(**self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _answer(self) -> Any:
        for line in self._process.output:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise ConfigError(f"vLLM ended without a result: {self._process.last_words()}")


def vllm_environment(python: Path) -> dict[str, str]:
    """Return the environment in which vLLM is fastest on a CPU: threads bound to cores, its documentation's libraries loaded first."""
    cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
    lib = python.parent.parent / "lib"
    loaded = [*lib.glob("libtcmalloc_minimal.so.4"), *lib.glob("libiomp5.so")]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return kept | {
        "LD_PRELOAD": ":".join(str(path.resolve()) for path in loaded),
        "VLLM_CPU_KVCACHE_SPACE": str(max(parse_bytes(KV_MEMORY) >> 30, 1)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _model(files: ServedModelFiles) -> Any:
    models: Any = AutoModelForCausalLM
    return models.from_pretrained(files.folder, dtype=getattr(torch, files.dtype)).eval()


Served = QuireServed | CachedServed | TransformersServed | VllmServed
