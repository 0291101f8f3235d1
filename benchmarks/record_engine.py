"""Runs of quire's own engine on a CPU, recorded as those of vLLM are, and held to the simulation.

    python benchmarks/record_engine.py FOLDER

Writes a run for each load and its steps, a profile for `quire calibrate`, and prints by how much the simulation by that
profile misses the run.
"""

import argparse
import time
from pathlib import Path

import torch
from recorded_loads import LOADS, load, row, write, write_run
from transformers import AutoModelForCausalLM

from quire import demo_model
from quire.engines.loop import Engine, SamplingParams
from quire_sim.hardware.profiles import MeasuredTimes, read_calibration
from quire_sim.serving.recorded import RecordedRun

BLOCK = 32
SETTINGS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "dtype": "float32",
    "num_gpu_blocks_override": 350,
    "block_size": BLOCK,
    "async_scheduling": False,
}
HEADER = {"engine": "quire", "device": "cpu", "model": "quire-tiny", "meta": SETTINGS}


class Profile:
    """The steps that an engine's scheduler planned, and the time of each."""

    def __init__(self, scheduler):
        self.rows, self._step, self._began = [], None, 0.0
        self._scheduler, self._plan = scheduler, scheduler.plan
        scheduler.plan = self.plan

    def plan(self, now):
        self.end()  # a step lasts until the next one is planned: answers are told in between
        began = time.perf_counter()
        step = self._plan(now)
        if step is not None:
            num, starts = step.num_decodes, step.starts.tolist()
            chunks = list(zip(step.lengths[num:].tolist(), starts[num:], strict=True))
            self._step, self._began = {"chunks": chunks, "contexts": starts[:num]}, began
        return step

    def end(self):
        """The step under way has ended, where one was."""
        if self._step is not None:
            self.rows.append(self._step | {"seconds": time.perf_counter() - self._began})
        self._step = None


def serve(engine, profile, name, requests):
    """Send requests as they arrive; return a row for each. Times count from when the engine took one over."""
    began, pending, running, rows = time.perf_counter(), list(requests), {}, []
    while pending or running:
        now = time.perf_counter() - began
        while pending and pending[0][0] <= now:
            arrival, prompt, outputs = pending.pop(0)
            params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
            asked = engine.add_request(prompt, params, request_id=f"{name}-{len(pending)}")
            running[asked] = [arrival, prompt, outputs, now, None]
        if not running:
            time.sleep(max(0.0, pending[0][0] - now))
            continue
        for output in engine.step():
            request, now = running[output.request_id], time.perf_counter() - began
            if request[4] is None and output.outputs[0].num_tokens:
                request[4] = now
            if output.finished:
                arrival, prompt, outputs, queued, first = running.pop(output.request_id)
                rows.append(row(arrival, prompt, outputs, first - queued, now - queued))
        if not running:
            profile.end()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32).eval()
    engine = Engine(model, block_size=BLOCK, num_blocks=350, max_running=16, max_step_tokens=512)
    profile = Profile(engine.scheduler)
    serve(engine, profile, "warm", load(0, 20.0, 2, shared=True))
    for shared in (False, True):
        for name, (rate, seconds) in LOADS.items():
            part = f"{name}_{'shared' if shared else 'unshared'}"
            profile.rows.clear()
            rows = serve(engine, profile, part, load(part, rate, seconds, shared=shared))
            run, steps = (
                folder / f"quire_cpu_{part}.jsonl.gz",
                folder / f"quire_cpu_{part}.steps.jsonl.gz",
            )
            write_run(run, HEADER, rows, BLOCK)
            write(steps, profile.rows)
            tell(RecordedRun(run), read_calibration(steps))


def tell(run, calibration):
    settings = run.settings
    timing = MeasuredTimes(settings.model, settings.device, calibration=calibration)
    errors = run.compare(timing).errors
    said = ", ".join(f"{key} {getattr(errors, key):+.1%}" for key in errors.__struct_fields__)
    print(
        f"{run.path.name}: {len(run.requests)} requests, {said}; {calibration.num_steps:,} steps, off by "
        f"{calibration.error:.1%}"
    )


if __name__ == "__main__":
    main()
