"""Calls that are refused: what a driver may ask beside what it should."""

import numpy as np

DIGEST = b"first".ljust(32)


def bad_on_any(driver):
    """Return calls of one sequence, in any state, that most states refuse."""
    name = driver.random.choice([*driver.live, *driver.dead])
    computed = driver.old.seqs[name].computed if name in driver.live else 0
    calls = [("reserve", name, value) for value in (0, -1, True, 1.5, None, 10**6, 2**40)]
    calls += [("commit", name, value) for value in ([-1], [0.5], [[0]], "a", [2**31], [9] * 200)]
    calls += [("commit", name, np.array([-5], np.int32)), ("commit", name, [77])]
    calls += [("truncate", name, value) for value in (-1, computed + 5, 0.5, None)]
    calls += [("draft", name, value) for value in ([], 0, [0], [-2], [-1, 5], "ab", -3, [-1] * 500)]
    calls += [("accept", name, "a", [1]), ("accept", name, [0, 0], [1, 1])]
    calls += [("accept", name, [0], [1]), ("accept", name, [5], [1]), ("accept", name, [0], [])]
    calls += [("fits_sequence", name, value) for value in (0, -1, "a")]
    calls += [("draft", name, 3), ("draft", name, [-1, 0, -1])]
    calls += [(call, name) for call in ("stops", "checkpoint", "blocks_of")]
    if name in driver.dead:
        calls += [(call, name) for call in ("close", "suspend", "resume")]
        calls += [("fork", name, 0), ("batch", 0, [name]), ("hold", 0, name)]
    elif driver.old.seqs[name].state == "open":
        calls += [("resume", name), ("batch", 0, [name, name])]
    else:
        calls += [("suspend", name), ("fork", name, 0), ("tables", [name], 0, None)]
    return calls


def bad_anywhere(driver):
    """Return calls with arguments that cannot be."""
    bad_prompts = ([], [-1], [[1, 2]], [0.5], ["a"], [2**31], None, np.array([3, -4], np.int64))
    prompt = driver.random.choice(bad_prompts)
    good = [0] * (driver.size + 1)
    bad_media = driver.random.choice(
        ([(DIGEST, 0, 0)], [(DIGEST, 0, 99999)], [(DIGEST, 1, 1), (DIGEST, 0, 1)], [3],
         [(b"short", 0, 1)], [(DIGEST, -1, 1)])
    )  # fmt: skip
    options = driver.random.choice(
        ({"priority": 101}, {"priority": 0.5}, {"retain_s": -1}, {"retain_s": "a"}, {"hint": 5},
         {"retain_s": 2e9}, {"hint": {"reuse": "often"}}, {"hint": {"reuse": "session"}},
         {"hint": {"ttl_s": -1.0}}, {"hint": {"session_id": ""}})
    )  # fmt: skip
    calls = [
        ("open", 0, prompt, None, (), {}),
        ("open", 0, good, "tenant", (), {}),
        ("open", 0, good, None, bad_media, {}),
        ("open", 0, good, None, (), options),
        ("open", 0, [1] * (driver.recipe["max_tokens"] * 3 + 1), None, (), {}),
        ("probe", prompt, None, ()),
        ("probe", good, 5, ()),
        ("explain", prompt, None, bad_media),
        ("fits", prompt, None, None, ()),
        ("fits", good, 0, None, ()),
        ("pin", 0, prompt, None, (), None),
        ("pin", 0, good, None, (), driver.random.choice((0, -1, "a", 5))),
        ("evict", prompt, None, ()),
        ("evict", good, {"salt": 1.5}, ()),
        ("reclaim", driver.random.choice((0, -1, "a")), None),
        ("reclaim", 1, driver.random.choice((-1, 9, "a"))),
        ("usage", 99),
        ("compact", driver.random.choice((-1, 99, None))),
        ("resize", driver.random.choice(({"nobody": 3}, 5, {driver.recipe["groups"][0][0]: 0}))),
        ("resize", {driver.recipe["groups"][0][0]: 1}),
        ("end_session", driver.random.choice(("", 5, None)), None),
        ("end_session", "one", "tenant"),
        ("tables", [], 99, None),
        ("tables", [], 0, driver.random.choice((2**31, 0.5))),
        ("residency", prompt, None, ()),
        ("restore", 0, (good, None, ()), driver.random.choice((0, -1, 99)), {}),
        ("restore", 0, (good, None, ()), 1, driver.random.choice(({}, {9: [0]}, {0: [5]}, {0: [0, 0]}))),
        ("batch", 0, []),
        ("reserve_list", []),
        ("commit_list", [], [1]),
    ]  # fmt: skip
    if driver.batches:
        name = driver.random.choice([*driver.batches])
        calls += [("commit_step", name, [1] * 99), ("commit_step", name, [-1])]
    calls += [(call, driver.random.choice(names)) for call, names in driver.left.items() if names]
    return calls
