"""Steps: what one forward computes, as arrays."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from quire.core.tokens import INT32, IndexArray, IntArray, array_of, check_sign, key_of
from quire.errors import TokensError
from quire.scheduling.job import Job

NONE: IntArray = np.empty(0, INT32)


class Step:
    """What one forward computes: chunks of R jobs, N tokens. Those that decode come first, then parts of prompts.

    `jobs`         [R]
    `starts`       int32 [R], tokens of each that have KV
    `lengths`      int32 [R], tokens to compute of each, from 1
    `tokens`       int32 [N], these tokens, packed in the order of the jobs
    `samples`      int64 [S], indices of the jobs of which all known tokens are computed then: they are sampled
    `logit_rows`   int64, the rows of N whose logits are needed: the last one of a job that is sampled, and of one
                   with drafts all that it has
    `num_decodes`  jobs that decode
    `has_drafts`   whether some of these have drafts
    `repeats`      whether it is the step before with every start one higher: one token each, of the same jobs

    Arrays are not changed once the step is made.
    """

    def __init__(
        self, decoding: list[Job], drafts: dict[Job, IntArray], parts: list[tuple[Job, int]]
    ) -> None:
        self.jobs = jobs = [*decoding, *(job for job, _ in parts)]
        num_decodes = len(decoding)
        guessed = [drafts.get(job, NONE) for job in decoding]
        starts = [job.num_computed for job in jobs]
        lengths = [*(1 + len(each) for each in guessed), *(num_tokens for _, num_tokens in parts)]
        self.starts = np.array(starts, INT32)
        self.lengths = np.array(lengths, INT32)
        runs: list[IntArray] = []
        for job, drafted in zip(decoding, guessed, strict=True):
            runs += job.known(job.num_tokens - 1, job.num_tokens), drafted
        for (job, num_tokens), start in zip(parts, starts[num_decodes:], strict=True):
            runs.append(job.known(start, start + num_tokens))
        self.tokens = np.concatenate(runs)
        self.num_decodes = num_decodes
        self.has_drafts = bool((self.lengths[:num_decodes] > 1).any())
        self.repeats = False
        known = np.fromiter((job.num_tokens for job in jobs), INT32, len(jobs))
        self.samples: IndexArray = (self.starts + self.lengths >= known).nonzero()[0]
        ends = np.cumsum(self.lengths, dtype=np.intp)
        self.logit_rows: IndexArray = ends[self.samples] - 1
        if self.has_drafts:
            needed = np.zeros(len(self.tokens), np.bool_)
            needed[: ends[num_decodes - 1]] = True
            needed[self.logit_rows] = True
            self.logit_rows = needed.nonzero()[0]

    def drafts(self) -> list[IntArray]:
        """Return the drafts of each job that is sampled, int32."""
        ends, last = np.cumsum(self.lengths), self.num_decodes
        return [
            self.tokens[ends[i] - self.lengths[i] + 1 : ends[i]] if i < last else NONE
            for i in self.samples
        ]

    def results(self, sampled: Items[IntArray] | IntArray) -> list[list[int]]:
        """Return the new tokens of each job that is sampled; raise `TokensError` for what cannot follow this step."""
        if len(sampled) != len(self.samples):
            msg = f"{len(sampled)} results for a step that samples {len(self.samples)} jobs; give one for each"
            raise TokensError(msg)
        if isinstance(sampled, np.ndarray):
            check_sign(key_of(sampled))
            return sampled.reshape(-1, 1).tolist()
        new: list[list[int]] = [array_of(key_of(each)).tolist() for each in sampled]
        for i, tokens, guessed in zip(self.samples.tolist(), new, self.drafts(), strict=True):
            drafts: list[int] = guessed.tolist()
            if not tokens or tokens[:-1] != drafts[: len(tokens) - 1]:
                msg = f"{tokens} follow drafts {drafts} of {self.jobs[i]!r}"
                raise TokensError(f"{msg}; give those accepted and one token more")
            check_sign(key_of(tokens))
        return new

    def next(self, tokens: IntArray) -> Step:
        """Return the step after this one, which only decodes, when these tokens were sampled."""
        step = Step.__new__(Step)
        step.__dict__.update(self.__dict__)
        step.starts = self.starts + 1
        step.tokens = tokens
        step.repeats = True
        return step

    def __repr__(self) -> str:
        num_prompts = len(self.jobs) - self.num_decodes
        return f"<Step of {len(self.tokens)} tokens: {self.num_decodes} jobs decode, {num_prompts} have prompts>"
