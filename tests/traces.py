"""Trace files for tests: the beginnings kept here, and the whole ones where they are at hand."""

from pathlib import Path

import pytest

HEADS = Path(__file__).parent / "data" / "traces"
"""The first rows of each trace: enough to read, too few for published numbers."""

WHOLE = Path(__file__).parents[2] / "shared" / "traces"
"""The whole traces: beside the checkout, not part of it."""

CONVERSATION, AGENT, CODING_AGENT = NAMES = (
    "mooncake_conversation",
    "agent_16tok",
    "coding_agent_64tok",
)


def head_path(name: str) -> Path:
    """Return the file with the first rows of a trace."""
    return HEADS / f"{name}.head.jsonl.gz"


def whole_path(name: str) -> Path:
    """Return the file of a whole trace; skips the test where it is not there."""
    path = WHOLE / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the checkout (looked in {WHOLE})")
    return path
