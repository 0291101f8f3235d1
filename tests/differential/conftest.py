"""Fixtures of most differential tests: one tiny model, a cache of it, a prompt."""

from importlib.util import find_spec

import pytest

_NEEDED = [name for name in ("torch", "transformers") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if _NEEDED else []


def pytest_report_header():
    return f"differential tests are left out: they need {', '.join(_NEEDED)}" if _NEEDED else None


@pytest.fixture
def model():
    """A tiny Llama that tests share and do not change."""
    from hf_help import tiny_model

    return tiny_model("llama")


@pytest.fixture
def own_model():
    """One that a test may change."""
    from hf_help import own

    return own("llama")


@pytest.fixture
def cache(model):
    """A cache of whatever `model` is."""
    from hf_help import make_cache

    return make_cache(model, block_size=4)


@pytest.fixture
def ids():
    """A prompt of 41 tokens, `[1, 41]`."""
    from hf_help import prompt

    return prompt(41)


@pytest.fixture
def host():
    """A stack of host memory, in which everything is looked for."""
    from quire.tiers.host import Host
    from quire.tiers.stack import StackSettings, TierStack

    with TierStack([Host("64MiB")], StackSettings(gate=False)) as tiers:
        yield tiers
