"""Made-up traffic: the same for a seed, as documented on average, chained and in order."""

import hashlib
import json
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from quire.cli.app import app
from quire.errors import ConfigError
from quire_sim.curves import curves
from quire_sim.distributions import Lognormal, Zipf, draw_count, draw_gap, generator
from quire_sim.trace import open_trace, save_trace
from quire_sim.workload import KINDS, MIX, Chat, Rag, Traffic, Workload, numbers_of, parts_named

NAMES = [*KINDS, "mix"]


def made(name, num_requests=2000, seed=1, **changes):
    return Workload(parts_named(name, changes), num_requests, seed)


def rows(trace):
    return [(r.time_s, r.prompt_tokens, r.output_tokens, r.runs.tolist(), r.session) for r in trace]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_bytes_and_another_seed_others(name, tmp_path):
    files = [tmp_path / f"{place}.jsonl" for place in range(3)]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        save_trace(made(name, 200, seed), file)
    first, again, other = (file.read_bytes() for file in files)
    assert first == again
    assert first != other


def test_the_bytes_of_a_seed_are_the_same_on_every_machine(tmp_path):
    save_trace(made("mix", 1000, 7), tmp_path / "t")
    assert hashlib.sha256((tmp_path / "t").read_bytes()).hexdigest() == (
        "bdff8ce70714529d03f10115c9e731e985a92aee46edd05854725b77ba5fc2d6"
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_workload_keeps_what_a_trace_promises(name):
    found = list(made(name, 1000))
    assert len(found) == 1000
    assert [request.row for request in found] == list(range(1, 1001))
    assert all(a.time_s <= b.time_s for a, b in pairwise(found))
    before, seen = {}, 0
    for request in found:
        blocks = request.blocks.tolist()
        assert len(blocks) == request.prompt_tokens // 16
        for previous, block in pairwise([None, *blocks]):
            assert before.setdefault(block, previous) == previous
            assert block <= seen
            seen = max(seen, block + 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_workload_reads_back_unchanged(name, tmp_path):
    trace = made(name, 300)
    save_trace(trace, tmp_path / "t.jsonl.gz")
    assert rows(open_trace(tmp_path / "t.jsonl.gz")) == rows(trace)


def test_iterations_are_the_same_even_when_one_broke_off():
    trace = made("mix", 300)
    next(iter(trace))
    assert rows(trace) == rows(trace)


def test_a_longer_workload_begins_as_a_shorter_one():
    assert rows(made("mix", 500))[:300] == rows(made("mix", 300))


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
def test_lognormal_lengths_have_their_mean_and_spread(sigma):
    rng = generator(3)
    drawn = np.array([Lognormal(1000.0, sigma).draw(rng) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(1000, rel=0.04)
    assert np.log(drawn).std() == pytest.approx(sigma, rel=0.02, abs=1e-9)


def test_counts_are_geometric_gaps_exponential_and_ranks_zipf():
    rng = generator(3)
    counts = [draw_count(rng, 4.0) for _ in range(20_000)]
    assert min(counts) == 1
    assert mean(counts) == pytest.approx(4, rel=0.03)
    assert counts.count(1) / len(counts) == pytest.approx(1 / 4, rel=0.05)
    assert draw_count(rng, 1.0) == 1
    gaps = np.array([draw_gap(rng, 2.0) for _ in range(20_000)])
    assert gaps.mean() == pytest.approx(0.5, rel=0.03)
    assert gaps.std() == pytest.approx(0.5, rel=0.03)
    ranks = [Zipf(10, 1.0).draw(rng) for _ in range(20_000)]
    harmonic = sum(1 / rank for rank in range(1, 11))
    for rank in (0, 1, 9):
        assert ranks.count(rank) / len(ranks) == pytest.approx(1 / (rank + 1) / harmonic, rel=0.1)


def test_a_chat_has_the_stated_turns_lengths_and_pauses():
    trace = Workload({"chat": Traffic(Chat())}, 20_000, 5)
    sessions: dict[str, list] = {}
    for request in trace:
        sessions.setdefault(request.session, []).append(request)
    early = list(sessions.values())[: len(sessions) * 9 // 10]  # the others are cut off
    assert mean(len(turns) for turns in early) == pytest.approx(4.0, rel=0.05)
    assert mean(r.output_tokens for turns in early for r in turns) == pytest.approx(300, rel=0.03)
    pairs = [pair for turns in early for pair in pairwise(turns)]
    asked = mean(b.prompt_tokens - a.prompt_tokens - a.output_tokens for a, b in pairs)
    assert asked == pytest.approx(120, rel=0.04)
    waited = mean(b.time_s - a.time_s - a.output_tokens / 50 for a, b in pairs)
    assert waited == pytest.approx(40, rel=0.04)
    for a, b in pairs[:500]:
        assert a.blocks.tolist() == b.blocks[: a.num_blocks].tolist()


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_requests_come_at_the_stated_rate(name):
    trace = Workload(parts_named(name), 12_000, 2, requests_per_s=5.0)
    times = [request.time_s for request in trace]
    late = times[len(times) // 2 :]
    assert len(late) / (late[-1] - late[0]) == pytest.approx(5.0, rel=0.1)


def test_a_mix_has_the_stated_shares_of_requests():
    late = list(made("mix", 12_000))[4000:]
    for kind, share in MIX.items():
        num = sum(request.session.startswith(f"{kind}-") for request in late)
        assert num / len(late) == pytest.approx(share, rel=0.2)


@pytest.mark.ci
def test_the_ceilings_of_workload_kinds_differ():
    ceiling = {name: curves(made(name)).ceiling for name in NAMES}
    assert ceiling["scan"] == 0
    assert ceiling["agent"] > 0.9
    assert ceiling["few-shot"] > 0.85
    assert 0.7 < ceiling["chat"] < 0.9
    assert 0.15 < ceiling["rag"] < 0.5
    assert ceiling["rag"] < ceiling["mix"] < ceiling["agent"]


@pytest.mark.ci
def test_popular_documents_are_shared_more_and_few_more_than_many():
    def ceiling(**settings):
        return curves(Workload({"rag": Traffic(Rag(**settings))}, 2000, 1)).ceiling

    assert ceiling(skew=1.5) > ceiling(skew=1.0) > ceiling(skew=0.5)
    assert ceiling(documents=50) > ceiling(documents=2000)


def test_numbers_are_changed_by_name():
    (part,) = parts_named("chat", {"turns": 9, "question.mean": 50, "systems": 3}).values()
    assert part.kind == Chat(turns=9.0, question=Lognormal(50.0, 1.0), systems=3)
    assert parts_named("mix", {"chat.turns": 9})["chat"].kind == Chat(turns=9.0)
    assert numbers_of(Chat())["question.mean"] == 120.0


BAD = {
    "another kind": (
        lambda: parts_named("chats"),
        "did you mean chat.*there are chat, agent, rag, few-shot, scan, mix",
    ),
    "another number": (lambda: parts_named("chat", {"x": 1}), "no number 'x'; it has turns, "),
    "in a mix": (lambda: parts_named("mix", {"turns": 1}), "it has chat.turns"),
    "half a text": (lambda: parts_named("chat", {"systems": 2.5}), "systems=2.5: a whole number"),
    "no texts": (lambda: parts_named("chat", {"systems": 0}), "systems is from 1 to"),
    "no turns": (lambda: parts_named("chat", {"turns": 0}), "turns is a number above 0"),
    "no number": (lambda: parts_named("chat", {"turns": float("nan")}), "turns is a number above"),
    "a long text": (lambda: parts_named("scan", {"text.mean": 1e9}), "a mean of up to"),
    "a wide spread": (lambda: parts_named("scan", {"text.sigma": 9}), "between 0 and 4, got 9"),
    "documents": (lambda: parts_named("rag", {"found": 101}), "at most 100 documents"),
    "requests": (lambda: made("chat", 0), "num_requests"),
    "a rate": (lambda: Workload(parts_named("chat"), 1, requests_per_s=0), "requests_per_s"),
    "a share": (
        lambda: Workload({"chat": Traffic(Chat(), -1)}, 1),
        "the share of chat is a number",
    ),
    "nothing": (lambda: Workload({}, 1), "at least one part"),
    "a seed": (lambda: made("chat", 1, 0.5), "a seed is a whole number from 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_workload_of_impossible_settings_is_refused(case):
    make, why = BAD[case]
    with pytest.raises(ConfigError, match=why):
        make()


def test_trace_make_writes_a_file_and_says_what_is_in_it(tmp_path):
    run = CliRunner().invoke
    target = tmp_path / "made.jsonl.gz"
    words = ["trace", "make", "mix", str(target), "--num-requests", "100", "--seed", "3"]
    shown = json.loads(run(app, [*words, "--set", "chat.turns=8", "--json"]).stdout)
    assert (shown["requests"], shown["seed"], shown["block_size"]) == (100, 3, 16)
    assert shown["parts"]["chat"]["turns"] == 8
    assert shown["bytes"] == target.stat().st_size
    changed = Workload(parts_named("mix", {"chat.turns": 8}), 100, 3)
    assert rows(open_trace(target)) == rows(changed)
    assert "100 requests of chat + agent" in run(app, words).stdout
    refused = run(app, [*words, "--set", "turns"])
    assert refused.exit_code == 2
    assert "NAME=NUMBER" in refused.output
