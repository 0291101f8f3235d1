"""The working cache and its ledger, against lists of token ids."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np  # noqa: E402

from quire.engines.hf.ledger import TokenLedger  # noqa: E402
from quire.engines.hf.working import WorkingCache, WorkingLayer  # noqa: E402
from quire.errors import ConfigError, InvariantError  # noqa: E402

HEADS, K_WIDTH, V_WIDTH, LAYERS = 2, 3, 1, 2


def states(ids, layer):
    """K and V in which every number tells the token, the head and the layer."""
    k = ids[:, None, :, None] * 100 + torch.arange(HEADS)[:, None, None] * 10 + layer
    k = k.float().expand(-1, HEADS, -1, K_WIDTH)
    return k, -k[..., :V_WIDTH]


class WorkingCacheMachine(RuleBasedStateMachine):
    """Every operation of the cache protocol, in any order; the model is a list per row."""

    @initialize(rows=st.integers(1, 3), room=st.sampled_from([0, 1, 7]))
    def start(self, rows, room):
        layers = [WorkingLayer(room, debug_nan=True) for _ in range(LAYERS)]
        ledger = TokenLedger(torch.zeros(rows, 0, dtype=torch.long), np.zeros(rows, dtype=int))
        self.cache = WorkingCache(layers, ledger)
        self.rows = [[] for _ in range(rows)]
        self.origins = list(range(rows))
        self.next_id = 1

    @rule(num_new=st.integers(1, 5), same=st.booleans())
    def feed(self, num_new, same):
        ids = torch.arange(self.next_id, self.next_id + len(self.rows) * num_new)
        self.next_id += len(ids)
        ids = ids.view(len(self.rows), num_new)
        if same:
            ids = ids[:1].expand(len(self.rows), -1)
        for layer in range(LAYERS):
            k, _ = self.cache.update(*states(ids, layer), layer)
        assert k.shape == (len(self.rows), HEADS, len(self.rows[0]) + num_new, K_WIDTH)
        self.cache.ledger.append(ids)
        for row, new in zip(self.rows, ids.tolist(), strict=True):
            row.extend(new)

    @rule(num_new=st.integers(1, 5), failed_layers=st.integers(1, LAYERS - 1))
    def forward_that_fails(self, num_new, failed_layers):
        ids = torch.full((len(self.rows), num_new), 7)
        for layer in range(failed_layers):
            self.cache.update(*states(ids, layer), layer)
        self.cache.drop_partial()

    @rule(count=st.integers(0, 6))
    def crop(self, count):
        self.cache.crop(-count)
        self.rows = [row[: max(len(row) - count, 0)] for row in self.rows]

    @rule(data=st.data())
    def reorder(self, data):
        index = data.draw(
            st.lists(
                st.integers(0, len(self.rows) - 1), min_size=len(self.rows), max_size=len(self.rows)
            )
        )
        self.cache.reorder_cache(torch.tensor(index))
        self.pick(index)

    @rule(data=st.data())
    def reorder_within_prompts(self, data):
        index = [
            data.draw(st.sampled_from([i for i, o in enumerate(self.origins) if o == origin]))
            for origin in self.origins
        ]
        self.cache.reorder_cache(torch.tensor(index))
        self.pick(index)

    @rule(data=st.data())
    def select(self, data):
        index = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=4))
        self.cache.batch_select_indices(torch.tensor(index))
        self.pick(index)

    @precondition(lambda self: len(self.rows) <= 4)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats):
        self.cache.batch_repeat_interleave(repeats)
        self.pick([row for row in range(len(self.rows)) for _ in range(repeats)])

    @rule()
    def reset(self):
        self.cache.reset()
        self.rows = [[] for _ in self.rows]

    def pick(self, index):
        self.rows = [list(self.rows[i]) for i in index]
        self.origins = [self.origins[i] for i in index]

    @invariant()
    def ledger_and_states_are_the_lists(self):
        if not hasattr(self, "rows"):
            return
        self.cache.check()
        ledger = self.cache.ledger
        assert [row.tolist() for row in ledger.rows()] == self.rows
        assert ledger.origins.tolist() == self.origins
        length = len(self.rows[0])
        assert self.cache.get_seq_length() == length
        assert self.cache.get_mask_sizes(4, 0) == (length + 4, 0)
        for row, tokens in enumerate(self.rows):
            if tokens:
                for layer, (k, v) in enumerate(self.cache.row_kv(row, 0, length)):
                    k_want, v_want = states(torch.tensor([tokens]), layer)
                    assert torch.equal(k, k_want[0])
                    assert torch.equal(v, v_want[0])


TestWorkingCache = WorkingCacheMachine.TestCase
TestWorkingCache.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def one_row(num_tokens=4):
    cache = WorkingCache(
        [WorkingLayer() for _ in range(LAYERS)],
        TokenLedger(torch.zeros(1, 0, dtype=torch.long), np.zeros(1, dtype=int)),
    )
    ids = torch.arange(1, num_tokens + 1)[None]
    for layer in range(LAYERS):
        cache.update(*states(ids, layer), layer)
    cache.ledger.append(ids)
    return cache


def test_rows_that_do_not_fit_are_refused_and_nothing_is_written():
    cache = one_row()
    with pytest.raises(ConfigError, match="holds 1 rows and the model was fed 3"):
        cache.update(*states(torch.ones(3, 2, dtype=torch.long), 0), 0)
    cache.check()


def test_columns_without_tokens_are_entered_as_unknown_and_cannot_be_read():
    cache = one_row()
    for layer in range(LAYERS):
        cache.update(*states(torch.ones(1, 2, dtype=torch.long), layer), layer)
    cache.drop_partial()
    cache.check()
    cache.ledger.append(torch.ones(1, 1, dtype=torch.long))
    assert (cache.ledger.length, cache.ledger.known) == (7, 4)
    with pytest.raises(InvariantError, match="4 are known"):
        cache.row_kv(0, 0, 5)


def test_a_layer_and_a_ledger_that_disagree_are_found():
    cache = one_row()
    cache.ledger.append(torch.ones(1, 1, dtype=torch.long))
    with pytest.raises(InvariantError, match="columns"):
        cache.check()
