"""A chat with a transformers model: each turn computes only what is new.

python examples/hf_chat.py [MODEL FOLDER OR HUB ID]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import PrefixCache, demo_model

TINY = demo_model()
QUESTIONS = ("What is a list?", "How does it differ from a tuple?", "When is it copied?")


def main(source: str) -> None:
    """Ask a few questions in one conversation and say what each turn reused."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    cache = PrefixCache(model, capacity="256MiB")

    talk = [{"role": "system", "content": "You are a patient teacher of Python. " * 20}]
    for question in QUESTIONS:
        talk.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = cache.generate(**prompt, max_new_tokens=40, do_sample=False)
        new_ids = output[0, prompt["input_ids"].shape[1] :]
        reply = tokenizer.decode(new_ids, skip_special_tokens=True)
        talk.append({"role": "assistant", "content": reply})

        turn = cache.last
        print(f"> {question}\n{reply}")
        print(
            f"  [{turn.cached_tokens} tokens cached, {turn.computed_tokens} computed, "
            f"first token after {turn.ttft_s * 1e3:.0f} ms]\n"
        )
    print(cache)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(TINY))
