"""Runs of quire's engine with several requests in flight, as the prompts of a log with what the engine told."""

from random import Random

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire import Scope
from quire.core.tokens import INT32
from quire.engines.loop import Engine, SamplingParams
from quire.serve.replies import timings_of
from quire_sim.caches import CachePrompt
from quire_sim.logs.steps import steps_of

SIZE = 16
VOCAB = 64


def small_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCAB, max_position_embeddings=4096, eos_token_id=0, bos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Run:
    """A drawn run: `prompts` as a log has them, `told` the hits that the engine counted, `preemptions` of all.

    `steps` of each prompt are told; time is the number of the step, with a little noise.
    """

    def __init__(self, model, seed, *, num_blocks, at_once=4, num_requests=60, most_answer=24, tenants=1,
                 prefill=None, speculation=0):  # fmt: skip
        self._random = Random(seed)
        self._now = 0.0
        self.engine = Engine(
            model, num_blocks=num_blocks, clock=lambda: self._now, max_prefill_tokens=None
        )
        self._most, self._tenants, self._speculation = most_answer, tenants, speculation
        self.prompts, self.told, self.preemptions = {}, {}, 0
        self._talks = [[self._random.randrange(2, VOCAB) for _ in range(40)] for _ in range(3)]
        left, asked = num_requests, {}
        while left or asked:
            while left and len(asked) < at_once and (self._random.random() < 0.8 or not asked):
                number = num_requests - left
                asked[str(number)] = self._ask(str(number))
                left -= 1
            self._now += self._random.uniform(0.01, 0.1)
            if prefill is not None:  # as the pace of a server cuts prompts
                self.engine.scheduler.prompt_tokens = self._random.randint(
                    prefill // 2, 3 * prefill
                )
            for output in self.engine.step():
                if output.finished:
                    self._note(output, *asked.pop(output.request_id))

    def _ask(self, name):
        talk = self._random.choice(self._talks[-12:])
        if self._random.random() < 0.7:
            talk = [
                *talk[:200],
                *(self._random.randrange(2, VOCAB) for _ in range(self._random.randint(1, 90))),
            ]
            self._talks.append(talk)
        most, tenant = (
            self._random.randint(1, self._most),
            f"t{self._random.randrange(self._tenants)}",
        )
        self._now += self._random.uniform(0.0001, 0.001)
        params = SamplingParams(max_tokens=most, temperature=0, speculation=self._speculation)
        self.engine.add_request(talk, params, request_id=name, scope=Scope(tenant=tenant))
        return talk, tenant, self._now - 0.00005

    def _note(self, output, talk, tenant, sent_s):
        answer, number = output.outputs[0].token_ids, int(output.request_id)
        told = timings_of(output.metrics, output.num_cached_tokens, len(talk), len(answer))
        self._talks.append([*talk, *answer])
        self.preemptions += output.metrics.num_preemptions
        self.told[number] = output.num_cached_tokens
        self.prompts[number] = CachePrompt(
            number, np.array(talk, INT32), np.array(answer, INT32), tenant=tenant, time_s=sent_s,
            duration_s=self._now - sent_s + 0.00005, steps=steps_of({"timings": told}),
        )  # fmt: skip

    @property
    def log(self):
        return [self.prompts[number] for number in sorted(self.prompts)]
