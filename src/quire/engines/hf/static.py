"""Prefix reuse with static caches: fixed shapes, written in place, ready for torch.compile."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache, StaticLayer

from quire.core import Scope
from quire.engines.hf.inputs import Prompts, Signatures, read_plan, read_prompts
from quire.engines.models.distance import limit_for, relative
from quire.engines.models.identity import Identity
from quire.engines.models.inventory import Inventory
from quire.engines.models.probe import probe_model
from quire.engines.models.supported import ModelFace, checked_model, num_embeddings
from quire.engines.thread_guard import ThreadGuard, guarded
from quire.errors import ConfigError, TokensError, UnsupportedModel
from quire.slots import SlotCache, SlotHandle, SlotStats
from quire.tensors.kinds import decoder_config, model_type
from quire.tensors.layout import KVLayout
from quire.tensors.slot_pool import SlotPool

_PIECES = (5, 2, 1)
_POISON = 1e4
# Relative L2 distance of logits over a static cache from those over a growing one: rounding, as
# attention sums over more positions. A model that reads what it should not is off by about 1.
_LIMITS = (1e-3, 0.2)


class SlotLayer(StaticLayer):
    """One layer of a static cache whose memory is one slot of a `SlotPool`.

    `keys` `[1, kv_heads, max_tokens, k_width]` and `values`, alike, are views of the pool, of
    which the first `num_tokens` positions are computed. New ones are written with
    `index_copy_`, so shapes and addresses stay what they are from step to step.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> None:
        super().__init__(keys.shape[-2])  # pyright: ignore[reportUnknownMemberType] - untyped **kwargs
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.batch_size = keys.shape[0]
        self.cumulative_length = torch.tensor(num_tokens, device=keys.device)
        self.is_initialized = True

    def reset(self) -> None:
        """Refuse: the content of a slot can be found by other requests."""
        raise ConfigError("a slot is not reset; open another session for another text")


class SlotFull(StoppingCriteria):
    """Ends generation when the next token would have no position in the slot."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return whether each row `[rows, tokens]` is at its end: its last token has no KV yet."""
        is_full = input_ids.shape[1] > self._max_tokens
        return torch.full((input_ids.shape[0],), is_full, device=input_ids.device)


class SlotSession:
    """One running request: its slot, and a transformers `Cache` over the slot's memory.

    `past` has static shapes: `model(ids, past_key_values=session.past, use_cache=True)`.
    """

    def __init__(
        self,
        slots: SlotCache,
        handle: SlotHandle,
        layers: list[SlotLayer],
        forward: Callable[..., Any],
        guard: ThreadGuard,
    ) -> None:
        self.handle = handle
        self.past = Cache(layers=list(layers))
        self._layers = layers
        self._slots = slots
        self._forward = forward
        self._guard = guard

    @property
    def computed(self) -> int:
        """Tokens that need no compute any more."""
        return self.handle.computed

    @guarded
    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute the next tokens `[1, n]` and return their logits `[1, n, vocab]`.

        The prompt's tokens come first, from `computed` on. Only what is fed here is kept. Raises
        `TokensError` and `CommitError` before anything is computed; after a forward that
        raised, the session is where it was.
        """
        if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
            raise TokensError(f"ids have shape {list(ids.shape)}; a session is fed [1, n], n >= 1")
        tokens = ids[0].cpu().numpy()
        self._slots.check_commit(self.handle, tokens)
        try:
            with torch.no_grad():
                output = self._forward(input_ids=ids, past_key_values=self.past, use_cache=True)
        except BaseException:
            for layer in self._layers:
                layer.cumulative_length.fill_(self.computed)
            raise
        self._slots.commit(self.handle, tokens)
        return output.logits


class SlotPrefixCache(ModelFace):
    """The KV cache of a model with prefix reuse, in slots of fixed size.

        cache = SlotPrefixCache(model, num_slots=8, max_tokens=4096)
        output = cache.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=50)

    As `PrefixCache`, for engines that want static shapes: K and V of a request lie in one slot
    of a contiguous pool, the model writes them there in place, and the next request that starts
    the same goes on in that slot. A prefix that another request is using is copied.

    model       a decoder of transformers whose layers are all full attention of one shape, in
                eval mode, on one device
    num_slots   requests that can run at the same time, and texts that are kept
    max_tokens  positions per slot; attention reads all of them in each step
    poison      for tests: what positions hold before they are computed. A large finite number;
                NaN would reach the output, as attention multiplies what is masked by 0
    forward     what `session` computes with, `torch.compile(model)` for instance; None: `model`
    wait_s      seconds that a call waits while another thread uses the cache; None: not at all

    One request is one row: no batches, no beams. One thread uses a cache at a time, another is refused with
    `CacheBusy`. Raises `ConfigError` for settings that cannot work, `UnsupportedModel` for other models.
    """

    def __init__(
        self,
        model: Any,
        num_slots: int,
        max_tokens: int,
        *,
        poison: float | None = None,
        forward: Callable[..., Any] | None = None,
        wait_s: float | None = None,
    ) -> None:
        self._given, model = model, checked_model(model, type(self).__name__)
        self._guard = ThreadGuard(wait_s=wait_s)
        before = Inventory(model)
        self._model = model
        self.slots = SlotCache(num_slots, max_tokens)
        self.layout = slot_layout(model)
        self.pool = SlotPool(self.layout, num_slots, max_tokens, model.device, poison=poison)
        check_static(model, self.pool)
        self._identity = Identity(
            model, self.layout, before, lambda: slot_layout(model), given=self._given
        )
        self._forward = model if forward is None else forward
        self._signatures = Signatures.of(model)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what binds K and V to the model: config, layout, a sample of weights."""
        return self._identity.fingerprint

    @property
    def stats(self) -> SlotStats:
        """Counters: hit rate, misses by reason, copies."""
        return self.slots.stats

    @guarded
    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        scope: Scope | None = None,
        **arguments: Any,
    ) -> Any:
        """`model.generate(input_ids, ...)`, which computes only tokens that no slot holds.

        input_ids: `[1, tokens]`, without padding. `scope` says who may share. All other `arguments` are
        generate's own; it ends at the latest when the slot is full. A call that raises keeps nothing.
        Raises `TokensError`, `ConfigError`, `ScopeError` and `OutOfSlots` before anything is changed.
        """
        self._follow_settings()
        prompts = self._prompts(input_ids, attention_mask, arguments)
        plan = read_plan(self._model, self._signatures, prompts, arguments)
        if plan.expand > 1 or plan.assisted:
            raise ConfigError(
                "num_beams, num_return_sequences above 1 and assisted decoding need more than the one "
                "row that a slot holds; use PrefixCache"
            )
        given: list[Any] = arguments.pop("stopping_criteria", None) or []
        with self._opened(prompts, scope) as session:
            output = self._model.generate(
                prompts.ids,
                attention_mask=prompts.full_mask(),
                past_key_values=session.past,
                stopping_criteria=StoppingCriteriaList([*given, SlotFull(self.slots.max_tokens)]),
                **arguments,
                **plan.extra,
            )
            tokens = output if isinstance(output, torch.Tensor) else output.sequences
            new = tokens[0, session.computed : int(session.past.get_seq_length())]
            self.slots.commit(session.handle, new.cpu().numpy())
        return output

    @contextmanager
    def session(
        self, input_ids: torch.Tensor, *, scope: Scope | None = None
    ) -> Generator[SlotSession, None, None]:
        """Open a prompt `[1, tokens]` for a loop of your own.

            with cache.session(ids) as session:
                logits = session.feed(ids[:, session.computed:])

        At the end of the block the slot is free, and what was fed stays findable. Raises as
        `generate`.
        """
        with (
            self._guard,
            self._opened(self._prompts(input_ids, None, {}), scope) as session,
            self._guard.lending(),
        ):
            yield session

    @contextmanager
    def _opened(self, prompts: Prompts, scope: Scope | None) -> Generator[SlotSession, None, None]:
        handle: SlotHandle | None = None
        try:
            handle = self.slots.open(prompts.tokens[0], self._identity.scope(scope))
            self._copy()
            self.pool.forget(handle.slot, handle.num_cached)
            memory, num_cached = self.pool.slot(handle.slot), handle.num_cached
            layers = [SlotLayer(k, v, num_cached) for k, v in memory]
            yield SlotSession(self.slots, handle, layers, self._forward, self._guard)
            if not self.slots.interrupted:
                self.slots.close(handle)
        except BaseException:  # also one that comes between two lines
            if handle is not None and not self.slots.interrupted and handle.is_open:
                self.slots.close(handle)
            raise

    def _copy(self) -> None:
        try:
            self.pool.copy(self.slots.take_copies())
        except BaseException as error:
            self.slots.cut_off("copying slots", error)  # they count as copied
            raise

    def _prompts(
        self, input_ids: object, attention_mask: object, arguments: dict[str, Any]
    ) -> Prompts:
        prompts = read_prompts(self._model, input_ids, attention_mask, arguments)
        if len(prompts.tokens) != 1 or prompts.mask is not None:
            raise ConfigError(
                f"{len(prompts.tokens)} rows, {int(prompts.pads.max())} columns of padding; a slot "
                "holds one row without padding: make a call for each, or use PrefixCache"
            )
        return prompts

    def __repr__(self) -> str:
        return f"SlotPrefixCache({type(self._model).__name__}, {self.slots!r}, {self.pool!r})"


def slot_layout(model: Any) -> KVLayout:
    """Return the layout of a slot of `model`, found by running it.

    Raises `UnsupportedModel` unless all layers are full attention of one shape over token ids.
    """
    name = model_type(model.config)
    layout = probe_model(model, 1)[1]
    memory = layout.groups[0].memory
    if decoder_config(model.config) is not model.config:
        raise UnsupportedModel(
            f"{name} is a composite model: slots hold what token ids alone say; use its text "
            "decoder as a model of its own, or PrefixCache"
        )
    if (
        not isinstance(memory, KVLayout)
        or not layout.is_full_attention
        or memory.num_layers != layout.num_layers
    ):
        groups = ", ".join(f"{len(group.layers)} {group.name}" for group in layout.groups)
        raise UnsupportedModel(
            f"{name} has {layout.num_layers} layers, of them {groups}: a slot holds full attention "
            "layers of one shape; use PrefixCache for this model"
        )
    return memory


def check_static(model: Any, pool: SlotPool) -> None:
    """Raise `UnsupportedModel` unless `model` computes the same over a slot of an unused pool.

    Some models take the number of keys for the number of tokens, which is wrong where a slot has
    room left. Found by running a few tokens over a slot whose room is poisoned.
    """
    vocab = num_embeddings(model)
    limit = limit_for(pool.layout.dtype, _LIMITS)
    for states in (pool.k[:, 0], pool.v[:, 0]):
        states.fill_(_POISON)
    static = Cache(layers=[SlotLayer(k, v, 0) for k, v in pool.slot(0)])
    growing = DynamicCache()
    for num_tokens in _PIECES:
        start = growing.get_seq_length()
        stop = min(start + num_tokens, pool.max_tokens)
        if start == stop:
            break
        ids = (torch.arange(start, stop, device=model.device)[None] + 1) * 7919 % vocab
        with torch.no_grad():
            one, two = (
                model(input_ids=ids, past_key_values=past, use_cache=True).logits.double()
                for past in (growing, static)
            )
        if not relative(one - two, one) <= limit:
            raise UnsupportedModel(
                f"{model_type(model.config)} computes something else over a cache of fixed shape "
                "than over one that grows, so it cannot use slots; use PrefixCache"
            )
    for states in (pool.k[:, 0], pool.v[:, 0]):
        states.fill_(pool.poison or 0)
