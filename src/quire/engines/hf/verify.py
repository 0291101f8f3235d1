"""Strict mode: the first reused call of each shape is compared with whole forwards of the model itself."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.engines.hf.inputs import Prompts
from quire.engines.hf.media import Media, moved
from quire.engines.models.distance import limit_for, of_logits
from quire.engines.models.quantized import rounds_activations, why_far
from quire.engines.models.working_cache import WorkingCache
from quire.errors import ConfigError, UnsupportedModel
from quire.scope import ScopePart
from quire.tensors.kinds import LayerKind, model_type

Check = Callable[[WorkingCache, Any], None]
"""Takes the working cache of a call and what the model returned for its first forward."""

# Relative L2 distance of the logits of one token. In float32 rounding gives 1e-5; in half
# precision 1e-2, and more where a router chooses other experts.
_LIMITS = (1e-3, 0.15)

Shape = tuple[str, ...]
"""The words for what a model may do otherwise in one call than in another: how many rows, padding, a text
longer than the smallest window or chunk, rows multiplied (beams, return sequences), media, the adapter."""


class FirstCalls:
    """Compares the first reused call of each `Shape` with the model alone, and refuses for good.

    refusal: why the model is not used with reuse any more; None as long as all were equal.
    """

    def __init__(self, model: Any, kinds: Sequence[LayerKind]) -> None:
        self.refusal: str | None = None
        self._model = model
        self._window = min((kind.window for kind in kinds if kind.window), default=None)
        self._names = frozenset(inspect.signature(model.forward).parameters)
        self._seen: set[Shape] = set()

    def admit(self, media: Media, *, is_session: bool = False) -> None:
        """Raise `UnsupportedModel` after a refusal, `ConfigError` for what could not be compared."""
        if self.refusal is not None:
            raise UnsupportedModel(self.refusal)
        if is_session and any(media.spans):
            raise ConfigError(
                "a session is not given the content of media, so that verify='first' cannot compare "
                "it with a whole forward; use cache.generate(...)"
            )

    def check(self, prompts: Prompts, media: Media, lora: ScopePart) -> Check:
        """Return the comparison of the first forward of a call that reuses something.

        It raises `UnsupportedModel` on a mismatch, out of that forward.
        """

        def compare(cache: WorkingCache, output: Any) -> None:
            ledger, length = cache.ledger, cache.ledger.length
            if ledger.known != length or (any(media.spans) and length != prompts.ids.shape[1]):
                return  # computed under other positions or content than the tokens say, or in part
            words = {
                "padded": bool(prompts.pads.any()),
                "past the window": self._window is not None and length > self._window,
                "expanded": ledger.num_rows > len(prompts.tokens),
                "with media": any(media.spans),
                f"adapter {lora!r}": lora is not None,
            }
            rows = "several rows" if len(prompts.tokens) > 1 else "one row"
            shape = (rows, *(word for word, holds in words.items() if holds))
            if shape in self._seen:
                return
            got = output.logits if hasattr(output, "logits") else output[0]
            expected = (
                self._with_media(prompts, media)[ledger.origins]
                if any(media.spans)
                else self._alone(cache)
            )
            self._compare(shape, expected, got[:, -1])
            self._seen.add(shape)

        return compare

    def _compare(self, shape: Shape, expected: torch.Tensor, got: torch.Tensor) -> None:
        limit = limit_for(got.dtype, _LIMITS, coarse=rounds_activations(self._model))
        for one, two in zip(expected, got, strict=True):
            if not (far := of_logits([one], [two])) <= limit:
                self.refusal = (
                    f"{model_type(self._model.config)} ({type(self._model).__name__}) is not exact "
                    f"with reuse: the next token's logits of a call ({', '.join(shape)}) are {far:.2g} from "
                    f"those of a whole forward (limit {limit:g}; the tokens are "
                    f"{int(one.argmax())} and {int(two.argmax())}). Nothing of it was stored, and "
                    f"what was cached is dropped; call model.generate instead{why_far(self._model)}"
                )
                raise UnsupportedModel(self.refusal)

    def _alone(self, cache: WorkingCache) -> torch.Tensor:
        """Return the logits `[rows, vocab]` after what each row holds, computed whole and without padding."""
        texts = [tuple(text.tolist()) for text in cache.ledger.rows()]
        said = {
            text: self._forward(torch.tensor([text], dtype=torch.long), {})[0]
            for text in dict.fromkeys(texts)
        }
        return torch.stack([said[text] for text in texts])

    def _with_media(self, prompts: Prompts, media: Media) -> torch.Tensor:
        """Return the logits `[prompts, vocab]` after prompts with their content, as they were given."""
        given = {"attention_mask": prompts.full_mask(), **media.arguments(0)}
        return self._forward(prompts.ids, given)

    def _forward(self, ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        base = self._model.base_model
        if "logits_to_keep" in self._names:
            given = {**given, "logits_to_keep": 1}
        offset = getattr(base, "rope_deltas", None)  # of the call that goes on behind this
        try:
            with torch.no_grad():
                given = moved({**given, "input_ids": ids}, self._model.device)
                output = self._model(use_cache=False, return_dict=True, **given)
        finally:
            if offset is not None:
                base.rope_deltas = offset
        return output.logits[:, -1]
