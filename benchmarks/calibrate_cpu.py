"""Does the simulator predict what a real model takes? Two measured points, then others.

A Llama of 53 M random weights runs on one CPU thread behind `PrefixCache`. Two prompts are measured
and calibrate the roofline; the serving simulation then predicts the time to the first token of other
prompt lengths, with and without cached prefixes, which are measured as well. Rounds interleave
all of them, so that a busy machine slows all alike; medians count.

    python benchmarks/calibrate_cpu.py [--rounds 5] [--attention eager] [--json]

Times are read twice: wall time, and CPU time of the process, which other programs on the machine
disturb less. Each has its own calibration.

Attention is transformers' eager one by default: it computes every new token with all others, so the
roofline counts all pairs. With `sdpa` a prompt without a cached prefix takes a causal path that one with
a prefix does not have, which one rate cannot describe. The model is wide and flat, so that
matrix products dominate as they do in large models.
"""

import argparse
import json
import time
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire import PrefixCache
from quire_sim.hardware import Attention, Roofline, accelerator_named, calibrate, model_facts
from quire_sim.serving import Cluster, Load, ReplicaLimits, simulate
from quire_sim.trace.rows import TraceRequest, compress

BLOCK = 16
HEAD_DIM = 256
VOCAB = 1024
CALIBRATION = ((768, 0), (128, 256))
"""The two points that the roofline is fitted to: (new tokens, cached tokens)."""

OTHERS = (
    (256, 0),
    (512, 0),
    (1280, 0),
    (256, 512),
    (512, 512),
    (384, 768),
    (128, 1024),
    (256, 1024),
)
"""The points that are predicted."""

PREFIX_TOKENS = 1024

PAIRS = {"eager": Attention.ALL_PAIRS, "sdpa": Attention.CAUSAL}

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Stamp:
    """A streamer that notes both clocks when it is made and when the first new token comes."""

    def __init__(self):
        self.first = {}
        self.puts = 0
        self.started = {name: clock() for name, clock in CLOCKS.items()}

    def put(self, _value):
        self.puts += 1
        if self.puts == 2:
            self.first = {name: clock() for name, clock in CLOCKS.items()}

    def end(self):
        pass

    @property
    def seconds(self):
        return {name: self.first[name] - self.started[name] for name in CLOCKS}


class RealRuns:
    """A real model, and what its prompts take."""

    def __init__(self, hidden, layers, attention):
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // HEAD_DIM,
            num_key_value_heads=max(hidden // (3 * HEAD_DIM), 1),
            max_position_embeddings=8192,
            eos_token_id=None,
            attn_implementation=attention,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        self.facts = model_facts(config.to_dict(), "random llama").stored_as("float32")
        self._model = LlamaForCausalLM(config).eval()
        self._cache = PrefixCache(self._model, "1GiB", block_size=BLOCK)
        self._random = torch.Generator().manual_seed(0)
        self._num_runs = 0
        self._prefix = self._draw(PREFIX_TOKENS)
        self._prefix[0, 0] = VOCAB - 1
        self._generate(self._prefix)

    def run(self, new, cached):
        """Compute `new` tokens after the first `cached` ones of the prefix; return the seconds."""
        suffix = self._draw(new)
        suffix[0, 0] = self._num_runs = self._num_runs + 1  # continues nothing that is cached
        stamp = Stamp()
        self._generate(torch.cat([self._prefix[:, :cached], suffix], dim=1), stamp)
        report = self._cache.last
        assert (report.cached_tokens, report.computed_tokens) == (cached, new), report
        return stamp.seconds

    def _generate(self, ids, streamer=None):
        self._cache.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=streamer,
            max_new_tokens=2,
            do_sample=False,
        )

    def _draw(self, count):
        return torch.randint(1, VOCAB, (1, count), generator=self._random)


def predicted_s(roofline, new, cached):
    """Return the simulated time to the first token, its prefix cached by an earlier request."""
    ids = compress(torch.arange((new + cached) // BLOCK, dtype=torch.int32).numpy())
    before = compress(torch.arange(cached // BLOCK, dtype=torch.int32).numpy())
    asks = [TraceRequest(1, 0.0, cached, 1, before)] if cached else []
    asks.append(TraceRequest(2, 1000.0, new + cached, 1, ids))
    served = []
    cluster = Cluster(ReplicaLimits(4096, BLOCK), roofline)
    simulate(cluster, Load(asks), observers=[served.append])
    assert served[-1].cached_tokens == cached
    return served[-1].ttft_s


def measure(runs, rounds):
    """Return {point: {clock: seconds of each round}}; one round before them is not counted."""
    points = [*CALIBRATION, *OTHERS]
    found = {point: {name: [] for name in CLOCKS} for point in points}
    for number in range(rounds + 1):
        for point in points:
            for name, seconds in runs.run(*point).items():
                if number:
                    found[point][name].append(seconds)
    return found


def compare(facts, found, clock, pairs):
    """Return the calibrated roofline and a row per point: measured, predicted, ratio."""
    medians = {point: median(seconds[clock]) for point, seconds in found.items()}
    machine = Roofline(facts, accelerator_named("cpu"), mfu=1.0, attention=pairs)
    fitted = calibrate(machine, [(*point, medians[point]) for point in CALIBRATION])
    rows = []
    for point, measured in medians.items():
        predicted = predicted_s(fitted, *point)
        rows.append(
            {
                "new": point[0],
                "cached": point[1],
                "measured_ms": measured * 1e3,
                "predicted_ms": predicted * 1e3,
                "ratio": predicted / measured,
                "calibration": point in CALIBRATION,
            }
        )
    return fitted, rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--attention", choices=list(PAIRS), default="eager")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = RealRuns(options.hidden, options.layers, options.attention)
    found = measure(runs, options.rounds)
    result = {"params": runs.facts.params, "rounds": options.rounds}
    result["seconds"] = [[*point, seconds] for point, seconds in found.items()]
    for clock in CLOCKS:
        fitted, rows = compare(runs.facts, found, clock, PAIRS[options.attention])
        rate = fitted.mfu * fitted.accelerator.peak_flops
        worst = max(abs(row["ratio"] - 1) for row in rows if not row["calibration"])
        result[clock] = {"flops": rate, "overhead_s": fitted.overhead_s, "worst": worst}
        result[clock]["rows"] = rows
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{runs.facts.params / 1e6:.1f} M parameters, one thread, {options.attention}")
    for clock in CLOCKS:
        fit = result[clock]
        print(
            f"\n{clock} time: {fit['flops'] / 1e9:.1f} GFLOP/s + {fit['overhead_s'] * 1e3:.1f} ms"
        )
        print("    new  cached  measured ms  predicted ms  ratio")
        for row in fit["rows"]:
            print(
                f"{row['new']:7,} {row['cached']:7,} {row['measured_ms']:12.1f} "
                f"{row['predicted_ms']:13.1f} {row['ratio']:6.3f}"
                + ("  (calibration)" if row["calibration"] else "")
            )
        print(f"worst of the {len(OTHERS)} predictions: {fit['worst']:.1%} off")


if __name__ == "__main__":
    main()
