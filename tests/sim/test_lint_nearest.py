"""Earlier prompts: the longest common begin of all of them, in bounded memory."""

import random

import pytest
from log_help import chat

from quire_sim.lint.nearest import PromptTrie
from quire_sim.lint.texts import equal_behind
from quire_sim.logs import LoggedRequest, sections_of


def request(row, *said, **more):
    body = chat(*said, **more)
    return LoggedRequest(row, "chat", sections_of(body, "chat"), body, model="m")


def common(old, new):
    """Return the characters that two prompts begin with in common, one by one."""
    size = 0
    for one, other in zip(old, new, strict=False):
        if (one.role, one.text) != (other.role, other.text):
            if one.role == other.role:
                pairs = zip(one.text, other.text, strict=False)
                size += [*(a == b for a, b in pairs), False].index(False)
            break
        size += max(len(one.text), 1)
    return size


@pytest.mark.parametrize("seed", range(8))
def test_hit_is_the_longest_common_begin_of_all_earlier_prompts(seed):
    rng = random.Random(seed)
    trie, earlier = PromptTrie(), []
    for row in range(120):
        said = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
        asked = request(row, *said, system="s" * rng.randint(1, 3))
        expected = max((common(each, asked.sections) for each in earlier), default=0)
        assert trie.add(asked).hit == expected
        earlier.append(asked.sections)


def test_old_prompts_are_forgotten_beyond_a_limit_and_shared_sections_stay():
    trie = PromptTrie(max_bytes=200_000)
    system, rng = "You are a careful assistant. " * 40, random.Random(1)
    for row in range(2000):
        found = trie.add(request(row, f"{rng.getrandbits(400):x}" * 3, system=system))
        assert found.hit >= len(system) * (row > 0)
        assert trie._bytes < 250_000
    assert len(trie._sections) < 500


def test_what_is_forgotten_is_new_again():
    trie = PromptTrie(max_bytes=60_000)
    first = request(1, "one question of many words", system="system " * 30)
    trie.add(first)
    assert trie.add(first).hit > 200
    for row in range(300):
        trie.add(request(row + 3, f"{row} " * 60, system=f"{row} other " * 30))
    assert trie.add(first).hit < 10


@pytest.mark.parametrize(
    ("follows", "is_lost"), [("", True), ("Another question altogether.", False)]
)
def test_an_answer_is_lost_however_short_if_the_same_message_follows(follows, is_lost):
    trie, asked = PromptTrie(), "Until when is the shop open on a holiday in the old town?"
    trie.add(request(1, asked, "<think>Look it up.</think>Until nine.", asked + " And on Sunday?"))
    found = trie.add(request(2, asked, "Until nine.", follows or asked + " And on Sunday?"))
    whole = len("Until nine." + asked + " And on Sunday?")
    assert (found.lost == whole) == is_lost


LINES = (
    "Where the shelf of a parcel is, the clerk tells whoever has a ticket with the number of that parcel on it.",
    "A letter goes out on the next day but one.",
)


@pytest.mark.parametrize(
    ("old", "new", "equal"),
    [
        ("now=17:05.", "now=18:06.", len("now=1") + len(".")),
        ("<trace id='4f'/>", "<trace id='9c'/>", len("<trace id='") + len("'/>")),
        ("At seven.", "By noon today.", len(".")),
    ],
)
def test_of_a_line_that_changes_between_equal_ones_begin_and_end_are_equal(old, new, equal):
    first, then = LINES
    texts = [f"Turn {n}.\n{first}\n{line}\n{then}" for n, line in enumerate((old, new))]
    whole = len(f".\n{first}\n") + equal + len(f"\n{then}")
    assert equal_behind(*texts, len("Turn ")) == whole
