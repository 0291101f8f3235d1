"""Prefix reuse with fixed shapes: requests in slots of a contiguous cache, as static engines want.

Two people ask at the same time under one system prompt; then the first one goes on. The loop is
an engine's own. `forward=torch.compile(model)` would compile one decode step for all slots.

python examples/slots.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import SlotPrefixCache, demo_model
from quire.engines.hf import SlotSession

TINY = demo_model()

tokenizer = AutoTokenizer.from_pretrained(TINY)
model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
cache = SlotPrefixCache(model, num_slots=4, max_tokens=2048)
system = {"role": "system", "content": "You are a patient teacher of Python. " * 20}


def ask(talk: list[dict[str, str]]) -> torch.Tensor:
    """Return the prompt `[1, tokens]` of a talk."""
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return tokenizer.apply_chat_template(talk, **options)["input_ids"]


def answer(who: str, session: SlotSession, prompt: torch.Tensor, num_new: int = 24) -> str:
    """Compute what the slot does not hold, then one token after the other."""
    print(f"{who}: slot {session.handle.slot}, {session.computed} of {prompt.shape[1]} tokens held")
    logits = session.feed(prompt[:, session.computed :])
    new = [int(logits[0, -1].argmax())]
    while len(new) < num_new:
        logits = session.feed(torch.tensor([new[-1:]]))
        new.append(int(logits[0, -1].argmax()))
    return tokenizer.decode(new, skip_special_tokens=True)


anna = [system, {"role": "user", "content": "What is a list?"}]
ben = [system, {"role": "user", "content": "What is a tuple?"}]
with cache.session(ask(anna)) as one:
    reply = answer("anna", one, ask(anna))
    with cache.session(ask(ben)) as two:  # anna's slot is busy: what they share is copied
        answer("ben", two, ask(ben))

anna += [{"role": "assistant", "content": reply}, {"role": "user", "content": "When is it copied?"}]
with cache.session(ask(anna)) as three:  # her slot is free and still holds her text: no copy
    answer("anna", three, ask(anna))

print(f"\n{cache.stats.copied_tokens} tokens copied, hit rate {cache.stats.hit_rate:.1%}")
print(cache.slots)
