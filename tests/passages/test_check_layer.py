"""When a moved text counts as repaired: by the nats that are left, and by how probable the next tokens are."""

import pytest
import torch

from quire_passages import NoRows
from quire_passages.hf.check_layer import GateReading

SURE, OTHER = [9.0, 0.0, 0.0], [0.0, 9.0, 0.0]
EVEN, AS_EVEN = [1.0, 0.99, 0.0], [0.99, 1.0, 0.0]


class Told:
    """A text whose logits are given: in a full forward, behind passages that are moved alone, behind repaired ones."""

    def __init__(self, whole, moved, repaired):
        self.whole = torch.tensor(whole)
        self._moved, self._repaired = torch.tensor(moved), torch.tensor(repaired)

    def read(self, selector):
        return self._moved if isinstance(selector, NoRows) else self._repaired


def reading(whole, moved, repaired):
    return GateReading([Told(whole, moved, repaired)])


def is_repaired(whole, moved, repaired):
    return reading(whole, moved, repaired).is_repaired(1)


def test_another_one_of_two_tokens_that_are_as_probable_is_no_loss():
    whole = [SURE, *[EVEN] * 15]
    assert is_repaired(whole, [OTHER, *[EVEN] * 15], [SURE, *[AS_EVEN] * 15])


def test_another_token_than_a_sure_one_is_a_loss():
    whole = [SURE] * 16
    assert not is_repaired(whole, [OTHER] * 16, [OTHER, *[SURE] * 15])


def between(share):
    """Return logits on the way from those of a sure token to even ones."""
    return torch.tensor(SURE).lerp(torch.tensor(EVEN), share).tolist()


@pytest.mark.parametrize(
    ("moved", "left", "answer"),
    [
        (0.9, 0.05, True),
        (0.9, 0.6, False),  # more than 0.01 nats
        (0.4, 0.38, False),  # fewer, and most of what moving alone costs
    ],
)
def test_few_nats_may_be_left_and_few_of_those_that_moving_alone_costs(moved, left, answer):
    assert is_repaired([SURE] * 16, [between(moved)] * 16, [between(left)] * 16) is answer


def test_nothing_asks_where_moving_alone_costs_no_probability():
    assert not reading([EVEN] * 16, [AS_EVEN] * 16, [EVEN] * 16).asks
    assert reading([*[EVEN] * 15, SURE], [*[EVEN] * 15, OTHER], [EVEN] * 16).asks
