"""The parts of an engine's decode step: the control plane, and the forward.

python benchmarks/control_plane.py [--dtype bfloat16] [--requests 64] [--runs 3]

64 requests on the small model: two prefixes of 2,048 tokens, 96 of each one's own, 128 new. Steps count in which all
of them decode; shares are of all the time of these, so what a step takes that fills blocks is in them. The control
plane is the scheduler with the manager (plan, complete), planned copies and the engine's block tables.
"""

import argparse
from collections import Counter
from random import Random
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM

import quire
from quire.engines.loop import Engine, SamplingParams
from quire.kernels.attention import AttentionPlan

CONTROL_PLANE = ("plan", "complete", "copies", "tables")
PREFIX, OWN, NEW = 2048, 96, 128


class Clock:
    """Adds up what calls take, by name."""

    def __init__(self):
        self.seconds = Counter()

    def watch(self, owner, method, name):
        """Have calls of a method timed."""
        call = getattr(owner, method)

        def timed(*args, **kwargs):
            start = perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += perf_counter() - start

        setattr(owner, method, timed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    dtype, random, clock = getattr(torch, args.dtype), Random(0), Clock()
    model = AutoModelForCausalLM.from_pretrained(quire.demo_model(), dtype=dtype).eval()
    engine = Engine(model, kv_memory="512MiB", max_running=args.requests)
    scheduler, forward = engine.scheduler, engine._forward
    clock.watch(scheduler, "plan", "plan")
    clock.watch(scheduler, "complete", "complete")
    clock.watch(forward, "copy", "copies")
    clock.watch(forward, "_update_tables", "tables")
    clock.watch(AttentionPlan, "update", "attention plan")
    clock.watch(forward, "_computed", "the model")
    clock.watch(engine._sampler, "sample", "sampling")
    clock.watch(engine, "_end_outdated", "is the model as it was")
    for _ in range(args.runs):
        prefixes = [random.choices(range(256), k=PREFIX) for _ in range(2)]
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        for number in range(args.requests):
            engine.add_request(prefixes[number % 2] + random.choices(range(256), k=OWN), params)
        parts, whole, num_steps = Counter(), 0.0, 0
        while engine.has_unfinished():
            before = len(scheduler.queues.decoding)
            clock.seconds.clear()
            start = perf_counter()
            engine.step()
            taken = perf_counter() - start
            if before == len(scheduler.queues.decoding) == args.requests:
                parts, whole, num_steps = parts + clock.seconds, whole + taken, num_steps + 1
        parts["all else"] = whole - parts.total()
        share = sum(parts[name] for name in CONTROL_PLANE) / whole
        print(
            f"{args.dtype}, {num_steps} steps of {1e3 * whole / num_steps:.2f} ms: control plane {share:.2%} ("
            + ", ".join(f"{name} {parts[name] / whole:.2%}" for name in CONTROL_PLANE)
            + ")\n    "
            + ", ".join(f"{n} {s / whole:.1%}" for n, s in parts.items() if n not in CONTROL_PLANE),
            flush=True,
        )


if __name__ == "__main__":
    main()
