"""Token ids as key bytes: the forms that callers pass in, and the form that the tree compares.

A key is the int32 token ids of a run of blocks as native-endian bytes, four per token.
Equal keys mean equal tokens: there is no hash between a prompt and its cached prefix.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from quire.errors import TokensError

if TYPE_CHECKING:
    from array import array

    import numpy.typing as npt

TokenIds: TypeAlias = "npt.NDArray[np.integer] | memoryview[int] | array[int] | Sequence[int]"
"""Token ids: 1-D, integers from 0 to 2**31 - 1. An int32 ndarray is taken without a copy."""

Key: TypeAlias = "memoryview[int]"
"""Token ids as bytes: 1-D, format B, four bytes per token."""

IntArray: TypeAlias = "npt.NDArray[np.int32]"

BoolArray: TypeAlias = "npt.NDArray[np.bool_]"

IndexArray: TypeAlias = "npt.NDArray[np.intp]"

TOKEN_BYTES = 4
TOP_BYTE = TOKEN_BYTES - 1 if sys.byteorder == "little" else 0
SHORT_KEY = 2048 * TOKEN_BYTES
"""Up to so many bytes, the signs are seen faster in the top bytes than with NumPy."""
INT32 = np.dtype(np.int32)
EMPTY_KEY: Key = memoryview(b"")


def key_of(tokens: TokenIds) -> Key:
    """View token ids as key bytes, without a copy where they are a contiguous int32 array.

    Raises `TokensError` for a wrong type, shape or range. A negative id inside an int32
    array is not seen here (it would cost a pass over the whole prompt); `check_sign` sees it.
    """
    if type(tokens) is np.ndarray and tokens.dtype == INT32 and tokens.ndim == 1:
        if not tokens.size:
            return EMPTY_KEY
        if not tokens.flags.c_contiguous:
            tokens = np.ascontiguousarray(tokens)
        return tokens.data.cast("B")
    return _convert(tokens)


def check_sign(key: Key) -> None:
    """Raise `TokensError` if any token id is negative."""
    if not key:
        return
    if len(key) <= SHORT_KEY and key.tobytes()[TOP_BYTE::TOKEN_BYTES].isascii():
        return
    lowest = int(np.minimum.reduce(np.frombuffer(key, INT32)))
    if lowest < 0:
        raise TokensError(f"token id {lowest} is negative; token ids run from 0 to {2**31 - 1}")


def array_of(key: Key | bytes | bytearray) -> IntArray:
    """Copy key bytes into a new int32 array of token ids."""
    return np.frombuffer(key, dtype=INT32).copy()


def common_prefix(a: Key | bytes | bytearray, b: Key | bytes | bytearray) -> int:
    """Count the leading tokens that two keys share."""
    return common_bytes(a, b) // TOKEN_BYTES


def common_bytes(a: Key | bytes | bytearray, b: Key | bytes | bytearray) -> int:
    """Count the leading bytes that two runs share."""
    size = min(len(a), len(b))
    differ = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    if not differ:
        return size
    lowest_bit = (differ & -differ).bit_length() - 1
    return lowest_bit // 8


def _convert(tokens: TokenIds) -> Key:
    array: npt.NDArray[np.integer]
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        msg = f"token ids must be a 1-D run of integers, got {type(tokens).__name__}: {error}"
        raise TokensError(msg) from None
    if array.ndim != 1:
        msg = (
            f"token ids must be a list or 1-D array, got {type(tokens).__name__} with {array.ndim} dimensions; pass "
            "one sequence at a time, for example ids[0], or list(...) of an iterator"
        )
        raise TokensError(msg)
    if not array.size:
        return EMPTY_KEY
    if array.dtype.kind not in "iu":
        msg = (
            f"token ids must be integers from 0 to {2**31 - 1}, got {array.dtype} "
            f"(first value {array[0]!r})"
        )
        raise TokensError(msg)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**31:
        bad = low if low < 0 else high
        raise TokensError(f"token id {bad} is out of range; token ids run from 0 to {2**31 - 1}")
    return np.ascontiguousarray(array, dtype=INT32).data.cast("B")
