"""Gemma 3 270M: a window of 512 tokens in fifteen of its eighteen layers."""

import pytest
from real_contract import Borders, Evictions, Preemptions

pytestmark = [pytest.mark.system("gemma3-270m"), pytest.mark.slow]


class TestGemma3(Evictions):
    name = "gemma3-270m"


@pytest.mark.ci
class TestGemma3AtBorders(Borders):
    name = "gemma3-270m"


@pytest.mark.long
class TestGemma3Long(Preemptions):
    name = "gemma3-270m"
