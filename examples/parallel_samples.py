"""Several samples of one prompt: it is computed once, and the samples share its blocks.

python examples/parallel_samples.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import PrefixCache, Scope, demo_model

TINY = demo_model()

tokenizer = AutoTokenizer.from_pretrained(TINY)
model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
cache = PrefixCache(model, capacity="64MiB", block_size=16)

notes = "An iterator gives the items of a collection one after the other. " * 12
talk = [{"role": "system", "content": notes}, {"role": "user", "content": "What is an iterator?"}]
prompt = tokenizer.apply_chat_template(
    talk, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)

torch.manual_seed(0)
samples = cache.generate(
    **prompt,
    max_new_tokens=40,
    do_sample=True,
    temperature=0.8,
    num_return_sequences=4,
    scope=Scope(salt="anna"),  # only calls with the same salt share
)
for sample in samples[:, prompt["input_ids"].shape[1] :]:
    print("-", tokenizer.decode(sample, skip_special_tokens=True).replace("\n", " "))

ids = prompt["input_ids"]
print("\nanna again:", cache.explain(ids, Scope(salt="anna")))
print("\nsomeone else:", cache.explain(ids, Scope(salt="ben")))
print(f"\n{cache}")
