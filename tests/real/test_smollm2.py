"""SmolLM2 135M Instruct."""

import pytest
from real_contract import RealContract

pytestmark = [pytest.mark.system("smollm2-135m"), pytest.mark.slow]


class TestSmolLM2(RealContract):
    name = "smollm2-135m"
