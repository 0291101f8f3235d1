import numpy as np
import pytest
import torch

from quire.errors import TokensError
from quire_passages import Segments


def test_a_prompt_is_its_parts_one_behind_the_other():
    segments = Segments.of([[1, 2], np.array([3]), torch.tensor([4, 5]), [6]])
    assert segments.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert segments.tokens.dtype == np.int32
    assert segments.spans == ((2, 3), (3, 5))
    assert segments.num_tokens == segments.tokens.size == 6
    assert segments.text == segments.tokens.tobytes()


def test_a_head_may_be_empty_and_there_may_be_no_passages():
    segments = Segments.of([[], [7]])
    assert segments.tokens.tolist() == [7]
    assert segments.num_tokens == 1
    assert segments.spans == ()


def test_ids_in_a_row_of_their_own_are_taken():
    assert Segments.of([[], torch.tensor([[1, 2]]), [3]]).spans == ((0, 2),)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([[1]], "1 parts"),
        ([], "0 parts"),
        ([[1], [], [2]], "passage 1 of 3 segments is empty"),
        ([[1], [2], []], "the question of 3 segments is empty"),
        ([[1], "text", [2]], "passage 1 is text"),
        ([[1], [2.5], [2]], "passage 1 is a list that is no one-dimensional"),
        ([[1], [[1], [2]], [2]], "passage 1 is a list"),
        ([[1], [[1, 2], [2]], [2]], "passage 1 is a list"),
        ([[-1], [1], [2]], "the head has token id -1"),
        ([[1], [1], [2**31]], "the question has token id 2147483648"),
        ([[1], None, [2]], "passage 1 is a NoneType"),
    ],
)
def test_what_is_no_prompt_is_refused_by_part(parts, words):
    with pytest.raises(TokensError, match=words):
        Segments.of(parts)
