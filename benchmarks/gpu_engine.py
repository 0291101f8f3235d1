"""The engine on a GPU: requests per second as it is, with prefixes read by each request itself, and without CUDA graphs.

python benchmarks/gpu_engine.py [--rounds 3] [--without-transformers]

A Llama of 1.2 billion random weights in bfloat16 (2,048 wide, 16 layers, 32:8 heads), greedy, all requests at once,
nothing cached when a round begins. Beside it transformers' continuous batching with its own settings, one round.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from quire import ops
from quire.engines.loop import Engine, SamplingParams
from quire.kernels.attention.plan import MIN_SAVED_TOKENS

VOCAB = 32_000
ROWS = {  # requests, prefixes, tokens of a prefix, own, new
    "shared_2k": (64, 2, 2_048, 96, 128),
    "shared_8k": (64, 2, 8_192, 96, 128),
    "unshared": (64, 64, 0, 1_024, 128),
}


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=2_048,
        intermediate_size=8_192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def prompts(row, seed):
    count, prefixes, shared, own, _ = ROWS[row]
    source = np.random.default_rng(seed)
    heads = source.integers(0, VOCAB, (prefixes, shared)).tolist()
    tails = source.integers(0, VOCAB, (count, own)).tolist()
    return [[*heads[i % prefixes], *tail] for i, tail in enumerate(tails)]


def run(engine, row, seed):
    """Return requests/s, median ms to the first token, and median ms between tokens."""
    new = ROWS[row][-1]
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    asked = prompts(row, seed)
    start = time.perf_counter()
    outputs = engine.generate(asked, params)
    taken = time.perf_counter() - start
    ops.reclaim(engine.manager, engine.manager.pools[0].num_blocks)
    times = [output.metrics for output in outputs]
    first = statistics.median(each.first_token_latency for each in times)
    last = [each.last_token_ts - each.arrival_time for each in times]
    between = [
        (end - each.first_token_latency) / (new - 1) for end, each in zip(last, times, strict=True)
    ]
    return len(asked) / taken, first * 1e3, statistics.median(between) * 1e3


def beside(loaded, row):
    """Return requests/s of transformers' continuous batching."""
    new = ROWS[row][-1]
    wanted = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    asked = prompts(row, 9)
    for given in (asked[:2], asked):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loaded.generate_batch(
            given, generation_config=wanted, continuous_batching_config=ContinuousBatchingConfig()
        )
        torch.cuda.synchronize()
    return len(asked) / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--without-transformers", action="store_true")
    args = parser.parse_args()
    loaded = model()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    engine = Engine(loaded, kv_memory="24GiB", max_running=64, max_step_tokens=8_192)
    for row in args.rows.split(","):
        found = {"as it is": [], "read by each": [], "without graphs": []}
        for seed in range(args.rounds + 1):
            for way, rounds in found.items():
                (plan,) = engine._forward._plans
                plan.min_saved_tokens = 2**40 if way == "read by each" else MIN_SAVED_TOKENS
                engine._forward.model._decoder._captures = way != "without graphs"
                rounds.append(run(engine, row, seed))
        for way, rounds in found.items():
            best = max(rounds[1:])
            print(
                f"{row:10} {way:16} {best[0]:7.2f} requests/s, first token {best[1]:7.1f} ms, "
                f"between tokens {best[2]:6.2f} ms",
                flush=True,
            )
    engine.close()
    if not args.without_transformers:
        for row in args.rows.split(","):
            print(f"{row:10} {'transformers':16} {beside(loaded, row):7.2f} requests/s", flush=True)


if __name__ == "__main__":
    main()
