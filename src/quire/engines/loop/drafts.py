"""Tokens guessed ahead from the text itself, and which of them hold.

Prompt lookup (A. Saxena, "Prompt Lookup Decoding", 2023): what followed the last few tokens where
they stood before is what will follow them now. A guess costs one row of a forward; a wrong one
changes nothing.
"""

import numpy as np

LONGEST = 3
"""Tokens that are looked for in the text before: at most so many, then fewer, down to one."""


def propose(tokens: np.ndarray, max_drafts: int) -> np.ndarray:
    """Return what may follow `tokens` (int32 [n], prompt and answer), int32, at most `max_drafts`.

    The longest end of them that stood before, of one to three tokens, is what counts; of the places where
    it stood the last that `max_drafts` tokens follow, or else the first.
    """
    for size in range(min(LONGEST, len(tokens) - 1), 0, -1):
        tail = tokens[-size:]
        # Where its last token stands; the end itself is not asked.
        ends = size - 1 + np.flatnonzero(tokens[size - 1 : -1] == tail[-1])
        for back in range(1, size):
            ends = ends[tokens[ends - back] == tail[-1 - back]]
        if len(ends):
            full = ends[ends < len(tokens) - max_drafts]
            start = int(full[-1] if len(full) else ends[0]) + 1
            return tokens[start : start + max_drafts].astype(np.int32)
    return np.empty(0, np.int32)


def num_accepted(drafts: np.ndarray, sampled: np.ndarray) -> int:
    """Return how many drafts are what was sampled in their place: `sampled` is longer."""
    wrong = np.flatnonzero(drafts != sampled[: len(drafts)]) if len(drafts) else drafts
    return int(wrong[0]) if len(wrong) else len(drafts)
