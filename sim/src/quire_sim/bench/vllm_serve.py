"""vLLM's part of `quire bench serve`, run by the interpreter of vLLM's own environment, which has no quire.

    python vllm_serve.py MODEL DTYPE eager|compiled MAX_RUNNING

A line of JSON in (`prompts`, token ids, and `num_new`), a line `RESULT` and JSON out. `benchmarks/peers/vllm_environment.py`
makes the environment.
"""

import json
import sys
import time
from importlib import import_module
from typing import Any


def measure(engine: Any, vllm: Any, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
    """Generate for all prompts at once; return the seconds of all, to each one's first token, and cached tokens."""
    params = vllm.SamplingParams(
        temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = engine.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "first_s": [output.metrics.first_token_latency for output in outputs],
        "last_s": [
            output.metrics.first_token_latency
            + output.metrics.last_token_ts
            - output.metrics.first_token_ts
            for output in outputs
        ],
        "num_cached": sum(output.num_cached_tokens or 0 for output in outputs),
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
    }


def main() -> None:
    """Answer until the input ends."""
    model, dtype, mode, max_running = sys.argv[1:]
    vllm = import_module("vllm")
    engine = vllm.LLM(
        model=model,
        dtype=dtype,
        enforce_eager=mode == "eager",
        max_num_seqs=int(max_running),
        enable_prefix_caching=True,
        disable_log_stats=False,
    )
    sys.stdout.write("RESULT null\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(f"RESULT {json.dumps(measure(engine, vllm, **json.loads(line)))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
