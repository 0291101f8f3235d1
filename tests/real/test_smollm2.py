"""SmolLM2 135M Instruct: full attention in each layer, and a chat template."""

import pytest
from real_contract import Borders, Evictions, Preemptions

pytestmark = [pytest.mark.system("smollm2-135m"), pytest.mark.slow]


class TestSmolLM2(Preemptions):
    name = "smollm2-135m"


@pytest.mark.long
class TestSmolLM2Long(Borders, Evictions):
    name = "smollm2-135m"
