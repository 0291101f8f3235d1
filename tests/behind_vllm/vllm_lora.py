"""Asks one adapter of a real vLLM whose files change, in its environment: `python vllm_lora.py JOB.json RESULT.json`.

A job: `model`, `extra` (the connector's options), `adapter` (a folder), `steps`: the seed of the weights that lie there,
and whether vLLM is told to load them anew. The adapter has one name and number throughout.
"""

import json
import sys
import time
from pathlib import Path

from vllm_run import generate, make_engine

PROMPT = [5 + 7 * at % 240 for at in range(200)]


def write_adapter(place, model, seed):
    """Save an adapter of random weights for the queries and values of a Llama, unless it lies there."""
    import torch
    from safetensors.torch import save_file

    marker = place / "seed.txt"
    if marker.exists() and marker.read_text() == str(seed):
        return
    config = json.loads((Path(model) / "config.json").read_text())
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name in ("q_proj", "v_proj"):
            heads = config["num_attention_heads" if name == "q_proj" else "num_key_value_heads"]
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (
                ("lora_A", (8, config["hidden_size"])),
                ("lora_B", (heads * config["head_dim"], 8)),
            ):
                weights[f"{path}.{part}.weight"] = torch.randn(shape, generator=random) * 0.3
    place.mkdir(exist_ok=True)
    told = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    told |= {"peft_type": "LORA", "base_model_name_or_path": str(model)}
    (place / "adapter_config.json").write_text(json.dumps(told))
    save_file(weights, place / "adapter_model.safetensors")
    marker.write_text(str(seed))


def main():
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    job = json.loads(Path(sys.argv[1]).read_text())
    place = Path(job["adapter"])
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
    write_adapter(place, job["model"], job["steps"][0][0])
    llm = make_engine(job | {"engine": options})
    results = []
    for seed, is_loaded_anew in job["steps"]:
        write_adapter(place, job["model"], seed)
        assert llm.reset_prefix_cache()  # vLLM's own, which knows adapters by their names
        asked = LoRARequest("writer", 1, str(place), load_inplace=bool(is_loaded_anew))
        results += generate(llm, [PROMPT], params, lora_request=asked)
        time.sleep(1)  # it is stored behind the answer
    llm.llm_engine.engine_core.shutdown()
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
