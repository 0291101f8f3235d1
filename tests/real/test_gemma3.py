"""Gemma 3 270M: a window of 512 tokens in fifteen of its eighteen layers."""

import pytest
from real_contract import RealContract

pytestmark = [pytest.mark.system("gemma3-270m"), pytest.mark.slow]


class TestGemma3(RealContract):
    name = "gemma3-270m"
