"""The shipped contract shows values where one of its assertions fails."""

import pytest

pytest.register_assert_rewrite("quire.tiers.contract.every", "quire.tiers.contract.bounded")
