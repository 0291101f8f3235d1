"""The policy `learned`: what it learns, what it forgets, and what keeps it from harm."""

from random import Random

import numpy as np
import pytest
from hypothesis import strategies as st
from replay_help import ListTrace, random_chains, trace_of

from quire import ops
from quire.core import CacheManager
from quire.foresight import Learned
from quire.foresight.learned import MAX_DEPTH
from quire.foresight.learned_state import MAX_GHOSTS, TRIAL, TRUST, LearnedState
from quire.foresight.lru_shadow import MIN_SLOTS
from quire.foresight.reentry import NUM_CLASSES, Reentry
from quire_sim.replay import replay
from quire_sim.workload import Workload, parts_named
from turns import drawn
from watching import watchers

TOKENS_PER_BLOCK = 64


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


class World:
    """A manager with the policy, a clock, and prompts of one-token blocks."""

    def __init__(self, capacity, policy=None):
        self.now = 0.0
        self.learned = Learned(lambda: LearnedState(apprentice=0))
        self.manager = CacheManager(
            capacity + 1,
            1,
            watchers=watchers(),
            policy=policy or self.learned,
            sub_block=False,
            clock=lambda: self.now,
        )
        self._fresh = 10**6
        self._num_served = 0
        self.has_learned = policy is None

    @property
    def mind(self):
        """Return what the policy knows."""
        return self.learned.mind

    def names(self, count):
        """Return so many tokens that nobody has used."""
        self._fresh += count
        return list(range(self._fresh - count, self._fresh))

    def open(self, prompt, after=2**31 - 1, **options):
        """Open a request for a prompt and one more token, `after`, and compute the prompt."""
        manager = self.manager
        seq = manager.open(np.array([*prompt, after], np.int32), **options)
        rest = prompt[seq.num_cached :]
        if rest:
            manager.reserve(seq, len(rest) + 1)
            manager.commit(seq, np.array(rest, np.int32))
        ops.admit(manager, seq)  # where all of it was found
        if self.has_learned:
            walk = self.learned.walk_of(seq)
            walk.prompt, walk.block_size = len(prompt) * TOKENS_PER_BLOCK, TOKENS_PER_BLOCK
        return seq

    def serve(self, prompt, answer=(), **options):
        """Serve a whole request; return the record that it left, None without any blocks."""
        seq = self.open(prompt, *answer[:1], **options)
        if answer:
            self.manager.reserve(seq, len(answer))
            self.manager.commit(seq, np.array(answer, np.int32))
        walk = self.learned.walk_of(seq) if self.has_learned else None
        self.manager.close(seq)
        self._num_served += 1
        if (
            self._num_served < 100 or self._num_served % 16 == 0
        ):  # a check takes as long as many requests
            ops.check(self.manager)
        return walk.record if walk is not None else None

    def found(self, prompt):
        """Return how many blocks of a prompt are cached."""
        return self.manager.probe(np.array([*prompt, 2**31 - 1], np.int32)).num_tokens


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
    worlds = World(40), World(40, "lru")
    prompts = []
    for number in range(60):
        prompts.append([1000 * number + i for i in range(random.randint(2, 12))])
        for world in worlds:
            world.serve(prompts[-1])
        learned, lru = ([world.found(prompt) for prompt in prompts] for world in worlds)
        assert learned == lru


def test_learned_evicts_kinds_that_never_return_first():
    trace = chats_and_documents(400)
    world = World(80)
    for request in trace:
        world.now = request.time_s
        world.serve(request.blocks.tolist())
    chat, document = world.names(2), world.names(10)
    world.serve(chat)
    world.now += 2
    world.serve(document)
    while world.found(document) == 10:
        world.now += 1
        world.serve(world.names(3))
    assert world.found(chat) == 2


def test_learned_hits_more_than_lru_on_mixed_kinds_of_requests():
    trace = chats_and_documents(1200)
    learned, lru = (100 * replay(trace, 100, policy).token_hit for policy in ("learned", "lru"))
    assert learned > lru + 5


def test_blocks_behind_the_point_where_a_later_turn_left_are_evicted_first():
    world = World(24)
    old, turn = world.names(8), world.names(8)
    world.serve(old)
    world.serve(turn)
    world.serve(turn[:6] + world.names(4))
    world.serve(world.names(6))
    assert (world.found(turn), world.found(old)) == (6, 8)


def test_a_superseded_run_that_learned_did_not_see_can_be_evicted():
    world = World(24)
    left, often = world.names(8), world.names(1)
    world.serve(left).superseded = True  # as by a request that overlapped
    for _ in range(100):
        world.serve(often)
    world.serve(world.names(24))
    assert world.found(left) == 0


def test_a_branch_from_the_middle_of_a_turn_does_not_supersede_it():
    world = World(24)
    old, turn = world.names(8), world.names(8)
    world.serve(old)
    assert not world.serve(turn).superseded
    world.serve(turn[:3] + world.names(3))
    world.serve(world.names(6))
    assert world.found(turn) == 8
    assert world.found(old) < 8


# -- what is known after eviction ----------------------------------------------------------------


def test_turns_are_known_again_after_eviction():
    world = World(20)
    prompt = world.names(3)
    for turn in range(4):
        assert world.serve(prompt).turn == turn
        world.serve(world.names(20))
        assert world.found(prompt) == 0
        prompt += world.names(2)


def test_the_number_of_remembered_evicted_requests_is_bounded():
    world = World(4)
    prompt = world.names(4)
    world.serve(prompt)
    for _ in range(MAX_GHOSTS + 1):
        world.serve(world.names(4))
    assert world.serve(prompt + world.names(0)).turn == 0


@pytest.mark.ci
def test_memory_is_bounded_on_a_stream_that_never_comes_back():
    world = World(50)
    for number in range(2 * MAX_GHOSTS):
        world.now = number * 1.0
        world.serve(world.names(2))
    mind = world.mind
    assert len(mind.ghosts) <= MAX_GHOSTS
    assert len(mind.shadow._records) <= MIN_SLOTS
    assert len(mind.model._aging) < 2 * (MAX_GHOSTS + 25)
    (policy,) = (doubt.__self__ for doubt in mind.doubts)
    assert sum(len(heap.items) for heap in policy._heaps) < NUM_CLASSES * (2 * 25 + 66)


def test_an_unevictable_run_keeps_no_record_of_others_alive():
    world = World(50)
    kept = world.names(2)
    world.serve(kept, priority=1)
    for number in range(2 * MAX_GHOSTS):
        world.now = number * 60.0
        world.serve(world.names(2))
    assert world.found(kept) == 2
    assert len(world.mind.model._aging) < 2 * (MAX_GHOSTS + 25)


# -- what requests share -------------------------------------------------------------------------


def ends(record):
    """Return where the shared runs of a record end, the deepest first."""
    found, run = [], record.shared
    while run is not None:
        found.append(run.end)
        run = run.above
    return found


def test_a_run_that_requests_go_off_from_is_shared_and_runs_may_continue_one_another():
    world = World(100)
    system, document = world.names(4), world.names(3)
    assert ends(world.serve(system + world.names(9))) == []
    assert ends(world.serve(system + document + world.names(9))) == [4]
    record = world.serve(system + document + world.names(9))
    assert ends(record) == [7, 4]
    assert (record.shared.uses, record.shared.above.uses) == (2, 3)


def test_a_turn_that_goes_on_shares_nothing_more():
    world = World(100)
    talk = world.names(6)
    for _ in range(3):
        assert ends(world.serve(talk)) == []
        talk = talk + world.names(4)


def test_shared_runs_are_known_again_after_eviction():
    world = World(20)
    system = world.names(4)
    for _ in range(2):
        world.serve(system + world.names(9))
    world.serve(world.names(20))
    assert world.found(system) == 0
    record = world.serve(system + world.names(9))
    assert (ends(record), record.shared.uses) == ([4], 3)


def test_the_number_of_shared_runs_per_prompt_is_bounded():
    world = World(400)
    prompt = world.names(2)
    for _ in range(2 * MAX_DEPTH):
        world.serve(prompt + world.names(5))
        record = world.serve(prompt + world.names(5))
        prompt = prompt + world.names(2)
        world.serve(prompt + world.names(5))
    assert len(ends(record)) <= MAX_DEPTH


def test_a_run_of_both_kinds_loses_what_is_not_shared_first():
    world = World(60)
    system = world.names(10)
    for _ in range(40):  # so it is known that all come back to it, and to nothing else
        world.now += 10
        world.serve(system + world.names(10))
        world.serve(world.names(10))
    world.serve(world.names(60))
    world.serve(system + world.names(10))  # one node again
    for _ in range(12):
        world.now += 1
        world.serve(world.names(10))
    assert world.found(system) == 10


@pytest.mark.ci
def test_learned_hits_more_than_lru_on_few_shot_prompts():
    trace = Workload(parts_named("few-shot"), 1500, 3)
    num_blocks = 1 + max(int(request.blocks.max()) for request in trace)
    learned, lru = (
        100 * replay(trace, num_blocks // 20, policy).token_hit for policy in ("learned", "lru")
    )
    assert learned > lru + 2


# -- answers -------------------------------------------------------------------------------------


def talk(world, num_chats, *, repeats):
    """Chats of two turns; the second prompt repeats the answer in the same tokens, or in others."""
    for number in range(num_chats):
        world.now += 1
        if number % 3 == 0:
            world.serve(world.names(3))
        prompt, answer = world.names(4), world.names(2)
        world.serve(prompt, answer)
        world.serve(prompt + (answer if repeats else world.names(2)) + world.names(2))


def test_answers_that_prompts_never_repeat_go_first():
    world = World(40)
    assert not world.mind.trims
    talk(world, 2 * TRUST // TRIAL, repeats=False)
    assert world.mind.trims
    old, prompt, answer = world.names(8), world.names(4), world.names(3)
    world.serve(old)
    world.serve(prompt, answer)
    while world.found(prompt + answer) == 7:
        world.serve(world.names(2))
    assert (world.found(prompt + answer) >= 4, world.found(old)) == (True, 8)


def test_answers_are_kept_again_once_prompts_repeat_them():
    world = World(400)
    talk(world, 2 * TRUST // TRIAL, repeats=False)
    assert world.mind.trims
    talk(world, 16 * TRIAL, repeats=True)
    assert not world.mind.trims


def test_one_answer_of_sixteen_is_kept_on_equal_terms():
    world = World(400)
    talk(world, 2 * TRUST // TRIAL, repeats=False)
    trimmed = [world.serve(world.names(3), world.names(1)).trimmed for _ in range(2 * TRIAL)]
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
        world = World(90)
        for request in trace:
            world.now = request.time_s
            world.serve(request.blocks.tolist())
        orders.append([(node.start, node.end) for node in world.manager.kernel.tree.order.order()])
    assert orders[0] == orders[1]


def test_a_fresh_look_finds_the_victim_that_is_known_already():
    world = World(60)
    order = world.manager.kernel.tree.order
    for request in chats_and_documents(300, seed=5):
        world.now = request.time_s
        world.serve(request.blocks.tolist())
        victim = order.victim()
        assert victim == order.victim()
        for node in order.order():
            world.mind.doubt(node.note)
        assert victim == order.victim()


def test_priority_classes_share_what_is_learned():
    world = World(80)
    for number, request in enumerate(chats_and_documents(200)):
        world.now = request.time_s
        world.serve(request.blocks.tolist(), priority=number % 3)
    assert len(world.mind.doubts) == 3
    assert world.mind.num_requests == 200


@pytest.mark.ci
@drawn(20, 400, seed=st.integers(0, 10**6))
def test_requests_may_overlap_fork_and_pause(seed):
    random = Random(seed)
    world = World(40)
    manager, running = world.manager, []
    for _ in range(60):
        world.now += random.choice((0, 0, 1, 30))
        seq = random.choice(running) if running else None
        what = random.choice(("open", "open", "close", "suspend", "fork"))
        if what == "open" and len(running) < 3:
            prompt = [random.randrange(3) for _ in range(random.randint(1, 8))]
            running.append(world.open(prompt, 7, priority=random.choice((0, 0, 1))))
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
    world.serve(world.names(40))
    assert world.manager.kernel.counters.evicted_blocks > 0


def test_a_fork_leaves_no_record_and_what_it_shared_keeps_that_of_the_first():
    world = World(40)
    seq = world.open(world.names(6))
    record, twin, node = world.learned.walk_of(seq).record, world.manager.fork(seq), seq.node
    world.manager.close(seq)
    assert (record.closed, node.locks, node.note) == (True, 1, record)
    world.manager.close(twin)
    assert (world.mind.num_requests, node.note) == (1, record)


@pytest.mark.parametrize("resumed", [True, False])
def test_a_request_that_pauses_leaves_one_record_at_its_end(resumed):
    world = World(40)
    prompt = world.names(6)
    world.serve(prompt[:3])
    seq = world.open(prompt)
    record = world.learned.walk_of(seq).record
    world.manager.suspend(seq)
    nodes = list(world.manager.kernel.tree.order.order())
    assert {node.note.closed for node in nodes} == {False}
    world.serve(world.names(2))
    if resumed:
        world.manager.resume(seq)
    world.manager.close(seq)
    assert (record.turn, record.closed, world.mind.num_requests) == (1, True, 3)
    if resumed:
        assert {node.note for node in nodes if node.parent is not None} == {record}


def test_only_what_was_evicted_is_known_again():
    world = World(20)
    prompts = [world.names(4) for _ in range(3)]
    for prompt in prompts:
        world.serve(prompt)
    assert ops.invalidate(world.manager, np.array(prompts[0], np.int32)) == 4
    assert (ops.reclaim(world.manager, 1), list(world.mind.ghosts)) == (1, [2])
    ops.clear(world.manager)
    assert list(world.mind.ghosts) == [2]


def test_an_evicted_suspended_request_leaves_no_ghost():
    world = World(8)
    seq = world.open(world.names(4))
    world.manager.suspend(seq)
    for _ in range(3):
        world.serve(world.names(6))
    assert 0 not in world.mind.ghosts


def test_a_trace_without_rows_is_no_trouble():
    assert replay(ListTrace([]), 4, "learned").num_requests == 0
