"""Random requests against one cache, each compared with the plain model."""

import random

import torch
from hf_help import left_padded, random_ids, same


class Conversation:
    """Random requests against one cache; what was generated becomes the next prompts' head."""

    def __init__(self, model, cache, seed):
        self.model, self.cache = model, cache
        self.rng = random.Random(seed)
        self.ids = torch.Generator().manual_seed(seed)
        self.texts = [random_ids(self.ids, self.rng.randint(20, 60))[0]]
        self.reused = 0

    def run(self, num_steps):
        steps = [
            self.next_turn,
            self.fresh_prompt,
            self.edited_prompt,
            self.truncated_prompt,
            self.return_sequences,
            self.beams,
            self.ragged_batch,
            self.session,
        ]
        if not self.model._is_stateful:  # transformers drafts for no other
            steps.append(self.assisted)
        for _ in range(num_steps):
            self.rng.choice(steps)()
            self.reused += self.cache.last.cached_tokens

    def text(self, limit=150):
        return self.rng.choice(self.texts)[:limit]

    def remember(self, sequences):
        rows = sequences if sequences.ndim == 2 else sequences[None]
        self.texts.extend(row[row != 0] for row in rows)

    def same(self, ids, **arguments):
        self.remember(same(self.model, self.cache, ids, **arguments))

    def next_turn(self):
        new = random_ids(self.ids, self.rng.randint(1, 20))[0]
        self.same(torch.cat([self.text(), new])[None])

    def fresh_prompt(self):
        self.same(random_ids(self.ids, self.rng.randint(1, 70)))

    def edited_prompt(self):
        text = self.text().clone()
        text[self.rng.randrange(len(text))] = self.rng.randint(3, 96)
        self.same(text[None])

    def truncated_prompt(self):
        text = self.text()
        self.same(text[None, : self.rng.randint(1, len(text))])

    def return_sequences(self):
        self.same(self.text()[None], do_sample=True, num_return_sequences=3, temperature=0.9)

    def beams(self):
        self.same(self.text()[None], num_beams=3, num_return_sequences=self.rng.randint(1, 3))

    def ragged_batch(self):
        ids, mask = left_padded([self.text() for _ in range(3)])
        self.same(ids, attention_mask=mask)

    def assisted(self):
        self.same(self.text()[None], prompt_lookup_num_tokens=3)

    def session(self):
        ids = self.text()[None]
        with self.cache.session(ids) as past:
            out = self.model.generate(ids, past_key_values=past, max_new_tokens=6)
        assert torch.equal(out, self.model.generate(ids, max_new_tokens=6))
        self.remember(out)
