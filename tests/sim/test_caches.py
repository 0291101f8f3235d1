"""Caches of servers: rules of each, positive and negative, and requests that overlap."""

import random
import tracemalloc

import numpy as np
import pytest

from quire import ops
from quire.errors import ConfigError
from quire_sim.caches import CacheOptions, CachePrompt, PromptPart, cache_of, hits


def prompt(ids, **more):
    return CachePrompt(1, np.array(list(ids), np.int32), **more)


def found(server, prompts, **options):
    return [each.hit_tokens for each in hits(cache_of(server, CacheOptions(**options)), prompts)]


def reasons(server, prompts, **options):
    return [each.why for each in hits(cache_of(server, CacheOptions(**options)), prompts)]


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("quire", [0, 96, 50]),
        ("vllm", [0, 96, 48]),
        ("sglang", [0, 99, 50]),
        ("llama.cpp", [0, 99, 50]),
    ],
)
def test_caches_find_prefixes_in_their_units(server, expected):
    whole, half = range(100), [*range(50), *range(900, 950)]
    assert found(server, [prompt(whole), prompt(whole), prompt(half)]) == expected


@pytest.mark.parametrize("server", ["quire", "vllm", "sglang"])
def test_models_and_scopes_share_nothing(server):
    same = [prompt(range(64)), prompt(range(64), model="b"), prompt(range(64), scope="ann")]
    assert found(server, same) == [0, 0, 0]


@pytest.mark.parametrize("server", ["quire", "vllm", "sglang"])
def test_caches_evict_what_was_unused_for_longest(server):
    a, b, c = (range(1000 * n, 1000 * n + 160) for n in (1, 2, 3))
    asked = [prompt(each) for each in (a, b, a, c, b, a)]
    first = hits(cache_of(server, CacheOptions(capacity_tokens=24 * 16)), asked)
    told = [(each.hit_tokens > 0, each.why) for each in first]
    assert [is_hit for is_hit, _ in told[:4]] == [False, False, True, False]
    assert "evicted" in [why for _, why in told[4:]]


def test_the_radix_cache_holds_as_many_tokens_as_it_counts():
    rng = np.random.default_rng(1)
    base = rng.integers(0, 4, (6, 200))
    cache = cache_of("sglang", CacheOptions(capacity_tokens=500))
    asked = []
    for n in range(300):
        ids = [
            *base[rng.integers(6)][: rng.integers(20, 200)],
            *rng.integers(0, 4, rng.integers(1, 30)),
        ]
        asked.append(prompt(ids, time_s=n * 1.0, duration_s=float(rng.integers(1, 3))))
    found = list(hits(cache, asked))
    assert len(found) == 300
    assert {"evicted", "rounding"} <= {each.why for each in found}
    nodes = [tree.root for tree in cache.at("").of._trees.values()]
    for node in nodes:
        nodes += node.children.values()
    assert sum(node.size for node in nodes) == cache.at("").of._stored <= 500
    assert not any(node.locks for node in nodes)


def test_requests_without_room_wait_for_the_end_of_others():
    a, b = range(160), range(1000, 1160)
    asked = [prompt(a, time_s=1.0, duration_s=5.0), prompt(b, time_s=2.0, duration_s=6.0)]
    for server in ("quire", "vllm", "sglang"):
        started = list(hits(cache_of(server, CacheOptions(capacity_tokens=192)), asked))
        assert [each.number for each in started] == [0, 1]


def test_a_request_beside_its_twin_misses_in_slots_and_waits_for_the_step_elsewhere():
    twins = [prompt(range(200), time_s=t, duration_s=3.0) for t in (1.0, 2.0)]
    later = [*twins, prompt(range(200), time_s=9.0, duration_s=1.0)]
    assert found("llama.cpp", later) == [0, 0, 199]
    assert reasons("llama.cpp", later) == ["", "other-slot", "rounding"]
    for server, hit in (("sglang", 199), ("vllm", 192), ("quire", 192)):
        assert found(server, later) == [0, hit, hit]


def test_twins_of_one_step_hit_where_blocks_are_found_once_planned_or_the_second_waits():
    other = prompt(range(900, 1000), time_s=0.0, duration_s=5.0)
    twins = [prompt(range(200), time_s=t, duration_s=9.0) for t in (1.0, 2.0)]
    assert found("sglang", [other, *twins]) == [0, 0, 0]
    assert reasons("sglang", [other, *twins]) == ["", "", "at-once"]
    assert found("vllm", [other, *twins]) == [0, 0, 192]
    assert found("quire", [other, *twins]) == [0, 0, 192]


def timed(ids, sent, first, end, **more):
    """A streamed request: its answer begins and ends so many seconds after it was sent."""
    return prompt(ids, time_s=sent, first_s=first, duration_s=end, **more)


def test_quire_starts_short_prompts_first_and_computes_a_prefix_once():
    running = timed(range(5000, 5100), 0.0, 1.0, 1.0)
    long, twin = (timed(range(400), sent, 3.0, 3.0) for sent in (0.1, 0.2))
    short = timed(range(7000, 7050), 0.5, 1.5, 1.5)
    found = list(hits(cache_of("quire"), [running, long, twin, short]))
    assert [each.number for each in found] == [0, 3, 1, 2]
    assert [each.hit_tokens for each in found] == [0, 0, 0, 399]


def test_quire_has_requests_in_the_step_whose_answers_begin_with_theirs():
    a, b, c = (range(1000 * n, 1000 * n + 160) for n in (1, 2, 3))
    early = [prompt(each, time_s=n, duration_s=0.05) for n, each in enumerate((a, b))]
    new = prompt(c, time_s=10.0, duration_s=0.1)
    for answer_s, hit in ((10.1, 159), (10.2, 32)):
        again = prompt(a, time_s=10.01, duration_s=answer_s - 10.01)
        cache = cache_of("quire", CacheOptions(capacity_tokens=22 * 16))
        found = {each.number: each.hit_tokens for each in hits(cache, [*early, new, again])}
        assert found[3] == hit


def test_quire_starts_a_request_behind_those_that_overtake_it():
    """The log tells which answers began first, though not why: there was no room, or it was read later."""
    same = range(640)
    found = list(hits(cache_of("quire"), [timed(same, 0.0, 3.0, 3.0), timed(same, 0.5, 1.0, 1.0)]))
    assert [(each.number, each.hit_tokens) for each in found] == [(1, 0), (0, 639)]
    apart = [timed(same, 0.0, 3.0, 3.0), timed(same, 2.5, 0.1, 0.1)]
    assert [each.number for each in hits(cache_of("quire"), apart)] == [0, 1]


@pytest.mark.parametrize("seed", range(30))
def test_quire_has_one_hit_for_each_request_whatever_its_times_are(seed):
    """Times may be missing, equal, far apart, and say that an answer began behind its own end."""
    rng, now, asked = random.Random(seed), 0.0, []
    step = rng.choice([0.001, 0.01, 0.1, 1.0])
    for _ in range(rng.randint(2, 30)):
        now += rng.choice([0.0, 0.0, step * rng.random()])
        first = rng.choice([0, 0, 1000, 5000])
        whole = rng.choice([None, 0.0, 1e-4, 0.01, 0.2, 1.0, 5.0])
        told = {"time_s": None if rng.random() < 0.05 else now, "duration_s": whole}
        if whole is not None and rng.random() < 0.6:
            told["first_s"] = rng.choice([0.0, whole * rng.random(), whole, whole * 2])
        output = np.arange(rng.choice([0, 1, 1, 2, 12, 40]), dtype=np.int32)
        ids = range(first, first + rng.choice([1, 15, 16, 17, 100, 300]))
        asked.append(prompt([*ids], output=output, **told))
    cache = cache_of("quire", CacheOptions(capacity_tokens=rng.choice([None, 160, 480, 2000])))
    assert sorted(each.number for each in hits(cache, asked)) == [*range(len(asked))]


def test_quire_cuts_prompts_so_that_no_step_takes_long():
    """A request that comes while a long prompt is computed begins beside its end, before that has evicted all it will."""
    made = [range(1000 * n, 1000 * n + 640) for n in range(3)]

    def last(answer_s):
        cache = cache_of("quire", CacheOptions(capacity_tokens=90 * 16))
        asked = [timed(each, 20.0 * n, answer_s, answer_s) for n, each in enumerate(made)]
        again = timed(made[0], 40.0 + answer_s / 2, answer_s, answer_s)
        return [*hits(cache, [*asked, again])][-1]

    assert (last(0.1).hit_tokens, last(2.0).hit_tokens) == (160, 416)


def test_quire_publishes_answers_that_are_decoded_beside_prompts():
    made = np.arange(900, 964, dtype=np.int32)
    long = timed(range(160), 0.0, 0.5, 10.0, output=made)
    others = [timed(range(3000 * n, 3000 * n + 100), n, 0.5, 0.5) for n in range(1, 9)]
    again = prompt([*range(160), *made, 7, 8], time_s=20.0, duration_s=1.0)
    *_, last = hits(cache_of("quire", CacheOptions(capacity_tokens=4096)), [long, *others, again])
    assert (last.number, last.hit_tokens) == (9, 208)


def test_quire_preempts_an_answer_without_room_and_resumes_it():
    made = [np.arange(900 + 500 * n, 1100 + 500 * n, dtype=np.int32) for n in range(2)]
    asked = [timed(range(5000 * n, 5000 * n + 160), 0.0, 0.5, 10.0, output=made[n]) for n in (0, 1)]
    again = [
        prompt([*each.tokens, *each.output, 1], time_s=20.0 + 9 * at, duration_s=1.0)
        for at, each in enumerate(asked)
    ]
    found = list(hits(cache_of("quire", CacheOptions(capacity_tokens=36 * 16)), [*asked, *again]))
    assert [each.number for each in found] == [0, 1, 2, 3]
    assert found[2].hit_tokens + found[3].hit_tokens > 359


def test_quire_refuses_what_no_empty_pool_holds():
    small = CacheOptions(capacity_tokens=160)
    asked = [prompt(range(400)), prompt(range(100)), prompt(range(100))]
    assert [each.hit_tokens for each in hits(cache_of("quire", small), asked)] == [0, 0, 96]


def drawn(seed, count=100):
    """Return prompts of 20 to 6,000 tokens that begin and go on as earlier ones, sent at once or one after the other."""
    rng, told, now = np.random.default_rng(seed), [], 0.0
    for row in range(count):
        ids = rng.integers(0, 9999, rng.integers(10, 3000), np.int32)
        output = rng.integers(0, 9999, rng.integers(1, 400), np.int32)
        if told and rng.random() < 0.7:
            earlier = told[rng.integers(len(told))]
            whole = np.concatenate([earlier.tokens, earlier.output])
            ids = np.concatenate([whole[: rng.integers(10, 3000)], ids])
        now += rng.choice([0.0, 0.01, 3.0])
        sent = {"time_s": now, "first_s": rng.random(), "duration_s": 1 + rng.random()}
        told.append(CachePrompt(row, ids, output=output, **(sent if seed % 2 else {})))
    return told


@pytest.mark.parametrize("seed", range(4))
def test_quire_without_a_capacity_finds_what_a_large_one_does_and_evicts_nothing(seed):
    told, cache = drawn(seed), cache_of("quire")
    found = list(hits(cache, told))
    assert found == list(hits(cache_of("quire", CacheOptions(capacity_tokens=1 << 24)), told))
    assert {each.why for each in found} <= {"", "rounding", "at-once"}
    manager = cache.at("").manager
    assert manager.stats.evicted_blocks == 0
    ops.check(manager)


def test_quire_without_a_capacity_costs_what_it_holds():
    prompts = [prompt(range(n, n + 300)) for n in range(9)]
    found("quire", prompts)
    tracemalloc.start()
    try:
        found("quire", prompts)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2e6


def test_steps_have_a_minimum_and_grow_by_128():
    sizes = [1023, 1023, 1024, 1151, 1152, 1152]
    asked = [prompt(range(size), model="gpt-5") for size in sizes]
    assert found("openai", asked) == [0, 0, 0, 1024, 1024, 1152]
    assert reasons("openai", asked)[1] == "minimum"
    assert reasons("openai", asked)[4] == "rounding"


def test_steps_expire_and_a_hit_refreshes_them():
    asked = [prompt(range(2000), model="gpt-5", time_s=t) for t in (0.0, 500.0, 1000.0, 1601.0)]
    assert found("openai", asked) == [0, 1920, 1920, 0]
    assert reasons("openai", asked)[3] == "ttl"
    kept = [prompt(range(2000), model="gpt-5", time_s=t, retention_s=86400) for t in (0.0, 50000.0)]
    assert found("openai", kept) == [0, 1920]


def marked(size, *ends, model="claude-sonnet-4-5", ttl=300, **more):
    """A prompt in parts of 100 tokens, with breakpoints behind some."""
    parts = tuple(
        PromptPart(n, "messages", ttl if n in ends else 0) for n in range(100, size + 1, 100)
    )
    return prompt(range(size), model=model, parts=parts, **more)


def test_breakpoints_are_needed_and_found_again():
    assert found("anthropic", [marked(3000), marked(3000)]) == [0, 0]
    assert reasons("anthropic", [marked(3000), marked(3000)])[1] == "no-breakpoint"
    assert found("anthropic", [marked(3000, 2000), marked(3000, 2000)]) == [0, 2000]
    (first, second) = hits(cache_of("anthropic"), [marked(3000, 2000), marked(3000, 2000, 3000)])
    assert first.written == {300: 2000}
    assert second.written == {300: 1000}


def test_prompts_cost_what_reading_and_writing_cost():
    first, second = hits(cache_of("anthropic"), [marked(3000, 2000), marked(3000, 2000)])
    assert (first.cost, second.cost) == (1000 + 1.25 * 2000, 1000 + 0.1 * 2000)
    (hour,) = hits(cache_of("anthropic"), [marked(3000, 2000, ttl=3600)])
    assert hour.cost == 1000 + 2 * 2000
    whole = [prompt(range(2048), model="gpt-5")] * 2
    assert [each.cost for each in hits(cache_of("openai"), whole)] == [2048, pytest.approx(204.8)]
    assert [each.cost for each in hits(cache_of("vllm"), whole)] == [2048, 16]


def test_breakpoints_below_the_minimum_write_nothing():
    assert found("anthropic", [marked(2000, 1000), marked(2000, 1000)]) == [0, 0]
    assert found("anthropic", [marked(2000, 1100), marked(2000, 1100)]) == [0, 1100]
    opus = [marked(2000, 1000, model="claude-opus-5")] * 2
    assert found("anthropic", opus) == [0, 1000]
    assert found("anthropic", [marked(3000, 3000, model="claude-haiku-4-5")] * 2) == [0, 0]


def test_look_back_ends_after_20_parts():
    asked = [marked(3000, 3000), marked(4900, 4900)]
    assert found("anthropic", asked) == [0, 3000]
    asked = [marked(3000, 3000), marked(5000, 5000)]
    assert found("anthropic", asked) == [0, 0]
    assert reasons("anthropic", asked)[1] == "look-back"
    assert found("openai", [marked(3000, model="gpt-5.6"), marked(5000, model="gpt-5.6")]) == [
        0,
        3000,
    ]


def test_a_breakpoint_behind_what_changes_finds_nothing():
    ids = [*range(1500), 7, *range(2001, 2500)]
    parts = (PromptPart(1500), PromptPart(2000, breakpoint_s=300))
    changed = prompt(ids, model="claude-sonnet-4-5", parts=parts)
    before = prompt(range(2000), model="claude-sonnet-4-5", parts=parts)
    assert found("anthropic", [before, changed]) == [0, 0]
    assert reasons("anthropic", [before, changed])[1] == "behind-breakpoint"


def test_entries_expire_after_their_ttl():
    for ttl, times, expected in (
        (300, (0, 299, 598, 899), [0, 2000, 2000, 0]),
        (3600, (0, 3599, 7300), [0, 2000, 0]),
    ):
        asked = [marked(3000, 2000, ttl=ttl, time_s=float(t)) for t in times]
        assert found("anthropic", asked) == expected
        assert reasons("anthropic", asked)[-1] == "ttl"


def test_entries_are_found_once_the_first_answer_begins():
    times = [(0.0, 2.0), (1.0, 2.0), (2.5, 1.0)]
    asked = [marked(3000, 2000, time_s=t, first_s=f, duration_s=f) for t, f in times]
    assert found("anthropic", asked) == [0, 0, 2000]
    assert reasons("anthropic", asked)[1] == "at-once"


def test_a_changed_tool_choice_keeps_tools_and_system_alone():
    parts = (PromptPart(1500, "system", 300), PromptPart(2500, "messages", 300))
    auto, none = (
        prompt(range(2500), model="claude-sonnet-4-5", parts=parts, parameters={"tool_choice": t})
        for t in ('"auto"', '"none"')
    )
    assert found("anthropic", [auto, auto, none]) == [0, 2500, 1500]
    assert reasons("anthropic", [auto, none])[1] == "parameters"


def test_implicit_breakpoints_of_openai_match_whole_prefixes():
    turn, next_turn, other = (
        marked(2000, model="gpt-5.6"),
        marked(2500, model="gpt-5.6"),
        range(1500),
    )
    half = prompt([*other, *range(9000, 9500)], model="gpt-5.6")
    assert found("openai", [turn, next_turn, half]) == [0, 2000, 0]


def test_slots_save_a_conversation_and_take_it_back():
    a, b = range(400), range(1000, 1400)
    longer = range(500)
    assert found("llama.cpp", [prompt(a), prompt(b), prompt(longer)]) == [0, 0, 400]
    assert found("llama.cpp", [prompt(a), prompt(b), prompt(longer)], num_slots=1) == [0, 0, 400]
    asked = [prompt(a), prompt(b), prompt(longer)]
    assert found("llama.cpp", asked, num_slots=1, capacity_tokens=100) == [0, 0, 0]


def test_answers_are_found_but_for_their_last_token():
    answer = np.arange(5000, 5020, dtype=np.int32)
    first = prompt(range(100), output=answer)
    follow = prompt([*range(100), *range(5000, 5020), *range(200, 240)])
    assert found("sglang", [first, follow]) == [0, 119]
    assert found("llama.cpp", [first, follow]) == [0, 119]
    assert found("vllm", [first, follow]) == [0, 112]
    assert found("quire", [first, follow])[1] in {112, 119}


@pytest.mark.parametrize(
    ("server", "options", "words"),
    [
        ("vlm", {}, "did you mean vllm"),
        ("openai", {"capacity_tokens": 4096}, "no option of the cache of openai"),
        ("vllm", {"capacity_tokens": 8}, "less than two blocks"),
        ("vllm", {"block_size": 0}, "block_size"),
        ("anthropic", {"rules": "/nowhere"}, "cannot be read"),
    ],
)
def test_wrong_options_are_named(server, options, words):
    with pytest.raises(ConfigError, match=words):
        cache_of(server, CacheOptions(**options))


def test_rules_can_be_edited(tmp_path):
    from quire_sim.caches.rules import read_rules

    file = tmp_path / "rules.toml"
    text = (
        '[openai]\nsource = "here"\ndate = "2026-11-30"\n[[openai.models]]\nnames = ["*"]\nkind = "steps"\n'
        "minimum = 64\nstep = 16\nttl_s = 60\nread = 0.5\nwrite = { 60 = 1.0 }\n"
    )
    file.write_text(text)
    asked = [prompt(range(100), model="any")] * 2
    assert found("openai", asked, rules=str(file)) == [0, 96]
    assert read_rules(file)["openai"].date == "2026-11-30"
    with pytest.raises(ConfigError, match=r"no section \[anthropic\]"):
        cache_of("anthropic", CacheOptions(rules=str(file)))
    file.write_text(text.replace("minimum = 64", "minimun = 64"))
    with pytest.raises(ConfigError, match="minimun"):
        cache_of("openai", CacheOptions(rules=str(file)))
