"""GGUF models for the engine, computed by llama.cpp."""

from __future__ import annotations

import ctypes
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet, finalize

from msgspec.structs import replace

from quire.config import check_count, format_bytes, memory_bytes, parse_bytes
from quire.core import FullAttention, Scope
from quire.engines.gguf.context import Context
from quire.engines.gguf.forward import GgufForward
from quire.engines.gguf.host_pool import host_layout, state_layout
from quire.engines.gguf.library import LlamaLibrary, load
from quire.engines.models.weights import FileDigests, default_kept_at, stat_of
from quire.errors import ConfigError, ScopeError, UnsupportedModel
from quire.groups import Recurrent
from quire.scope import check_scope
from quire.tensors.model import GroupLayout, ModelLayout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire.core import CacheManager
    from quire.engines.loop.settings import EngineSettings
    from quire.scope import ScopePart

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
"""Number types of K and V, by ggml's numbers."""

CELLS = "1GiB"
"""Bytes of cells in a context where neither bytes nor cells are given."""

LEAST_CELLS = 4096

FEWEST_CELLS = 256
"""Cells of the smallest context that llama.cpp makes for all its sequences; it aborts for one of fewer."""

_ROPES = {-1, 0, 2}
"""Kinds of rotation with one position for each token, or none."""

_MAGIC = b"GGUF"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.ASCII)
_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


class GgufModel:
    """A model in a GGUF file, computed by llama.cpp on any device that it knows, for an `Engine`.

        model = GgufModel("model.gguf")
        engine = Engine(model, model.tokenizer(), kv_memory="4GiB")

    path          the file; of a split one the first part
    n_ctx         tokens that the device holds at once, of all requests that run; None: as many as `device_memory` holds
    device_memory bytes of K and V on the device, as a number or "1GiB"
    type_k, type_v  number types of K and V, by llama.cpp's names: "f16", "q8_0", "q4_0"
    n_gpu_layers  layers on a GPU, where the library knows one; -1: all
    n_threads     threads of the CPU; None: one for each core
    n_ubatch      tokens that are computed at once
    attention     "quire" or "llama.cpp": whose code computes attention on a CPU; None: quire's, where the library has it

    Raises `ConfigError` for a file or setting that is none, and `UnsupportedModel`, by name, for a model whose memory is
    not K and V of each token, or a recurrent state: a diffusion one, an encoder, one of multi-part positions, one with
    recurrent states beside sliding windows.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_ctx: int | None = None,
        device_memory: int | str = CELLS,
        library: LlamaLibrary | None = None,
        attention: Literal["quire", "llama.cpp"] | None = None,
        **settings: Any,
    ) -> None:
        self.path = Path(path).expanduser()
        self._files = {each: stat_of(each) for each in _files(self.path)}
        self._library = library or load()
        self.attention = _attention(attention, self._library)
        self._settings = _checked(settings)
        if n_ctx is not None and check_count("n_ctx", n_ctx) < FEWEST_CELLS:
            raise ConfigError(
                f"n_ctx is {n_ctx}; give {FEWEST_CELLS} or more, one for each sequence"
            )
        self._n_ctx = n_ctx
        self._device_memory = parse_bytes(device_memory)
        params = self._library.llama_model_default_params()
        params.n_gpu_layers = self._settings.pop("n_gpu_layers")
        self._library.said.clear()
        self._model: int = self._library.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._model:
            raise ConfigError(f"llama.cpp cannot load {str(self.path)!r}{self._library.why()}")
        self._free = finalize(self, self._library.llama_model_free, self._model)
        self._contexts = WeakSet[Context]()
        self._check()

    @property
    def about(self) -> str:
        """Its architecture, size and number types, by llama.cpp."""
        buffer = ctypes.create_string_buffer(256)
        self._library.llama_model_desc(self._model, buffer, len(buffer))
        about = f"{buffer.value.decode('utf-8', 'replace')}, by llama.cpp {self._library.version}"
        return f"{about}, attention by {self.attention}"

    def tokenizer(self) -> Any:
        """Return the tokenizer in the file, with its chat template, as one of transformers."""
        import transformers  # noqa: PLC0415 - takes a second

        reader: Any = transformers.AutoTokenizer
        return reader.from_pretrained(self.path.parent, gguf_file=self.path.name)

    def meta(self, key: str) -> str | None:
        """Return a value of the file's metadata, None for none."""
        buffer = ctypes.create_string_buffer(1 << 16)
        value_of = self._library.llama_model_meta_val_str
        size = value_of(self._model, key.encode(), buffer, len(buffer))
        return None if size < 0 else buffer.value.decode("utf-8", "replace")

    def in_engine(self, settings: EngineSettings, *, outlives: bool) -> BoundGguf:
        """Return the model as an engine has it. Raises `ConfigError`."""
        if settings.adapters or settings.passages is not None:
            names = ", ".join(map(repr, settings.adapters))
            what = f"adapters ({names})" if names else "passages"
            raise ConfigError(
                f"{what} are for models of transformers, not for the GGUF file {self.path.name}; leave them out, or "
                "give the folder of the model"
            )
        return BoundGguf(self, settings, outlives=outlives)

    def context(self, max_running: int | None = None) -> Context:
        """Return a new context; `max_running`: requests at once of an engine, for whose states it has room.

        Raises `ConfigError`.
        """
        if not self._free.alive:
            raise ConfigError(f"the model {self.path.name} was closed; make another one")
        most = self._library.llama_max_parallel_sequences()
        if self.keeps_states and max_running is not None:  # each sequence has the bytes of a state
            most = min(most, max_running + 1)
        how = self._library, self._model, self.vocab_size
        with self._library.attention(is_own=self.attention == "quire"):
            tiny = Context(*how, n_ctx=256, **self._settings, n_seq_max=1)
            tiny.close()
            n_ctx = self._fitting(tiny, most)
            made = Context(*how, n_ctx=n_ctx, **self._settings, n_seq_max=most)
        made.owner = self
        self._contexts.add(made)
        return made

    def _fitting(self, context: Context, most: int) -> int:
        """Return `n_ctx`, or the cells that device memory holds beside the recurrent states of `most` sequences."""
        states, row, found = most * context.state_bytes, 2 * context.layout.num_words, self._n_ctx
        if found is None and states > self._device_memory:
            raise ConfigError(
                f"device_memory is {format_bytes(self._device_memory)}, and the recurrent states of {most - 1} requests "
                f"take {format_bytes(states)}; give more, or lower max_running"
            )
        if found is None:
            fits = (self._device_memory - states) // row if row else self.trained_positions
            found = max(fits, min(self.trained_positions, LEAST_CELLS), FEWEST_CELLS) // 256 * 256
        needed, has = found * row + states, memory_bytes()
        if needed > has and not self._library.llama_supports_gpu_offload():
            raise ConfigError(
                f"a context of {found} tokens takes {format_bytes(needed)}, and the machine has {format_bytes(has)}; "
                "lower n_ctx, device_memory or max_running"
            )
        return found

    def identity(self, state: str, *, outlives: bool) -> str:
        """Return the name of what K and V are of; `outlives`: a name that other processes have too."""
        if outlives:
            digests = FileDigests(default_kept_at()).of(self._files)
            self.check_files(renamed=True)
        else:
            digests = {each.name: str(stat) for each, stat in self._files.items()}
        parts = state, self._library.state_version, self._library.version, self.attention
        return f"gguf {sha256(repr((sorted(digests.values()), *parts)).encode()).hexdigest()}"

    def check_files(self, *, renamed: bool = False) -> None:
        """Raise `ConfigError` if a file was written to since it was loaded; `renamed`: or another is in its place."""
        for path, (size, changed, _, inode) in self._files.items():
            try:
                now = stat_of(path)
            except OSError:
                now = (0, 0, 0, -1)  # it is elsewhere, or deleted: what was loaded stays mapped
            is_other = now[3] != inode
            if renamed if is_other else now[:2] != (size, changed):
                what = "replaced" if is_other else "written to"
                raise ConfigError(
                    f"{str(path)!r} was {what} since it was loaded, so nothing says what KV is of; "
                    "load it again, and make another engine"
                )

    def close(self) -> None:
        """Free the model; a second call does nothing. Raises `ConfigError` while an engine over it is open."""
        if count := sum(each.is_open for each in self._contexts):
            raise ConfigError(f"{count} engines compute with {self.path.name}; close them first")
        self._free()

    def _check(self) -> None:
        library, model = self._library, self._model
        vocabulary = library.llama_model_get_vocab(model)
        self.vocab_size: int = library.llama_vocab_n_tokens(vocabulary)
        self.eos_ids = tuple(
            each for each in range(self.vocab_size) if library.llama_vocab_is_eog(vocabulary, each)
        )
        self.trained_positions: int = library.llama_model_n_ctx_train(model)
        self.is_windowed = library.llama_model_n_swa(model) > 0
        states = library.llama_model_is_recurrent(model), library.llama_model_is_hybrid(model)
        self.keeps_states = any(states)
        kinds = ("is_diffusion", "has_encoder")
        other = [each for each in kinds if getattr(library, f"llama_model_{each}")(model)]
        if self.keeps_states and self.is_windowed:
            other.append("has recurrent states beside sliding windows")
        if library.llama_model_rope_type(model) not in _ROPES:
            other.append("has positions of several parts")
        if other or not self.vocab_size:
            what = " and ".join(other).replace("_", " ") or "has no vocabulary"
            raise UnsupportedModel(
                f"{self.path.name} ({self.meta('general.architecture')}) {what}: quire keeps K and V of tokens and "
                "recurrent states, and runs decoders that keep nothing else"
            )


class BoundGguf:
    """A GGUF model as one engine has it: its context, and the name of its K and V."""

    def __init__(self, model: GgufModel, settings: EngineSettings, *, outlives: bool) -> None:
        self.model = model
        self._context = model.context(settings.max_running)
        try:
            state, size = self._context.layout, settings.block_size
            groups: list[GroupLayout] = []
            if state.num_words:
                groups.append(GroupLayout("full", FullAttention(), (0,), host_layout(state, size)))
            if num_bytes := self._context.state_bytes:
                memory = state_layout(num_bytes)
                groups.append(GroupLayout("recurrent", Recurrent(), (len(groups),), memory))
            self.layout = ModelLayout((*groups,), len(groups), size)
            self.ids_per_sequence = 2 if model.is_windowed else 1
            _check_running(settings.max_running, self._context.num_ids, self.ids_per_sequence)
            name = f"{state.name} {num_bytes}" if num_bytes else state.name
            self.fingerprint = model.identity(name, outlives=outlives)
        except BaseException:
            self._context.close()
            raise
        self.max_positions = min(model.trained_positions, self._context.num_cells)
        self.vocab_size, self.eos_ids = model.vocab_size, model.eos_ids
        found = {ours: model.meta(f"general.sampling.{name}") for name, ours in _SAMPLING.items()}
        self.own_sampling: dict[str, Any] = {
            name: int(value) if name == "top_k" else float(value)
            for name, value in found.items()
            if value is not None
        }

    def forward(self, manager: CacheManager, *, debug_nan: bool) -> GgufForward:
        """Return the forward of the engine's steps; it closes the context."""
        return GgufForward(self, self._context, manager, debug_nan=debug_nan)

    def scope(self, scope: Scope | None = None) -> Scope:
        """Return a scope bound to the model. Raises `ScopeError`."""
        scope = Scope() if scope is None else scope
        check_scope(scope)
        if scope.model is not None:
            raise ScopeError(
                f"scope.model is {scope.model!r}; the engine sets it to the fingerprint of its model: leave it out"
            )
        return replace(scope, model=self.fingerprint)

    def outdated(self, bound: Iterable[Scope]) -> set[ScopePart]:
        """Return no models: a step sees whether weights have changed."""
        return set()

    def wipe(self) -> None:
        """Do nothing: cells are overwritten as a companion of the engine."""


def _check_running(max_running: int, num_ids: int, width: int) -> None:
    """Raise `ConfigError` for more requests at once than llama.cpp has ids for, beside the scratch sequence."""
    if max_running > (most := (num_ids - 1) // width):
        raise ConfigError(
            f"max_running is {max_running}, and the {num_ids} sequences of llama.cpp are enough for {most} requests "
            "at once; lower max_running"
        )


def _attention(wanted: str | None, library: LlamaLibrary) -> str:
    """Return whose code computes attention. Raises `ConfigError`."""
    if wanted not in (None, "quire", "llama.cpp"):
        raise ConfigError(f"attention is {wanted!r}; give 'quire' or 'llama.cpp'")
    if wanted == "quire" and not library.has_attention:
        raise ConfigError(
            f"attention is 'quire', and {library.why_no_attention}; `quire gguf build` makes both on Linux"
        )
    return wanted or ("quire" if library.has_attention else "llama.cpp")


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as llama.cpp takes them. Raises `ConfigError`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    defaults: dict[str, Any] = {"type_k": "f16", "type_v": "f16", "n_gpu_layers": -1}
    defaults |= {"n_threads": None, "n_ubatch": 512}
    if unknown := settings.keys() - defaults.keys():
        raise ConfigError(
            f"{min(unknown)!r} is no setting of a GGUF model; these are n_ctx, device_memory, attention, "
            f"{', '.join(defaults)}"
        )
    made: dict[str, Any] = defaults | settings
    for name in ("type_k", "type_v"):
        if made[name] not in KV_TYPES:
            raise ConfigError(f"{name} is {made[name]!r}; give one of {', '.join(KV_TYPES)}")
        made[name] = KV_TYPES[made[name]]
    if type(made["n_gpu_layers"]) is not int or made["n_gpu_layers"] < -1:
        raise ConfigError(
            f"n_gpu_layers is -1 for all, or a number of layers, got {made['n_gpu_layers']!r}"
        )
    threads = (cores or 1) if made["n_threads"] is None else made["n_threads"]
    made["n_threads"] = made["n_threads_batch"] = check_count("n_threads", threads, limit=512)
    check_count("n_ubatch", made["n_ubatch"], limit=2048)
    return made


def _files(path: Path) -> list[Path]:
    """Return the files of a model. Raises `ConfigError`."""
    part = _PART.search(path.name)
    paths = [path]
    if part is not None:
        if int(part[1]) != 1:
            raise ConfigError(
                f"{path.name!r} is part {int(part[1])} of {int(part[2])}; give the first one"
            )
        head = path.name[: part.start()]
        count = int(part[2])
        paths = [path.with_name(f"{head}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for each in paths:
        try:
            with each.open("rb") as file:
                begin, size = file.read(len(_MAGIC)), each.stat().st_size
        except OSError as error:
            raise ConfigError(f"{str(each)!r} cannot be read: {error.strerror}") from None
        if begin != _MAGIC:
            raise ConfigError(
                f"{str(each)!r} of {format_bytes(size)} is no GGUF file: it begins with {begin!r}, not {_MAGIC!r}"
            )
    return paths
