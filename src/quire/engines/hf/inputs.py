"""The arguments of a request, in any form that callers have, checked before anything is touched."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

from quire.config import nearest
from quire.core.terms import RequestTerms
from quire.engines.companions import AskedCompanion, CacheCompanion
from quire.engines.models.supported import num_embeddings
from quire.errors import ConfigError, TokensError

_REFUSED = {
    "past_key_values": "quire brings its own, with what is cached of the prompt in it; leave it out and "
    "pass the whole text, or use cache.session(...) to hold it yourself",
    "inputs_embeds": "embeddings have no token ids to find a prefix by; pass input_ids",
    "decoder_input_ids": "only decoder-only models are cached",
    "position_ids": "cached K and V are those of positions counted from the first token",
    "custom_generate": "quire cannot know what a custom loop does with the cache",
}
_TENSORS = "pass a tensor [rows, tokens], as a tokenizer returns with return_tensors='pt'"
_HOST = torch.device("cpu")
_HARMLESS = {"logits_to_keep", "return_dict", "tokenizer", "assistant_tokenizer"}


@dataclass(frozen=True, slots=True)
class Prompts:
    """The rows of a request.

    ids:    [rows, columns]  int64 on the model's device, left padding included
    mask:   [rows, columns]  1 for tokens, 0 for padding; None where nothing is padding
    pads:   [rows]           leading columns that are padding
    tokens: per row          int32 token ids without padding, on the host
    home:   where the caller's ids are, the model's device where they are no tensor
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    pads: npt.NDArray[np.int64]
    tokens: list[npt.NDArray[np.int32]]
    home: torch.device = _HOST

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
    """The cache's plan for one call of `generate`.

    expand: rows that generate makes out of each prompt (beams, return sequences)
    room: columns to expect at the end
    eos: ids after which a row is finished
    assisted: whether a draft is verified several tokens at a time
    chunk: tokens that one forward of a prompt may have, None for all
    extra: arguments to add for generate to use the cache
    calls_back: whether code of the caller's runs between its forwards
    """

    expand: int
    room: int
    eos: tuple[int, ...]
    assisted: bool
    chunk: int | None
    extra: dict[str, Any]
    calls_back: bool


def read_prompts(
    model: Any, input_ids: object, attention_mask: object, others: dict[str, Any]
) -> Prompts:
    """Check ids and mask, in any form that callers have them, and take the padding off.

    What else comes with them goes into `others`, the other arguments of the call. Without a mask,
    leading ids equal to the pad id of `model` are padding. Raises `TokensError` for anything but
    integer ids of its vocabulary, and for a mask that is not left padding.
    """
    if model.training:
        raise ConfigError(
            "the model is in training mode, where dropout changes K and V; call model.eval()"
        )
    given, attention_mask = _unpacked(input_ids, attention_mask, others)
    prompt_ids = _as_ids(given)
    mask = None if attention_mask is None else _as_mask(attention_mask, prompt_ids)
    ids = prompt_ids.cpu().numpy()
    vocab_size = num_embeddings(model)
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise TokensError(f"token id {bad} is not in the vocabulary of {vocab_size} ids")
    pad_id = _inferred_pad_id(model, others)
    if mask is None and pad_id is not None and (ids == pad_id).any():
        mask = (prompt_ids != pad_id).long()
        _check_padding(ids, pad_id)
    if mask is None:
        pads = np.zeros(len(ids), dtype=np.int64)
    else:
        pads = _left_padding(mask.cpu().numpy())
        mask = mask.to(model.device) if pads.any() else None
    tokens = [row[pad:].astype(np.int32) for row, pad in zip(ids, pads, strict=True)]
    home = given.device if isinstance(given, torch.Tensor) else model.device
    return Prompts(prompt_ids.to(model.device), mask, pads, tokens, home)


@dataclass(frozen=True, slots=True)
class Signatures:
    """Parameter names of a model's methods, read once: inspecting costs more than a small lookup."""

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
    if arguments.get("cache_implementation") is not None:
        raise ConfigError("cache_implementation cannot be given here: quire brings its own cache")
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
            "of the token ids"
            + (
                nearest(unknown[0], {*signatures.generate, *_DEFAULTS, *_OURS})
                or "; such a request cannot share a prefix, call model.generate instead"
            )
        )
    columns, budget = prompts.ids.shape[1], settings.get("max_new_tokens")
    streamer = arguments.get("streamer")
    end = columns + budget if isinstance(budget, int) else settings.get("max_length")
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
        # Some configs on the Hub turn the cache off by default, or ask for one of another kind.
        extra=({"use_cache": True} if settings.get("use_cache") is False else {})
        | ({"cache_implementation": None} if settings.get("cache_implementation") else {}),
        calls_back=any(map(arguments.get, _CALLBACKS))
        or not (streamer is None or type(streamer).__module__.startswith(_KNOWN_STREAMERS)),
    )


def taken_terms(arguments: dict[str, Any]) -> RequestTerms:
    """Take the terms that a request names out of its arguments."""
    named = [name for name in RequestTerms.__annotations__ if name in arguments]
    return cast("RequestTerms", {name: arguments.pop(name) for name in named})


_CALLBACKS = ("stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn")
_KNOWN_STREAMERS = ("transformers.", "quire.")
"""Modules whose streamers look at tokens alone."""


def taken_segments(
    passages: CacheCompanion | None, arguments: dict[str, Any]
) -> AskedCompanion | None:
    """Take `segments` and `selector` out of a call's arguments; None where it has no segments.

    Raises `ConfigError` where the cache keeps no passages, `TokensError` for segments that are none.
    """
    parts, selector = arguments.pop("segments", None), arguments.pop("selector", None)
    if parts is None:
        if selector is not None:
            raise ConfigError(
                "selector is given without segments, and chooses rows of their passages"
            )
        return None
    if passages is None:
        raise ConfigError(
            "segments are given, and this cache reuses no passages, which is approximate: make it with "
            "PrefixCache(model, passages=quire_passages.Passages('1GiB')), or pass the whole prompt"
        )
    return passages.asked(parts, selector)


def _inferred_pad_id(model: Any, arguments: Mapping[str, Any]) -> int | None:
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


_DEFAULTS = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))
_OURS = ("attention_mask", "media", "scope", *RequestTerms.__annotations__)


def _ids(value: Any) -> tuple[int, ...]:
    given = () if value is None else torch.as_tensor(value).flatten().cpu().numpy()
    return tuple(map(int, given))


def _check_padding(ids: npt.NDArray[Any], pad_id: int) -> None:
    """Raise `TokensError` where `generate` would take an id in a prompt for padding."""
    for row, each in enumerate(ids):
        text = np.flatnonzero(each != pad_id)
        inside = np.flatnonzero(each[text[0] :] == pad_id) if text.size else text
        if inside.size:
            raise TokensError(
                f"column {text[0] + inside[0]} of row {row} holds {pad_id}, which is pad_token_id: without an "
                "attention_mask that counts as padding, and only left padding can be cached; pass "
                "attention_mask=torch.ones_like(input_ids) if it is text"
            )


def _left_padding(mask: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Leading zeros per row; `TokensError` unless each row is zeros, then ones."""
    ones = mask != 0
    if (odd := mask[ones & (mask != 1)]).size:
        raise TokensError(
            f"attention_mask holds {odd[0]}; it is 1 for tokens and 0 for padding, as positions are "
            "counted by it"
        )
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


def _unpacked(input_ids: object, attention_mask: object, others: dict[str, Any]) -> tuple[Any, Any]:
    """Return ids and mask of a call; what else a tokenizer has returned with them goes into `others`.

    `input_ids` may be what a tokenizer or processor returns, a mapping with ids in it. Raises
    `ConfigError` for what is given twice, and for embeddings without ids.
    """
    inputs = others.pop("inputs", None)
    if input_ids is None:
        input_ids = inputs
    elif inputs is not None:
        raise ConfigError(
            "inputs and input_ids are both given, and mean the same; pass one of them"
        )
    if isinstance(input_ids, Mapping):
        held = dict(cast("Mapping[str, Any]", input_ids))
        if held.get("input_ids") is None:
            raise TokensError(f"a mapping without input_ids: it has {', '.join(held) or 'nothing'}")
        input_ids = held.pop("input_ids")
        given = {**others, "attention_mask": attention_mask}
        twice = [name for name in held if given.get(name) is not None]
        if twice:
            raise ConfigError(
                f"{', '.join(twice)}: given beside a mapping of inputs that has it as well; leave one out"
            )
        attention_mask = held.pop("attention_mask", attention_mask)
        others.update(held)
    if "past_key_values" in others and others["past_key_values"] is None:
        del others["past_key_values"]  # as in transformers, None is as if it were absent
    if input_ids is None and others.get("inputs_embeds") is not None:
        raise ConfigError(
            "inputs_embeds without input_ids: embeddings have no token ids to find a prefix by; pass "
            "input_ids, or call model.generate"
        )
    return input_ids, attention_mask


def _as_ids(given: object) -> torch.Tensor:
    """Return ids `[rows, tokens]` of type int64 on the device they are on; one flat list is one row.

    Raises `TokensError` for what holds no integers, or is not rectangular.
    """
    ids = _as_tensor(given, "input_ids", _TENSORS)
    if ids.numel() and ids.dtype not in (torch.int64, torch.int32):
        raise TokensError(f"input_ids are {ids.dtype}; token ids are int64 or int32")
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or ids.numel() == 0:
        raise TokensError(
            f"input_ids have shape {list(ids.shape)}; they must be [rows, tokens] with at "
            "least one row and one token"
        )
    return ids.long()


def _as_mask(given: object, ids: torch.Tensor) -> torch.Tensor:
    """Return a mask of the shape of ids, on their device."""
    like = f"it must be a tensor of the shape of input_ids, {list(ids.shape)}"
    mask = _as_tensor(given, "attention_mask", like)
    if mask.ndim == 1:
        mask = mask[None]
    if mask.shape != ids.shape:
        raise TokensError(f"attention_mask is {list(mask.shape)}; {like}")
    return mask.to(ids.device)


def _as_tensor(given: object, name: str, wanted: str) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given
    kind = type(given).__name__
    if not isinstance(given, np.ndarray | list | tuple):
        made = (
            "; list(...) makes a list of one"
            if isinstance(given, Iterator | range | set | frozenset)
            else ""
        )
        raise TokensError(f"{name}: {kind} is no kind of ids{made}; {wanted}")
    try:
        array = np.asarray(cast("Any", given))
    except (ValueError, TypeError):  # rows of different lengths, or of anything
        array = np.asarray(None)
    if array.dtype.kind not in "iufb":
        raise TokensError(f"{name}: {_what_rows(cast('Sequence[Any]', given))}; {wanted}")
    return torch.tensor(array)


def _what_rows(given: Sequence[Any]) -> str:
    lengths = [len(row) for row in given if hasattr(row, "__len__") and not isinstance(row, str)]
    if len(lengths) == len(given) and len(set(lengths)) > 1:
        return (
            f"rows of {min(lengths)} to {max(lengths)} tokens; pad them on the left and pass the mask, "
            "as tokenizer(texts, padding=True, padding_side='left', return_tensors='pt') does"
        )
    odd = next(
        (type(each).__name__ for each in given if not isinstance(each, int)), "huge integers"
    )
    return f"a {type(given).__name__} of {odd} where ids are expected"
