"""The index of sent prompts beside a list of them, and the keys of their pieces."""

import random
import tracemalloc

import msgspec
import pytest

from quire.errors import ConfigError, InvariantError
from quire_router.prefixes import Asker, Question, keys_of
from quire_router.sent_index import PIECE, SentIndex, keys_of_pieces


def keys(text, scope="a"):
    return keys_of_pieces(scope, text)


def held(index, text):
    return {name: counts[0] // PIECE for name, counts in index.found(keys(text)).items()}


def test_a_server_holds_the_beginnings_of_what_it_was_sent():
    index = SentIndex(64)
    index.add("a", keys("abcdef"))
    index.add("a", keys("abxy"))
    index.add("b", keys("abc"))
    assert held(index, "abcdefg") == {"a": 6, "b": 3}
    assert held(index, "abxyz") == {"a": 4, "b": 2}
    assert held(index, "xab") == held(index, "") == {}
    assert index.found(keys("abc", "other")) == {}
    index.forget("a")
    index.forget("never heard of")
    assert held(index, "abxyz") == {"b": 2}
    assert index.num_blocks == 3
    index.check()


@pytest.mark.parametrize("capacity", [1, 7, 40, 1000])
def test_drawn_prompts_are_found_as_in_a_list_while_there_is_room(capacity):
    rng, index, sent = random.Random(capacity), SentIndex(capacity), []
    for _ in range(400):
        text = "".join(rng.choices("ab", k=rng.randrange(9)))
        name = rng.choice("xyz")
        index.add(name, keys(text))
        index.check()
        sent.append((name, text))
        asked = "".join(rng.choices("ab", k=rng.randrange(9)))
        for server in "xyz":
            shared = [
                next((at for at in range(len(asked)) if asked[at : at + 1] != text[at : at + 1]), len(asked))
                for name, text in sent
                if name == server
            ]  # fmt: skip
            most = max(shared, default=0)
            found = held(index, asked).get(server, 0)
            assert found == most if capacity == 1000 else found <= most


def test_the_pieces_used_longest_ago_go_first_and_ends_before_beginnings():
    index = SentIndex(8)
    index.add("a", keys("abcd"))
    index.add("a", keys("xyz"))
    index.add("a", keys("abcd"))
    index.add("b", keys("uvw"))
    assert (held(index, "abcd"), held(index, "uvw")) == ({"a": 4}, {"b": 3})
    assert held(index, "xyz") == {"a": 1}
    index.add("b", keys("0123456789"))
    assert index.num_blocks == 8
    index.check()


def test_a_wrong_capacity_is_refused_and_a_broken_index_noticed():
    with pytest.raises(ConfigError, match="capacity"):
        SentIndex(0)
    index = SentIndex(4)
    index.add("a", keys("ab"))
    index._held["a"].clear()
    with pytest.raises(InvariantError, match="0 pieces are held, 2 counted"):
        index.check()


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"prompt": "x" * (3 * PIECE + 5)}, 3),
        ({"prompt": ["x" * PIECE, "y" * 5 * PIECE]}, 6),
        ({"prompt": [10] * PIECE}, 3),
        ({"prompt": [{}] * PIECE}, 3),
        ({"messages": "x" * PIECE}, 1),
        ({"input": "x" * PIECE, "instructions": "y" * PIECE}, 2),
        ({}, 0),
    ],
)
def test_whole_pieces_of_a_prompt_have_keys(body, count):
    asked = question(body)
    assert len(keys_of(asked, Asker("k"))) == count
    assert not {*keys_of(asked, Asker("k"))} & {*keys_of(asked, Asker("other"))}


@pytest.mark.parametrize("prompt", ["x" * 2 * PIECE, [7] * 2 * PIECE])
def test_the_first_of_several_prompts_has_the_keys_that_it_has_alone(prompt):
    alone, several = (
        keys_of(question({"prompt": each}), Asker("k")) for each in (prompt, [prompt, prompt])
    )
    assert len(alone) >= 2
    assert several[:2] == alone[:2]


def question(body):
    return msgspec.json.decode(msgspec.json.encode(body), type=Question)


@pytest.mark.parametrize(
    ("prompt", "first"),
    [
        ("text", "text"),
        ([1, 2], [1, 2]),
        (["a", "b"], "a"),
        ([[1, 2], [3]], [1, 2]),
        ([], []),
        ([{}], None),
        ([[[1]]], None),
        ({"a": 1}, None),
        (None, None),
    ],
)
def test_the_first_of_several_prompts_is_read(prompt, first):
    assert question({"prompt": prompt}).first_prompt == first
    assert question({"prompt": prompt}).has_prompt == (prompt is not None)


def test_fields_of_any_size_take_no_more_memory_than_their_bytes():
    body = b'{"model": [%b[]], "prompt": [%b[]], "metadata": [%b[]]}' % ((b"[]," * 100_000,) * 3)
    tracemalloc.start()
    try:
        asked = msgspec.json.decode(body, type=Question)
        assert (asked.model_name, asked.session) == (None, None)
        keys_of(asked, Asker("k"))
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()
