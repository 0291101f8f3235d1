"""A context of llama.cpp: decoded tokens, marks of sequences on cells, states of ranges."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

import numpy as np
import numpy.typing as npt

from quire.engines.gguf.state import BEGIN, Masked, SequenceLayout, Words
from quire.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.core.tokens import IntArray
    from quire.engines.gguf.library import LlamaLibrary

SCRATCH = 0
"""The sequence through which ranges are saved and restored."""

PIECE = 1024
"""Tokens of a range that are saved or restored at once."""

_NO_SLOT = 1
_FLASH = 1
_RECURRENT = 1
"""The flag of a sequence's state without K and V."""


class NoCells(QuireError):  # noqa: N818 - reads as what it says
    """A context without cells for what is to be in it; nothing has changed."""


class Chunk(NamedTuple):
    """Neighbouring tokens of one sequence to decode, from position `start` on, and whose logits are asked for."""

    ids: tuple[int, ...]
    start: int
    tokens: IntArray
    asked: npt.NDArray[np.int8]


class Context:
    """Cells of one model, in which sequences share what they have in common.

    `state_bytes`  those of a sequence's recurrent state, 0 for a model that keeps none. Such a state is of all positions
                   of its sequence, and cannot go back
    `layout`       that of states; `owner` is what has to live as long
    Every call is made by one thread at a time. Raises `ConfigError` where llama.cpp has no memory for it, and
    `UnsupportedModel`.
    """

    owner: object = None

    def __init__(self, library: LlamaLibrary, model: int, vocab_size: int, **settings: Any) -> None:
        self._library, self._vocab_size = library, vocab_size
        params = library.llama_context_default_params()
        fixed = {"flash_attn_type": _FLASH, "kv_unified": True, "swa_full": True, "no_perf": True}
        for name, value in ({"n_outputs_max_per_seq": 0} | fixed | settings).items():
            if hasattr(params, name):
                setattr(params, name, value)
        library.said.clear()
        self._context: int | None = library.llama_init_from_model(model, params)
        self._free = finalize(self, library.llama_free, self._context)
        if self._context is None:
            self._free.detach()
            raise ConfigError(
                f"llama.cpp made no context of n_ctx {params.n_ctx}{library.why()}; lower n_ctx, or "
                "change type_k and type_v"
            )
        self._memory = library.llama_get_memory(self._context)
        self.num_cells: int = library.llama_n_ctx(self._context)
        self.num_batch: int = library.llama_n_batch(self._context)
        self.num_ids: int = library.llama_n_seq_max(self._context)
        kinds = library.llama_model_is_recurrent, library.llama_model_is_hybrid
        keeps_states = any(each(model) for each in kinds)
        self.state_bytes = 0
        self.layout = self._probed(keeps_states=keeps_states)

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""
        return self._free.alive

    def close(self) -> None:
        """Free the context; a second call does nothing."""
        self._free()

    def decode(self, chunks: list[Chunk]) -> npt.NDArray[np.float32]:
        """Compute tokens; return the logits `[asked, vocab]`, a copy.

        Raises `NoCells`, and `QuireError` where llama.cpp fails; then none of the tokens is in the context, unless the model
        keeps recurrent states: of the sequences of such a model only K and V of earlier positions are of use then.
        """
        tokens = np.concatenate([each.tokens for each in chunks]).astype(np.int32)
        asked = np.concatenate([each.asked for each in chunks])
        lengths = [len(each.tokens) for each in chunks]
        spans = ((each.start, each.start + len(each.tokens)) for each in chunks)
        positions = np.concatenate([np.arange(*span, dtype=np.int32) for span in spans])
        width = len(chunks[0].ids)
        ids = np.repeat(np.array([each.ids for each in chunks], np.int32), lengths, axis=0)
        counts = np.full(len(tokens), width, np.int32)
        places = ids.ctypes.data + np.arange(len(tokens), dtype=np.uint64) * np.uint64(4 * width)
        batch = self._library.batch(
            n_tokens=len(tokens),
            token=tokens.ctypes.data,
            pos=positions.ctypes.data,
            n_seq_id=counts.ctypes.data,
            seq_id=places.ctypes.data,
            logits=asked.ctypes.data,
        )
        self._library.said.clear()
        code = self._library.llama_decode(self._context, batch)
        if code:
            for each in () if self.state_bytes else chunks:
                self.cut(each.ids, each.start)
            if code == _NO_SLOT:
                raise NoCells(
                    f"the context of {self.num_cells} cells has none for {len(tokens)} tokens"
                )
            raise QuireError(
                f"llama_decode returned {code} for {len(tokens)} tokens{self._library.why()}"
            )
        num = int(asked.sum())
        if not num:
            return np.empty((0, self._vocab_size), np.float32)
        address = self._library.llama_get_logits(self._context)
        held: Any = (ctypes.c_float * (num * self._vocab_size)).from_address(address)
        return np.frombuffer(held, np.float32).reshape(num, -1).copy()

    def cut(self, ids: tuple[int, ...], start: int = 0) -> None:
        """Take these ids off all positions from `start` on; cells without an id are free."""
        for each in ids:
            if not self._library.llama_memory_seq_rm(self._memory, each, start, -1):
                raise QuireError(
                    f"llama.cpp did not remove positions from {start} on of a sequence"
                )

    def share(self, source: int, ids: tuple[int, ...], start: int, stop: int) -> None:
        """Put ids on the cells of positions `[start, stop)` of a sequence."""
        for each in ids:
            self._library.llama_memory_seq_cp(self._memory, source, each, start, stop)

    def extent(self, number: int) -> tuple[int, int]:
        """Return the least and the greatest position of a sequence, (-1, -1) for none."""
        ends = self._library.llama_memory_seq_pos_min, self._library.llama_memory_seq_pos_max
        lowest, highest = (each(self._memory, number) for each in ends)
        return lowest, highest

    def clear(self, *, data: bool = False) -> None:
        """Forget all sequences, and with `data` overwrite K and V."""
        self._library.llama_memory_clear(self._memory, data)

    def save(self, number: int, start: int, stop: int) -> Words:
        """Return the rows of positions `[start, stop)` of a sequence, at most `PIECE`."""
        try:
            self.share(number, (SCRATCH,), start, stop)
            return self.layout.read(self._state(SCRATCH), start, stop)
        except Masked:
            if stop - start == 1:
                raise QuireError(f"llama.cpp has lost position {start} of a sequence") from None
        finally:
            self.cut((SCRATCH,))
        middle = (start + stop) // 2
        return np.concatenate([self.save(number, start, middle), self.save(number, middle, stop)])

    def restore(self, rows: Words, ids: tuple[int, ...], start: int) -> None:
        """Bring rows of positions from `start` on into cells of sequences. Raises `NoCells`."""
        data = self.layout.write(rows, start)
        try:
            if not self._set_state(data, SCRATCH):
                raise NoCells(
                    f"the context of {self.num_cells} cells has none for {len(rows)} tokens"
                )
            self.share(SCRATCH, ids, start, start + len(rows))
        finally:
            self.cut((SCRATCH,))

    def save_recurrent(self, number: int) -> npt.NDArray[np.uint8]:
        """Return the recurrent state of a sequence."""
        data = self._state(number, _RECURRENT)[BEGIN:]
        if data.nbytes != self.state_bytes:
            raise QuireError(
                f"llama.cpp wrote a recurrent state of {data.nbytes} bytes, not {self.state_bytes}"
            )
        return data

    def restore_recurrent(self, data: npt.NDArray[np.uint8], number: int) -> None:
        """Give a sequence a recurrent state, in place of its own."""
        whole = np.concatenate([np.frombuffer(self.layout.begin, np.uint8), data])
        if not self._set_state(whole, number, _RECURRENT):
            raise QuireError(f"llama.cpp did not take a recurrent state{self._library.why()}")

    def whole_state(self) -> bytes:
        """Return the state of all cells, for tests."""
        size = self._library.llama_state_get_size(self._context)
        data = np.empty(size, np.uint8)
        size = self._library.llama_state_get_data(self._context, data.ctypes.data, size)
        return data[:size].tobytes()

    def _state(self, number: int, flags: int = 0) -> npt.NDArray[np.uint8]:
        size = self._library.llama_state_seq_get_size_ext(self._context, number, flags)
        data = np.empty(size, np.uint8)
        written = self._library.llama_state_seq_get_data_ext(
            self._context, data.ctypes.data, size, number, flags
        )
        if written != size:
            raise QuireError(
                f"llama.cpp wrote {written} of {size} bytes of a state{self._library.why()}"
            )
        return data

    def _set_state(self, data: npt.NDArray[np.uint8], number: int, flags: int = 0) -> bool:
        set_data = self._library.llama_state_seq_set_data_ext
        self._library.said.clear()
        return bool(set_data(self._context, data.ctypes.data, data.nbytes, number, flags))

    def _probed(self, *, keeps_states: bool) -> SequenceLayout:
        """Decode three tokens, and read the layout of states from theirs."""
        try:
            none = np.zeros(3, np.int8)
            self.decode([Chunk((SCRATCH,), 0, np.zeros(3, np.int32), none)])
            data, behind = self._state(SCRATCH), b""
            if keeps_states:
                self.state_bytes = self._state(SCRATCH, _RECURRENT).nbytes - BEGIN
                data = data[: -self.state_bytes]
                self.clear()
                behind = self._state(SCRATCH, _RECURRENT)[BEGIN:].tobytes()
            layout = SequenceLayout.proven(data, 3, behind)
        except BaseException:
            self.close()
            raise
        self.clear()
        return layout
