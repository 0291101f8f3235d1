"""Tiers below an engine: prefixes come back as jobs are admitted, and go down as jobs give their blocks back."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, cast

from quire.core import Scope
from quire.core.tokens import array_of, key_of
from quire.engines.companions import EngineCompanion
from quire.engines.loop.computing import Forward
from quire.engines.tiered.parts import Origin
from quire.engines.tiered.store import TieredStore
from quire.scheduling import Job, Scheduler, Step
from quire.tiers.stack.stack import TierStack

if TYPE_CHECKING:
    from quire.engines.loop.answers import Answer


class EngineTiers(EngineCompanion):
    """The tiers of an engine; `bring_up` and `keep` are hooks of its scheduler.

    stack   the tiers; its opener closes it
    model   the fingerprint of the model in its packed form

    Only this model in its packed form finds the records. Blocks that are being offloaded are held in the
    pools until a background thread has copied them; where the pools lack room, they are copied at once.
    """

    def __init__(self, stack: TierStack, forward: Forward, model: str) -> None:
        layout = forward.model.layout
        origin = Origin(f"hf packed {model}")
        self._forward = forward
        self.store = TieredStore(forward.manager, forward.pools, layout, stack, origin)
        forward.before_copies = self.store.spill

    def bring_up(self, job: Job) -> None:
        """Onboard the blocks that an admitted job lacks, as far as that is faster than prefill."""
        self._forward.copy()
        begun_s, request = perf_counter(), cast("Answer", job).request
        tokens = self.store.onboard(job.known(), job.scope).tokens
        self._settle_for(job.num_tokens)  # those that it took may have been all that were free
        if (told := request.metrics).first_token_ts is None:  # later it is part of decoding
            load_s = told.load_s + perf_counter() - begun_s
            tokens = Counter(told.loaded_tokens) + Counter(tokens)
            request.metrics = replace(told, load_s=load_s, loaded_tokens=tokens)

    def keep(self, job: Job) -> None:
        """Start to offload a job's published blocks before they are given back.

        It happens at once where the pools need them.
        """
        self.store.offload_later(job.open_seq)
        self._settle_for(0)

    def before_step(self, scheduler: Scheduler) -> None:
        """Finish offload copies whose blocks the next step may need."""
        queues, most = scheduler.queues, scheduler.limits.max_step_tokens
        self._settle_for(max(most, queues.waiting[0].num_tokens) if queues.num_waiting else most)

    def observe(self, step: Step, seconds: float) -> None:
        """Learn the cost of prefill from a step: that of its longest part, by its share of the tokens."""
        if step.num_decodes < len(step.jobs):
            at = step.num_decodes + int(step.lengths[step.num_decodes :].argmax())
            start, length = int(step.starts[at]), int(step.lengths[at])
            share = length / len(step.tokens)
            self.store.cost.observe(start, start + length, seconds * share)

    def held(self, tokens: list[int], scope: Scope) -> dict[str, int]:
        """Return the tokens of a prompt that each tier would add to those in the pools, by name."""
        return self.store.held(array_of(key_of(tokens)), scope)

    @property
    def is_settled(self) -> bool:
        """Whether no block is held any more: those that are copied are let go."""
        self.store.offloading.settle_for(0)
        return self.store.offloading.is_settled

    def purge(self, scope: Scope, is_own: Callable[[Scope], bool], timeout_s: float) -> int:
        """Drop a tenant's blocks on their way to or from the tiers."""
        self.store.purge(scope, timeout_s)
        return 0

    def recover(self) -> None:
        """Abandon blocks that are being onboarded; finish the copies of those being offloaded.

        The latter are intact: no block of them has been written to since.
        """
        self.store.transfers.give_up()
        self.store.offloading.recover()

    def close(self) -> None:
        """Hand down all that the pools have and tiers lack, and have it written."""
        self.store.offloading.settle()
        self.store.offload_all()
        self.store.stack.flush()

    def _settle_for(self, num_tokens: int) -> None:
        """Finish offload copies until there is room for so many tokens, and for a block of each sequence."""
        manager = self.store.manager
        num_blocks = -(-num_tokens // manager.block_size) + len(manager.sequences)
        self.store.offloading.settle_for(num_blocks)
