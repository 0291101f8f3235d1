"""The bytes of a sequence's state in llama.cpp, and the rows of single tokens in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.errors import QuireError, UnsupportedModel

Words = npt.NDArray[np.uint16]
"""Rows of tokens `[tokens, words]`: K and V of all layers behind each other, in words of two bytes."""

_HEAD = np.dtype([("streams", "<u4"), ("cells", "<u4")])
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_SHAPE = np.dtype(
    [("transposed", "<u4"), ("layers", "<u4"), ("rotated_k", "<u4"), ("rotated_v", "<u4")]
)
_PLANE = np.dtype([("type", "<i4"), ("row", "<u8")])
BEGIN = 8
"""Bytes before the first cache: a magic number, and the sequence that was saved."""


class Masked(QuireError):  # noqa: N818 - reads as what it says
    """A state that leaves out cells behind its window: it is to be read in shorter pieces."""


class RowPlane(NamedTuple):
    """K or V of one layer: number type, bytes of a token's row, and their words in the whole row."""

    type: int
    row: int
    words: slice


class _Cache(NamedTuple):
    shape: bytes
    planes: list[RowPlane]


class SequenceLayout:
    """The layout of K and V in sequences' states of one context, read from a state of `num_tokens` tokens.

    num_words  words of a token's row; 0 for a model that keeps recurrent states alone
    split      how many of these are the K of the first cache, which pools hold as K
    name       what tells layouts apart

    A model of sliding windows has two caches, that of other layers first. `behind` is what a sequence without a recurrent
    state has behind K and V, for a model that keeps some. Raises `UnsupportedModel` for a state of another form: of
    transposed V, of several streams, or with more than positions in its cells.
    """

    def __init__(self, data: bytes | memoryview, num_tokens: int, behind: bytes = b"") -> None:
        self.begin, at, self._behind = bytes(data[:BEGIN]), BEGIN, behind
        self._caches: list[_Cache] = []
        self.num_words = 0
        try:
            while at < len(data):
                at = self._read_cache(data, at, num_tokens)
        except (ValueError, IndexError):
            at = -1
        if at != len(data) or not (self._caches or behind):
            raise _other("its cells or rows have another form than K and V of each position")
        planes = [plane for cache in self._caches for plane in cache.planes]
        self.split = (
            planes[(len(planes) + 1) // 2].words.start if len(planes) > 1 else self.num_words // 2
        )
        rows = [(plane.type, plane.row) for plane in planes]
        self.name = f"{[cache.shape.hex() for cache in self._caches]} {rows}"

    @classmethod
    def proven(
        cls, data: npt.NDArray[np.uint8], num_tokens: int, behind: bytes = b""
    ) -> SequenceLayout:
        """Return the layout of a state, which it writes as it reads it. Raises `UnsupportedModel`."""
        layout = cls(data.data, num_tokens, behind)
        written = layout.write(layout.read(data, 0, num_tokens), 0)
        if written.tobytes() != data.tobytes() + behind:
            raise _other("a state that was read is written as another one")
        return layout

    def read(self, data: npt.NDArray[np.uint8], start: int, stop: int) -> Words:
        """Return the rows of positions `[start, stop)` from the state of a sequence that has these alone.

        Raises `Masked` where a cache lacks some, and `QuireError` for another layout.
        """
        at, num = BEGIN, stop - start
        found = np.empty((num, self.num_words), np.uint16)
        for cache in self._caches:
            head = data[at : at + _HEAD.itemsize].view(_HEAD)[0]
            if head["streams"] != 1 or head["cells"] != num:
                raise Masked(f"{head['cells']} cells of {num} positions")
            at += _HEAD.itemsize
            cells = data[at : at + num * _CELL.itemsize].view(_CELL)
            at += cells.nbytes
            order = np.argsort(cells["position"])
            if not np.array_equal(cells["position"][order], np.arange(start, stop)):
                raise QuireError(
                    f"llama.cpp has other positions than {start} to {stop - 1} in a sequence"
                )
            is_sorted = bool((np.diff(order) > 0).all())
            if data[at : at + _SHAPE.itemsize].tobytes() != cache.shape:
                raise QuireError("llama.cpp wrote a state of another layout than the first one")
            at += _SHAPE.itemsize
            for plane in cache.planes:
                if tuple(data[at : at + _PLANE.itemsize].view(_PLANE)[0]) != plane[:2]:
                    raise QuireError("llama.cpp wrote rows of another type than in the first state")
                at += _PLANE.itemsize
                rows = data[at : at + num * plane.row].view(np.uint16).reshape(num, -1)
                found[:, plane.words] = rows if is_sorted else rows[order]
                at += num * plane.row
        return found

    def write(self, rows: Words, start: int) -> npt.NDArray[np.uint8]:
        """Return a state with these rows of positions from `start` on."""
        num = len(rows)
        cells = np.zeros(num, _CELL)
        cells["position"], cells["sequences"] = np.arange(start, start + num), 1
        head = np.array([(1, num)], _HEAD).tobytes() + cells.tobytes()
        parts: list[bytes | Words] = [self.begin]
        for cache in self._caches:
            parts += [head, cache.shape]
            for plane in cache.planes:
                parts += [np.array([plane[:2]], _PLANE).tobytes(), rows[:, plane.words]]
        parts.append(self._behind)
        sizes = [len(each) if isinstance(each, bytes) else each.nbytes for each in parts]
        data, at = np.empty(sum(sizes), np.uint8), 0
        for part, size in zip(parts, sizes, strict=True):
            own = data[at : at + size]
            if isinstance(part, bytes):
                own[:] = np.frombuffer(part, np.uint8)
            else:
                own.view(np.uint16).reshape(part.shape)[:] = part
            at += size
        return data

    def _read_cache(self, data: bytes | memoryview, at: int, num_tokens: int) -> int:
        """Take note of the cache that begins at `at`; return where it ends."""
        head = np.frombuffer(data, _HEAD, 1, at)[0]
        if tuple(head) != (1, num_tokens):
            raise _other(
                f"{head['streams']} streams of {head['cells']} cells for {num_tokens} tokens"
            )
        at += _HEAD.itemsize
        cells = np.frombuffer(data, _CELL, num_tokens, at)
        if (
            sorted(cells["position"].tolist()) != [*range(num_tokens)]
            or (cells["sequences"] != 1).any()
        ):
            raise _other("its cells hold more than a position")
        at += num_tokens * _CELL.itemsize
        shape = np.frombuffer(data, _SHAPE, 1, at)[0]
        if shape["transposed"]:
            raise _other("V is transposed, as without flash attention")
        at += _SHAPE.itemsize
        planes: list[RowPlane] = []
        for _ in range(2 * int(shape["layers"])):
            kind, row = np.frombuffer(data, _PLANE, 1, at)[0].tolist()
            if row < 2 or row % 2 or row > len(data):
                raise _other(f"a row of {row} bytes")
            at += _PLANE.itemsize + num_tokens * row
            stop = self.num_words + row // 2
            planes.append(RowPlane(kind, row, slice(self.num_words, stop)))
            self.num_words = stop
        self._caches.append(_Cache(shape.tobytes(), planes))
        return at


def _other(why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"llama.cpp keeps the memory of this model in a form that quire does not know: {why}"
    )
