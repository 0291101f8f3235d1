"""Steps: the inputs of one forward, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from operator import length_hint

import numpy as np

from quire.core.tokens import INT32, IndexArray, IntArray, array_of, check_sign, key_of
from quire.errors import TokensError
from quire.scheduling.job import Job

NONE: IntArray = np.empty(0, INT32)


class Step:
    """The inputs of one forward: chunks of R jobs, N tokens; decoding jobs first, then parts of prompts.

    `jobs`         [R]
    `starts`       int32 [R], tokens of each that have KV
    `lengths`      int32 [R], tokens to compute of each, from 1
    `tokens`       int32 [N], these tokens, packed in the order of the jobs
    `sampled`      [S], the jobs that are sampled: all known tokens of them are computed then; and their twins
    `samples`      int64 [S], which of the R chunks each of these is sampled from
    `drafts`       [S], int32, the drafts at the end of each one's chunk; None where no job has any
    `logit_rows`   int64, the rows of N whose logits are needed: of each sample that of the last token, and of each
                   draft behind it
    `spread`       int64, which of these rows belong to the samples one after another, where twins read the same
                   one or others are scored; None where each stands in its place
    `scored`       jobs whose prompts are scored, each with those of these rows that are of its tokens from
                   `num_scored` on
    `num_decodes`  jobs that decode
    `repeats`      whether it is the step completed last with every start one higher: one token each, of the same jobs

    Arrays are not changed once the step is made.
    """

    def __init__(
        self, decoding: Items[Job], drafts: Mapping[Job, IntArray], parts: Mapping[Job, int]
    ) -> None:
        self.jobs = [*decoding, *parts]
        self.num_decodes = len(decoding)
        self.repeats = False
        starts: list[int] = []
        chunks: list[IntArray] = []
        sampled: list[tuple[int, Job]] = []
        scored: list[tuple[Job, IndexArray]] = []
        num_packed = 0
        for at, job in enumerate(self.jobs):
            start, num_tokens = job.num_computed, parts.get(job, 1)
            chunk = job.known(start, start + num_tokens)
            starts.append(start)
            chunks.append(np.concatenate((chunk, drafts[job])) if job in drafts else chunk)
            if (count := min(start + num_tokens, job.prompt_len - 1) - job.num_scored) > 0:
                first = num_packed + job.num_scored - start
                scored.append((job, np.arange(first, first + count)))
            num_packed += len(chunks[-1])
            if start + num_tokens == job.num_tokens:
                sampled += [(at, each) for each in (job, *job.twins)]
        self.starts = np.array(starts, INT32)
        self.lengths = np.array([*map(len, chunks)], INT32)
        self.tokens = np.concatenate(chunks)
        self.sampled = [job for _, job in sampled]
        self.samples: IndexArray = np.array([at for at, _ in sampled], np.intp)
        ends = np.cumsum(self.lengths, dtype=np.intp)[self.samples]
        rows: IndexArray = ends - 1
        self.drafts: list[IntArray] | None = None
        if drafts:
            self.drafts = [drafts.get(job, NONE) for job in self.sampled]
            lengths = [1 + len(each) for each in self.drafts]
            rows = np.repeat(ends - np.cumsum(lengths), lengths) + np.arange(sum(lengths))
        self.logit_rows, self.spread = rows, None
        if scored or any(job.twins for job in parts):
            self.logit_rows = np.unique(np.concatenate((rows, *(told for _, told in scored))))
            self.spread = np.searchsorted(self.logit_rows, rows)
        self.scored = [
            (job, slice(*np.searchsorted(self.logit_rows, (told[0], told[-1] + 1)).tolist()))
            for job, told in scored
        ]

    def results(self, sampled: Items[IntArray] | IntArray) -> IntArray | list[list[int]]:
        """Return a copy of the new tokens, int32 [S]: one for each sampled job; S lists with drafts.

        Raises `TokensError` for tokens that cannot follow this step.
        """
        if length_hint(sampled) != len(self.samples):
            msg = f"{length_hint(sampled)} results for a step that samples {len(self.samples)} jobs; give one for each"
            raise TokensError(msg)
        if self.drafts is None:
            key = key_of(sampled)  # pyright: ignore[reportArgumentType] - a list of arrays is refused there
            check_sign(key)
            return array_of(key)
        new: list[list[int]] = [array_of(key_of(each)).tolist() for each in sampled]
        for job, tokens, drafts in zip(self.sampled, new, self.drafts, strict=True):
            if not tokens or tokens[:-1] != drafts[: len(tokens) - 1].tolist():
                msg = f"{tokens} follow drafts {drafts.tolist()} of {job!r}"
                raise TokensError(f"{msg}; give those accepted and one token more")
            check_sign(key_of(tokens))
        return new

    def next(self, tokens: IntArray) -> Step:
        """Return the step after this one, which only decodes, when these tokens were sampled."""
        step = Step.__new__(Step)
        vars(step).update(vars(self), starts=self.starts + 1, tokens=tokens, repeats=True)
        return step

    def __repr__(self) -> str:
        num_prompts = len(self.jobs) - self.num_decodes
        return f"<Step of {len(self.tokens)} tokens: {self.num_decodes} jobs decode, {num_prompts} have prompts>"
