"""Serves conversations with a real vLLM, in its environment: `python vllm_run.py JOB.json RESULT.json`.

A job: `model`, `conversations`, `turns`, `engine` (options of `vllm.LLM`), `extra` (the connector's options, or null),
`faults` (a `FaultPlan`, or null), `repeat` (serve the prompts of the last turn again, one by one), `rounds` (as often, each
with other conversations; a line is printed after each). The result is of the first round.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)


def tiny_gemma(path):
    """Save a Gemma 3 of random weights: layers with a window of 64 tokens between full ones."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).save_pretrained(path)


def serve(llm, job):
    """Yield what became of each request, turn by turn; who asks next depends on what was answered."""
    from vllm import SamplingParams

    rng = random.Random(job["seed"])
    params = SamplingParams(
        temperature=0,
        max_tokens=job["max_tokens"],
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=job.get("prompt_logprobs"),
    )
    system = [rng.randrange(5, 250) for _ in range(100)]
    texts = [
        system + [rng.randrange(5, 250) for _ in range(60)] for _ in range(job["conversations"])
    ]
    for _ in range(job["turns"]):
        for text, out in zip(texts, generate(llm, texts, params), strict=True):
            yield out
            text.extend(out["tokens"] + [rng.randrange(5, 250) for _ in range(40)])
    for text in texts[: job["repeat"]]:
        yield from generate(llm, [text], params)


def generate(llm, texts, params, **words):
    began = time.perf_counter()
    prompts = [{"prompt_token_ids": list(text)} for text in texts]
    for out in llm.generate(prompts, params, use_tqdm=False, **words):
        answer = out.outputs[0]
        best = [
            sorted((each.logprob for each in place.values()), reverse=True)
            for place in answer.logprobs
        ]
        yield {
            "prompt": len(out.prompt_token_ids),
            "cached": out.num_cached_tokens,
            "tokens": list(answer.token_ids),
            "gaps": [place[0] - place[1] for place in best],
            "seconds": time.perf_counter() - began,
        }


def make_engine(job):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options = {}
    if job["extra"] is not None:
        faults = job.get("faults")
        if faults:
            os.environ["QUIRE_FAULTS"] = json.dumps(faults)
        ours = {
            "kv_connector": "FaultyConnector" if faults else "QuireConnector",
            "kv_connector_module_path": "faulty_connector" if faults else "quire.engines.vllm",
            "kv_role": job.get("role", "kv_both"),
            "kv_connector_extra_config": job["extra"],
        }
        if "secondary_tiers" in job["extra"]:  # vLLM's own offloading
            ours |= {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
        if job.get("beside"):
            other = {
                "kv_connector": "ForeignConnector",
                "kv_connector_module_path": "foreign_connector",
                "kv_role": "kv_both",
            }
            pair = [ours, other] if job["beside"] == "before" else [other, ours]
            ours = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": pair},
            }
        options["kv_transfer_config"] = KVTransferConfig(**ours)
    options |= {"block_size": 32, "dtype": "float32"} | job["engine"]
    return LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        disable_log_stats=False,
        **options,
    )


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(job.get("environment", {}))
    if job["model"].endswith("gemma") and not Path(job["model"]).exists():
        tiny_gemma(job["model"])
    llm = make_engine(job)
    began = time.perf_counter()
    results = list(serve(llm, job))
    seconds = time.perf_counter() - began
    for number in range(1, job.get("rounds", 1)):
        sys.stdout.write(f"round {number}\n")
        sys.stdout.flush()
        list(serve(llm, job | {"seed": job["seed"] + number}))
    preemptions = sum(
        each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions"
    )
    counts = {
        " ".join([each.name, *filter(None, [each.labels.get("tier")])]): each.value
        for each in llm.get_metrics()
        if "quire" in each.name or ("tiering" in each.name and hasattr(each, "value"))
    }
    llm.llm_engine.engine_core.shutdown()
    told = {"requests": results, "preemptions": preemptions, "seconds": seconds, "counts": counts}
    Path(sys.argv[2]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
