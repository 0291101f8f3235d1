"""The arguments of a request, checked before anything is touched."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

from quire.errors import ConfigError, TokensError

_REFUSED = {
    "past_key_values": "quire brings its own; use cache.session(...) to hold it yourself",
    "inputs_embeds": "embeddings have no token ids to find a prefix by; pass input_ids",
    "decoder_input_ids": "only decoder-only models are cached",
    "position_ids": "cached K and V are those of positions counted from the first token",
    "cache_implementation": "quire brings its own cache",
    "custom_generate": "quire cannot know what a custom loop does with the cache",
}
_HARMLESS = {"logits_to_keep", "return_dict", "tokenizer", "assistant_tokenizer"}


@dataclass(frozen=True, slots=True)
class Prompts:
    """The rows of a request.

    ids:    [rows, columns]  as given, left padding included
    mask:   [rows, columns]  1 for tokens, 0 for padding; None where nothing is padding
    pads:   [rows]           leading columns that are padding
    tokens: per row          int32 token ids without padding, on the host
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    pads: npt.NDArray[np.int64]
    tokens: list[npt.NDArray[np.int32]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, padding not counted."""
        return sum(row.size for row in self.tokens)

    def row(self, row: int) -> "Prompts":
        """Return one row alone, without its padding."""
        ids = self.ids[row : row + 1, int(self.pads[row]) :]
        return Prompts(ids, None, np.zeros(1, dtype=np.int64), [self.tokens[row]])

    def full_mask(self) -> torch.Tensor:
        """Return the mask for generate; all ones without padding, so that none is inferred."""
        return torch.ones_like(self.ids) if self.mask is None else self.mask


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call of `generate` will do, as far as the cache is concerned.

    expand: rows that generate makes out of each prompt (beams, return sequences)
    room: columns to expect at the end
    eos: ids after which a row is finished
    assisted: whether a draft is verified several tokens at a time
    chunk: tokens that one forward of a prompt may have, None for all
    extra: arguments to add for generate to use the cache
    """

    expand: int
    room: int
    eos: tuple[int, ...]
    assisted: bool
    chunk: int | None
    extra: dict[str, Any]


def read_prompts(
    input_ids: object, attention_mask: object, vocab_size: int, pad_id: int | None
) -> Prompts:
    """Check `input_ids` `[rows, columns]` and the mask, and take the padding off.

    Without a mask, leading ids equal to `pad_id` are padding. Raises `TokensError` for
    anything but integer ids below `vocab_size`, and for a mask that is not left padding.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise TokensError(
            f"input_ids are a {type(input_ids).__name__}; pass a tensor [rows, tokens], as a "
            "tokenizer returns with return_tensors='pt'"
        )
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise TokensError(
            f"input_ids have shape {list(input_ids.shape)}; they must be [rows, tokens] with at "
            "least one row and one token"
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise TokensError(f"input_ids are {input_ids.dtype}; token ids are int64 or int32")
    ids = input_ids.cpu().numpy()
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise TokensError(f"token id {bad} is not in the vocabulary of {vocab_size} ids")
    mask = _read_mask(input_ids, attention_mask)
    if mask is None and pad_id is not None and (ids == pad_id).any():
        mask = (input_ids != pad_id).long()
    if mask is None:
        pads = np.zeros(len(ids), dtype=np.int64)
    else:
        pads = _left_padding(mask.cpu().numpy())
        if not pads.any():
            mask = None
    tokens = [row[pad:].astype(np.int32) for row, pad in zip(ids, pads, strict=True)]
    return Prompts(input_ids, mask, pads, tokens)


@dataclass(frozen=True, slots=True)
class Signatures:
    """What a model's methods take, read once: inspecting costs more than a small lookup."""

    forward: tuple[str, ...]
    generate: frozenset[str]

    @classmethod
    def of(cls, model: Any) -> "Signatures":
        """Inspect `model`."""
        forward = inspect.signature(model.forward).parameters
        generate = inspect.signature(model.generate).parameters
        return cls(tuple(forward), frozenset(generate) - {"inputs", "kwargs"})


def read_plan(
    model: Any, signatures: Signatures, prompts: Prompts, arguments: Mapping[str, Any]
) -> Plan:
    """Read from `arguments` of `generate`, and the model's defaults, what the cache must know.

    Raises `ConfigError` for arguments under which K and V are not a function of the tokens.
    """
    settings = _Settings(model, arguments)
    for name, reason in _REFUSED.items():
        if settings.get(name) is not None:
            raise ConfigError(f"{name} cannot be given here: {reason}")
    if arguments.get("use_cache") is False:
        raise ConfigError("use_cache=False leaves nothing to reuse; call model.generate instead")
    if settings.get("token_healing"):
        raise ConfigError("token_healing changes the prompt after it was looked up; turn it off")
    unknown = [
        name
        for name, value in arguments.items()
        if value is not None
        and name not in signatures.generate
        and name not in _HARMLESS
        and not settings.knows(name)
    ]
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: not an argument of generate that leaves K and V a function "
            "of the token ids; such a request cannot share a prefix, call model.generate instead"
        )
    columns = prompts.ids.shape[1]
    budget = settings.get("max_new_tokens")
    limit = settings.get("max_length")
    end = columns + budget if isinstance(budget, int) else limit
    if not isinstance(end, int):
        end = columns + 20
    return Plan(
        expand=max(settings.get("num_beams") or 1, settings.get("num_return_sequences") or 1),
        room=min(max(end, columns + 1), columns + 4096),
        eos=_ids(settings.get("eos_token_id")),
        assisted=arguments.get("assistant_model") is not None
        or settings.get("prompt_lookup_num_tokens") is not None
        or settings.get("assistant_early_exit") is not None,
        chunk=settings.get("prefill_chunk_size"),
        # Some configs on the Hub turn the cache off by default.
        extra={"use_cache": True} if settings.get("use_cache") is False else {},
    )


def inferred_pad_id(model: Any, arguments: Mapping[str, Any]) -> int | None:
    """Return the id that `generate` takes for padding when no mask is given; None if none."""
    settings = _Settings(model, arguments)
    pad = _ids(settings.get("pad_token_id"))
    return pad[0] if pad and pad[0] not in _ids(settings.get("eos_token_id")) else None


class _Settings:
    """Generation settings in generate's order: arguments, generation_config, the model's."""

    def __init__(self, model: Any, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._given = arguments.get("generation_config")
        self._own = model.generation_config

    def get(self, name: str) -> Any:
        """Return the value in force, None if there is none."""
        if name in self._arguments:
            return self._arguments[name]
        value = getattr(self._given, name, None)
        return getattr(self._own, name, None) if value is None else value

    def knows(self, name: str) -> bool:
        """Whether `name` is a generation setting."""
        return hasattr(self._own, name) or name in _DEFAULTS


_DEFAULTS = frozenset(vars(GenerationConfig()))


def _ids(value: Any) -> tuple[int, ...]:
    return (
        ()
        if value is None
        else tuple(int(i) for i in torch.as_tensor(value).flatten().cpu().numpy())
    )


def _read_mask(input_ids: torch.Tensor, mask: object) -> torch.Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TokensError(
            f"attention_mask is {shape}; it must be a tensor of the shape of input_ids, "
            f"{list(input_ids.shape)}"
        )
    return mask


def _left_padding(mask: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Leading zeros per row; `TokensError` unless each row is zeros, then ones."""
    ones = mask != 0
    pads = ones.argmax(axis=1)
    for row, pad in enumerate(pads):
        if not ones[row].any():
            raise TokensError(f"row {row} of attention_mask masks every token; a prompt is empty")
        if not ones[row, pad:].all():
            column = int(pad + (~ones[row, pad:]).argmax())
            raise TokensError(
                f"attention_mask masks column {column} of row {row} after a token; only left "
                "padding can be cached: tokenize with padding_side='left'"
            )
    return pads.astype(np.int64)
