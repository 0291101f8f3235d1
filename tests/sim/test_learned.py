"""The policy `learned`: what it learns, what it forgets, and what keeps it from harm."""

from random import Random

import numpy as np
import pytest
from hypothesis import strategies as st
from learned_help import TOKENS_PER_BLOCK, LearnedCache
from replay_help import ListTrace, random_chains, trace_of

from quire import ops
from quire.foresight import Learned
from quire.foresight.learned import MAX_DEPTH
from quire.foresight.learned_state import MAX_GHOSTS, TRIAL, TRUST, LearnedState
from quire.foresight.lru_shadow import MIN_SLOTS
from quire.foresight.reentry import NUM_CLASSES, Reentry
from quire_sim.replay import replay
from quire_sim.workload import Workload, parts_named
from turns import drawn


class AlwaysLru(LearnedState):
    """Orders as LRU does, whatever is learned; writes down what the shadow says."""

    def __init__(self):
        super().__init__()
        self.is_lru = True
        self.judged = []

    def judge(self, found, lru_found, asked, capacity):
        self.judged.append((found, lru_found))


class Inverted(Reentry):
    """Ranks turned upside down."""

    def ranked(self):
        return [[-rank for rank in ranks] for ranks in super().ranked()]


def chats_and_documents(num_requests, seed=0, num_chats=12, document=10):
    """Chats go on by two blocks, six times each; every other request is a document of its own.

    Blocks are those of `trace_of`; a row every two seconds.
    """
    random = Random(seed)
    chats = [[] for _ in range(num_chats)]
    chains = []
    for number in range(num_requests):
        if random.random() < 0.5:
            chains.append([("document", number, i) for i in range(document)])
            continue
        at = random.randrange(num_chats)
        if len(chats[at]) >= 14:
            chats[at] = []
        chats[at] = chats[at] + [(number, 0), (number, 1)]
        chains.append(chats[at])
    times = [2.0 * number for number in range(num_requests)]
    return trace_of(chains, time_s=times, block_size=TOKENS_PER_BLOCK)


# -- the order ---------------------------------------------------------------------------------


def test_a_cold_start_evicts_what_lru_evicts():
    random = Random(1)
    caches = LearnedCache(40), LearnedCache(40, "lru")
    prompts = []
    for number in range(60):
        prompts.append([1000 * number + i for i in range(random.randint(2, 12))])
        for cache in caches:
            cache.serve(prompts[-1])
        learned, lru = ([cache.found(prompt) for prompt in prompts] for cache in caches)
        assert learned == lru


def test_learned_evicts_kinds_that_never_return_first():
    trace = chats_and_documents(400)
    cache = LearnedCache(80)
    for request in trace:
        cache.now = request.time_s
        cache.serve(request.blocks.tolist())
    chat, document = cache.names(2), cache.names(10)
    cache.serve(chat)
    cache.now += 2
    cache.serve(document)
    while cache.found(document) == 10:
        cache.now += 1
        cache.serve(cache.names(3))
    assert cache.found(chat) == 2


def test_learned_hits_more_than_lru_on_mixed_kinds_of_requests():
    trace = chats_and_documents(1200)
    learned, lru = (100 * replay(trace, 100, policy).token_hit for policy in ("learned", "lru"))
    assert learned > lru + 5


def test_blocks_behind_the_point_where_a_later_turn_left_are_evicted_first():
    cache = LearnedCache(24)
    old, turn = cache.names(8), cache.names(8)
    cache.serve(old)
    cache.serve(turn)
    cache.serve(turn[:6] + cache.names(4))
    cache.serve(cache.names(6))
    assert (cache.found(turn), cache.found(old)) == (6, 8)


def test_a_superseded_run_that_learned_did_not_see_can_be_evicted():
    cache = LearnedCache(24)
    left, often = cache.names(8), cache.names(1)
    cache.serve(left).superseded = True  # as by a request that overlapped
    for _ in range(100):
        cache.serve(often)
    cache.serve(cache.names(24))
    assert cache.found(left) == 0


def test_a_branch_from_the_middle_of_a_turn_does_not_supersede_it():
    cache = LearnedCache(24)
    old, turn = cache.names(8), cache.names(8)
    cache.serve(old)
    assert not cache.serve(turn).superseded
    cache.serve(turn[:3] + cache.names(3))
    cache.serve(cache.names(6))
    assert cache.found(turn) == 8
    assert cache.found(old) < 8


# -- what is known after eviction ----------------------------------------------------------------


def test_turns_are_known_again_after_eviction():
    cache = LearnedCache(20)
    prompt = cache.names(3)
    for turn in range(4):
        assert cache.serve(prompt).turn == turn
        cache.serve(cache.names(20))
        assert cache.found(prompt) == 0
        prompt += cache.names(2)


def test_the_number_of_remembered_evicted_requests_is_bounded():
    cache = LearnedCache(4)
    prompt = cache.names(4)
    cache.serve(prompt)
    for _ in range(MAX_GHOSTS + 1):
        cache.serve(cache.names(4))
    assert cache.serve(prompt + cache.names(0)).turn == 0


@pytest.mark.ci
def test_memory_is_bounded_on_a_stream_that_never_comes_back():
    cache = LearnedCache(50)
    for number in range(2 * MAX_GHOSTS):
        cache.now = number * 1.0
        cache.serve(cache.names(2))
    mind = cache.mind
    assert len(mind.ghosts) <= MAX_GHOSTS
    assert len(mind.shadow._records) <= MIN_SLOTS
    assert len(mind.model._aging) < 2 * (MAX_GHOSTS + 25)
    (policy,) = (doubt.__self__ for doubt in mind.doubts)
    assert sum(len(heap.items) for heap in policy._heaps) < NUM_CLASSES * (2 * 25 + 66)


def test_an_unevictable_run_keeps_no_record_of_others_alive():
    cache = LearnedCache(50)
    kept = cache.names(2)
    cache.serve(kept, priority=1)
    for number in range(2 * MAX_GHOSTS):
        cache.now = number * 60.0
        cache.serve(cache.names(2))
    assert cache.found(kept) == 2
    assert len(cache.mind.model._aging) < 2 * (MAX_GHOSTS + 25)


# -- what requests share -------------------------------------------------------------------------


def ends(record):
    """Return where the shared runs of a record end, the deepest first."""
    found, run = [], record.shared
    while run is not None:
        found.append(run.end)
        run = run.above
    return found


def test_a_run_that_requests_go_off_from_is_shared_and_runs_may_continue_one_another():
    cache = LearnedCache(100)
    system, document = cache.names(4), cache.names(3)
    assert ends(cache.serve(system + cache.names(9))) == []
    assert ends(cache.serve(system + document + cache.names(9))) == [4]
    record = cache.serve(system + document + cache.names(9))
    assert ends(record) == [7, 4]
    assert (record.shared.uses, record.shared.above.uses) == (2, 3)


def test_a_turn_that_goes_on_shares_nothing_more():
    cache = LearnedCache(100)
    talk = cache.names(6)
    for _ in range(3):
        assert ends(cache.serve(talk)) == []
        talk = talk + cache.names(4)


def test_shared_runs_are_known_again_after_eviction():
    cache = LearnedCache(20)
    system = cache.names(4)
    for _ in range(2):
        cache.serve(system + cache.names(9))
    cache.serve(cache.names(20))
    assert cache.found(system) == 0
    record = cache.serve(system + cache.names(9))
    assert (ends(record), record.shared.uses) == ([4], 3)


def test_the_number_of_shared_runs_per_prompt_is_bounded():
    cache = LearnedCache(400)
    prompt = cache.names(2)
    for _ in range(2 * MAX_DEPTH):
        cache.serve(prompt + cache.names(5))
        record = cache.serve(prompt + cache.names(5))
        prompt = prompt + cache.names(2)
        cache.serve(prompt + cache.names(5))
    assert len(ends(record)) <= MAX_DEPTH


def test_a_run_of_both_kinds_loses_what_is_not_shared_first():
    cache = LearnedCache(60)
    system = cache.names(10)
    for _ in range(40):  # so it is known that all come back to it, and to nothing else
        cache.now += 10
        cache.serve(system + cache.names(10))
        cache.serve(cache.names(10))
    cache.serve(cache.names(60))
    cache.serve(system + cache.names(10))  # one node again
    for _ in range(12):
        cache.now += 1
        cache.serve(cache.names(10))
    assert cache.found(system) == 10


@pytest.mark.ci
def test_learned_hits_more_than_lru_on_few_shot_prompts():
    trace = Workload(parts_named("few-shot"), 1500, 3)
    num_blocks = 1 + max(int(request.blocks.max()) for request in trace)
    learned, lru = (
        100 * replay(trace, num_blocks // 20, policy).token_hit for policy in ("learned", "lru")
    )
    assert learned > lru + 2


# -- answers -------------------------------------------------------------------------------------


def talk(cache, num_chats, *, repeats):
    """Chats of two turns; the second prompt repeats the answer in the same tokens, or in others."""
    for number in range(num_chats):
        cache.now += 1
        if number % 3 == 0:
            cache.serve(cache.names(3))
        prompt, answer = cache.names(4), cache.names(2)
        cache.serve(prompt, answer)
        cache.serve(prompt + (answer if repeats else cache.names(2)) + cache.names(2))


def test_answers_that_prompts_never_repeat_go_first():
    cache = LearnedCache(40)
    assert not cache.mind.trims
    talk(cache, 2 * TRUST // TRIAL, repeats=False)
    assert cache.mind.trims
    old, prompt, answer = cache.names(8), cache.names(4), cache.names(3)
    cache.serve(old)
    cache.serve(prompt, answer)
    while cache.found(prompt + answer) == 7:
        cache.serve(cache.names(2))
    assert (cache.found(prompt + answer) >= 4, cache.found(old)) == (True, 8)


def test_answers_are_kept_again_once_prompts_repeat_them():
    cache = LearnedCache(400)
    talk(cache, 2 * TRUST // TRIAL, repeats=False)
    assert cache.mind.trims
    talk(cache, 16 * TRIAL, repeats=True)
    assert not cache.mind.trims


def test_one_answer_of_sixteen_is_kept_on_equal_terms():
    cache = LearnedCache(400)
    talk(cache, 2 * TRUST // TRIAL, repeats=False)
    trimmed = [cache.serve(cache.names(3), cache.names(1)).trimmed for _ in range(2 * TRIAL)]
    assert trimmed.count(False) == 2


# -- the guard -----------------------------------------------------------------------------------


@pytest.mark.ci
def test_learned_with_inverted_ranks_becomes_lru_within_a_point():
    trace = chats_and_documents(2500, document=4)
    lru = 100 * replay(trace, 100, "lru").token_hit

    def inverted(mind):
        mind.model, mind.is_lru = Inverted(), False
        return mind

    loose, guarded = (
        Learned(lambda: inverted(AlwaysLru())),
        Learned(lambda: inverted(LearnedState())),
    )
    without, within = (100 * replay(trace, 100, each).token_hit for each in (loose, guarded))
    assert without < lru - 5
    assert guarded.mind.is_lru
    assert within > lru - 1


@drawn(20, 400, seed=st.integers(0, 10**6), capacity=st.integers(3, 60))
def test_the_shadow_finds_what_lru_finds(seed, capacity):
    trace = trace_of(random_chains(seed, 80))
    hits = [[], []]

    class Shadowed(Learned):  # one block of the pool is never cached here: the unfinished one
        def __call__(self, tick, pool):
            return super().__call__(tick, lambda: pool() - 1)

    shadowed = Shadowed(AlwaysLru)
    for policy, seen in zip((shadowed, "lru"), hits, strict=True):
        replay(trace, capacity, policy, observers=[lambda _, hit, seen=seen: seen.append(hit)])
    assert hits[0] == hits[1]
    assert shadowed.mind.judged == [
        (hit // trace.block_size, hit // trace.block_size) for hit in hits[1]
    ]


# -- among others --------------------------------------------------------------------------------


def test_the_same_calls_lead_to_the_same_order():
    trace = chats_and_documents(500, seed=3)
    orders = []
    for _ in range(2):
        cache = LearnedCache(90)
        for request in trace:
            cache.now = request.time_s
            cache.serve(request.blocks.tolist())
        orders.append([(node.start, node.end) for node in cache.manager.kernel.tree.order.order()])
    assert orders[0] == orders[1]


def test_a_fresh_look_finds_the_victim_that_is_known_already():
    cache = LearnedCache(60)
    order = cache.manager.kernel.tree.order
    for request in chats_and_documents(300, seed=5):
        cache.now = request.time_s
        cache.serve(request.blocks.tolist())
        victim = order.victim()
        assert victim == order.victim()
        for node in order.order():
            cache.mind.doubt(node.note)
        assert victim == order.victim()


def test_priority_classes_share_what_is_learned():
    cache = LearnedCache(80)
    for number, request in enumerate(chats_and_documents(200)):
        cache.now = request.time_s
        cache.serve(request.blocks.tolist(), priority=number % 3)
    assert len(cache.mind.doubts) == 3
    assert cache.mind.num_requests == 200


@pytest.mark.ci
@drawn(20, 400, seed=st.integers(0, 10**6))
def test_requests_may_overlap_fork_and_pause(seed):
    random = Random(seed)
    cache = LearnedCache(40)
    manager, running = cache.manager, []
    for _ in range(60):
        cache.now += random.choice((0, 0, 1, 30))
        seq = random.choice(running) if running else None
        what = random.choice(("open", "open", "close", "suspend", "fork"))
        if what == "open" and len(running) < 3:
            prompt = [random.randrange(3) for _ in range(random.randint(1, 8))]
            running.append(cache.open(prompt, 7, priority=random.choice((0, 0, 1))))
        elif seq is not None and what == "close":
            running.remove(seq)
            manager.close(seq)
        elif seq is not None and seq.state == "suspended":
            manager.resume(seq)
        elif seq is not None and what == "suspend":
            manager.suspend(seq)
        elif seq is not None and what == "fork" and len(running) < 3:
            running.append(manager.fork(seq))
        ops.check(manager)
    for seq in running:
        manager.close(seq)
    cache.serve(cache.names(40))
    assert cache.manager.kernel.counters.evicted_blocks > 0


def test_a_fork_leaves_no_record_and_what_it_shared_keeps_that_of_the_first():
    cache = LearnedCache(40)
    seq = cache.open(cache.names(6))
    record, twin, node = cache.learned.walk_of(seq).record, cache.manager.fork(seq), seq.node
    cache.manager.close(seq)
    assert (record.closed, node.locks, node.note) == (True, 1, record)
    cache.manager.close(twin)
    assert (cache.mind.num_requests, node.note) == (1, record)


@pytest.mark.parametrize("resumed", [True, False])
def test_a_request_that_pauses_leaves_one_record_at_its_end(resumed):
    cache = LearnedCache(40)
    prompt = cache.names(6)
    cache.serve(prompt[:3])
    seq = cache.open(prompt)
    record = cache.learned.walk_of(seq).record
    cache.manager.suspend(seq)
    nodes = list(cache.manager.kernel.tree.order.order())
    assert {node.note.closed for node in nodes} == {False}
    cache.serve(cache.names(2))
    if resumed:
        cache.manager.resume(seq)
    cache.manager.close(seq)
    assert (record.turn, record.closed, cache.mind.num_requests) == (1, True, 3)
    if resumed:
        assert {node.note for node in nodes if node.parent is not None} == {record}


def test_only_what_was_evicted_is_known_again():
    cache = LearnedCache(20)
    prompts = [cache.names(4) for _ in range(3)]
    for prompt in prompts:
        cache.serve(prompt)
    assert ops.invalidate(cache.manager, np.array(prompts[0], np.int32)) == 4
    assert (ops.reclaim(cache.manager, 1), list(cache.mind.ghosts)) == (1, [2])
    ops.clear(cache.manager)
    assert list(cache.mind.ghosts) == [2]


def test_an_evicted_suspended_request_leaves_no_ghost():
    cache = LearnedCache(8)
    seq = cache.open(cache.names(4))
    cache.manager.suspend(seq)
    for _ in range(3):
        cache.serve(cache.names(6))
    assert 0 not in cache.mind.ghosts


def test_a_trace_without_rows_is_no_trouble():
    assert replay(ListTrace([]), 4, "learned").num_requests == 0
