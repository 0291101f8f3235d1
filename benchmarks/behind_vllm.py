"""vLLM on a CPU alone, with its own offloading, and with quire's connector: time to first token and throughput.

    python benchmarks/behind_vllm.py [--rounds 2] [--model FOLDER]

Needs the environment that `benchmarks/peers/vllm_environment.py` makes. Each system has an engine of its own, one after
the other, and `--rounds` of them in turns; of each figure the best round is printed. The pool holds four prompts, so that
what is asked again comes from below it.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("QUIRE_VLLM", REPOSITORY / ".venv-vllm")) / "bin/python"
MODEL = REPOSITORY / "src/quire/assets/quire-tiny"
SYSTEMS = ("alone", "offloading", "quire", "quire again")
PROMPT, ASKED, BLOCK = 1600, 8, 32


def connector(system, place):
    tiers = ["host:256MiB", f"disk:{place}?capacity=1GiB"]
    if system == "offloading":
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 256 << 20},
        }
    return {
        "kv_connector": "QuireConnector",
        "kv_connector_module_path": "quire.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": tiers},
    }


def measure(system, place, model):
    """Print one system's figures as JSON; in the environment of vLLM."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    began = time.perf_counter()
    told = None if system == "alone" else KVTransferConfig(**connector(system, place))
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK,
        num_gpu_blocks_override=4 * (PROMPT // BLOCK + 2) + 1,
        max_num_seqs=4,
        dtype="float32",
        kv_transfer_config=told,
    )
    figures = {"start_s": time.perf_counter() - began}
    rng = random.Random(1)

    def drawn(count, length):
        return [[rng.randrange(5, 250) for _ in range(length)] for _ in range(count)]

    def served(texts, num_tokens):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        began = time.perf_counter()
        prompts = [{"prompt_token_ids": text} for text in texts]
        outs = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began, sum(out.num_cached_tokens for out in outs)

    asked = drawn(ASKED, PROMPT)
    if system == "quire again":
        figures["first_s"], figures["first_cached"] = served(asked[:1], 1)
    served(drawn(2, PROMPT), 8)  # warm
    misses = [
        served([text], 1) for text in (drawn(ASKED, PROMPT) if system == "quire again" else asked)
    ]
    served(drawn(4, PROMPT), 1)
    time.sleep(1)
    hits = [served([text], 1) for text in asked]
    figures["miss_ms"] = 1e3 * statistics.median(seconds for seconds, _ in misses)
    figures["hit_ms"] = 1e3 * statistics.median(seconds for seconds, _ in hits)
    figures["hit_cached"] = sum(cached for _, cached in hits) / (ASKED * PROMPT)
    seconds = [served(drawn(16, 480), 32)[0] for _ in range(3)]
    figures["no_reuse_tokens_per_s"] = 16 * 512 / min(seconds)
    began = time.perf_counter()
    llm.llm_engine.engine_core.shutdown()
    figures["stop_s"] = time.perf_counter() - began
    print("FIGURES", json.dumps(figures), flush=True)


def run(system, place, model):
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": str(REPOSITORY / "src"),
    }
    done = subprocess.run(
        [PYTHON, __file__, "--system", system, "--place", place, "--model", model],
        env=os.environ | environment,
        capture_output=True,
        check=False,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    if not lines:
        print(f"{system}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    return json.loads(lines[0].removeprefix("FIGURES "))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--system", choices=SYSTEMS)
    parser.add_argument("--place")
    told = parser.parse_args()
    if told.system:
        measure(told.system, told.place, told.model)
        return
    figures = {system: [] for system in SYSTEMS}
    for _ in range(told.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for system in SYSTEMS:
                figures[system].append(run(system, f"{folder}/kv", told.model))
                print(system, json.dumps(figures[system][-1]), flush=True)
    print(
        "| system | TTFT miss, ms | TTFT hit, ms | of it cached | no reuse, tokens/s | first hit, ms |"
    )
    print("|---|---|---|---|---|---|")
    for system, rounds in figures.items():
        best = {}
        for each in filter(None, rounds):
            for name, value in each.items():
                choose = max if "cached" in name or "per_s" in name else min
                best[name] = choose(best.get(name, value), value)
        if best:
            first = f"{1e3 * best['first_s']:.0f}" if "first_s" in best else ""
            print(
                f"| {system} | {best['miss_ms']:.0f} | {best['hit_ms']:.0f} | {best['hit_cached']:.0%} "
                f"| {best['no_reuse_tokens_per_s']:.0f} | {first} |"
            )


if __name__ == "__main__":
    main()
