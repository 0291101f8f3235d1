"""Runs of a real vLLM on a CPU, recorded: requests with their measured times, and the steps that they took.

    .venv-vllm/bin/python benchmarks/record_vllm.py FOLDER [--wait-for FILE]

Writes six runs for `quire simulate --recorded`: three loads, light to more than it can serve, whose prompts share heads or do
not; and of each its steps, a profile for `quire calibrate`. The engine is the tests' tiny model in float32. With
--wait-for nothing is measured until the file is there (it is removed after each half, and HALF.done written), so that others can
be kept from computing meanwhile.
"""

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path

from recorded_loads import LOADS, load, row, tokens, write, write_run
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.version import __version__

REPOSITORY = Path(__file__).parents[1]
MODEL = REPOSITORY / "src/quire/assets/quire-tiny"
BLOCK = 32
SETTINGS = {
    "tensor_parallel_size": 1,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 4096,
    "dtype": "float32",
    "enforce_eager": True,
    "num_gpu_blocks_override": 350,
    "block_size": BLOCK,
    "enable_prefix_caching": True,
    "async_scheduling": False,
    "distributed_executor_backend": "uni",
}
STEPS = "QUIRE_STEPS"


class RecordingScheduler(Scheduler):
    """vLLM's scheduler, which writes down what each step had to do and how long it took."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._path = Path(os.environ[STEPS])
        self._ended = 0.0

    def schedule(self, *args, **options):
        began = time.perf_counter()
        output = super().schedule(*args, **options)
        output.quire_began, output.quire_work = began, []
        for request, new in output.num_scheduled_tokens.items():
            before = self.requests[request].num_computed_tokens - new
            asked = self.requests[request].num_prompt_tokens
            output.quire_work.append((new, before, before >= asked))
        return output

    def update_from_output(self, scheduled, model_output):
        made = super().update_from_output(scheduled, model_output)
        now = time.perf_counter()
        if scheduled.quire_work:
            row = {
                "chunks": [
                    [new, before] for new, before, decodes in scheduled.quire_work if not decodes
                ],
                "contexts": [before for _, before, decodes in scheduled.quire_work if decodes],
                "seconds": round(now - (self._ended or scheduled.quire_began), 7),
            }
            with self._path.open("a") as file:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
        # the loop goes on at once while there is work, so what lies between two steps belongs to the later
        self._ended = now if self.requests else 0.0
        return made


async def serve(engine, name, requests):
    """Send requests as they arrive; return a row for each."""
    began, rows = time.perf_counter(), []

    async def ask(number, arrival, prompt, outputs):
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        sent = time.perf_counter() - began
        params = SamplingParams(
            temperature=0, max_tokens=outputs, min_tokens=outputs, ignore_eos=True
        )
        asked = engine.generate({"prompt_token_ids": prompt}, params, f"{name}-{number}")
        async for answer in asked:
            last = answer
        times = last.metrics
        ttft, total = (end - times.queued_ts for end in (times.first_token_ts, times.last_token_ts))
        rows.append(row(sent, prompt, outputs, ttft, total))

    await asyncio.gather(*(ask(number, *each) for number, each in enumerate(requests)))
    return rows


def wait_for(signal, part):
    if signal is not None:
        print("ready for", part, flush=True)
        while not signal.exists():
            time.sleep(0.05)
        time.sleep(0.5)


def done(signal, part):
    if signal is not None:
        signal.unlink()
        signal.with_name(f"{part}.done").touch()


async def record(folder, signal):
    steps = folder / "steps.jsonl"
    steps.unlink(missing_ok=True)
    os.environ[STEPS] = str(steps)
    told = AsyncEngineArgs(
        model=str(MODEL), skip_tokenizer_init=True, scheduler_cls=RecordingScheduler, **SETTINGS
    )
    engine = AsyncLLM.from_engine_args(told)
    header = {
        "engine": "vLLM",
        "device": "cpu",
        "model": "quire-tiny",
        "meta": {"vllm_version": __version__, "engine_kwargs": SETTINGS},
    }
    rng = random.Random(0)
    for count in range(1, SETTINGS["max_num_batched_tokens"] + 1):  # each shape is compiled once
        await serve(engine, f"warm-{count}", [(0.0, tokens(rng, count), 1)])
    await serve(engine, "warm", load(0, 8.0, 3, shared=True))
    for shared in (False, True):
        kind = "shared" if shared else "unshared"
        wait_for(signal, kind)
        for name, (rate, seconds) in LOADS.items():
            part = f"{name}_{kind}"
            steps.write_text("")
            rows = await serve(engine, part, load(part, rate, seconds, shared=shared))
            write_run(folder / f"vllm_cpu_{part}.jsonl.gz", header, rows, BLOCK)
            profile = [json.loads(line) for line in steps.read_text().splitlines()]
            write(folder / f"vllm_cpu_{part}.steps.jsonl.gz", profile)
            print(part, len(rows), "requests", flush=True)
        done(signal, kind)
    steps.unlink()
    engine.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wait-for", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(record(options.folder, options.wait_for))


if __name__ == "__main__":
    main()
