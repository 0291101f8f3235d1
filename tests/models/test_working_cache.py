"""The working cache and its ledger, against lists of token ids."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np  # noqa: E402

from quire.engines.hf.inputs import Prompts  # noqa: E402
from quire.engines.models.cache_factory import CacheFactory, stacked  # noqa: E402
from quire.engines.models.column_tokens import TokenLedger  # noqa: E402
from quire.engines.models.layers import WorkingLayer  # noqa: E402
from quire.engines.models.states import HybridLayer, StateLayer  # noqa: E402
from quire.engines.models.working_cache import WorkingCache  # noqa: E402
from quire.errors import ConfigError, InvariantError  # noqa: E402
from quire.tensors.kinds import KVShape, LayerKind  # noqa: E402
from quire.tensors.layout import StateShape  # noqa: E402
from quire.tensors.model import ModelLayout  # noqa: E402
from turns import lived  # noqa: E402

HEADS, K_WIDTH, V_WIDTH = 2, 3, 1
WINDOWS = (None, 4)
LAYERS = len(WINDOWS)


def states(ids, layer):
    """K and V in which every number tells the token, the head and the layer."""
    k = ids[:, None, :, None] * 100 + torch.arange(HEADS)[:, None, None] * 10 + layer
    k = k.float().expand(-1, HEADS, -1, K_WIDTH)
    return k, -k[..., :V_WIDTH]


class WorkingCacheMachine(RuleBasedStateMachine):
    """Every operation of the cache protocol, in any order; the model is a list per row."""

    @initialize(rows=st.integers(1, 3), room=st.sampled_from([0, 1, 7]))
    def start(self, rows, room):
        layers = [WorkingLayer(room, window=window, debug_nan=True) for window in WINDOWS]
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
        sizes = [self.cache.get_mask_sizes(num_new, layer) for layer in range(LAYERS)]
        seen = [self.cache.update(*states(ids, layer), layer) for layer in range(LAYERS)]
        self.cache.ledger.append(ids)
        for row, new in zip(self.rows, ids.tolist(), strict=True):
            row.extend(new)
        rows = torch.tensor(self.rows)
        for layer, ((length, offset), (k, v)) in enumerate(zip(sizes, seen, strict=True)):
            k_want, v_want = states(rows[:, offset:], layer)
            assert length == k.shape[-2]
            assert torch.equal(k, k_want)
            assert torch.equal(v, v_want)

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
        offset = max(length - 3, 0)
        assert self.cache.get_mask_sizes(4, 1) == (length + 4 - offset, offset)
        for row, tokens in enumerate(self.rows):
            if tokens:
                for layer, (k, v) in enumerate(self.cache.row_kv(range(LAYERS), row, 0, length)):
                    k_want, v_want = states(torch.tensor([tokens]), layer)
                    assert torch.equal(k, k_want[0])
                    assert torch.equal(v, v_want[0])


TestWorkingCache, TestWorkingCacheLong = lived(WorkingCacheMachine, 30, 600, stateful_step_count=25)


def one_row(num_tokens=4):
    cache = WorkingCache(
        [WorkingLayer(window=window) for window in WINDOWS],
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
        cache.row_kv([0], 0, 0, 5)


def test_a_layer_and_a_ledger_that_disagree_are_found():
    cache = one_row()
    cache.ledger.append(torch.ones(1, 1, dtype=torch.long))
    with pytest.raises(InvariantError, match="columns"):
        cache.check()


def like(rows=1):
    return torch.zeros(rows, HEADS, 1, K_WIDTH), torch.zeros(rows, HEADS, 1, V_WIDTH)


def test_a_windowed_layer_begins_with_its_window_and_counts_all_columns():
    layer = WorkingLayer(window=4)
    k, v = layer.start_with(10, like())
    assert (layer.first, layer.length, k.shape[-2], v.shape[-2]) == (7, 10, 3, 3)
    assert (layer.get_seq_length(), layer.get_mask_sizes(2)) == (10, (5, 7))
    k.fill_(1), v.fill_(1)
    k, _ = layer.update(*states(torch.full((1, 2), 5), 0))
    assert k.shape[-2] == 5
    assert layer.row(0, 7, 12)[0].shape[1] == 5
    with pytest.raises(InvariantError, match="columns 6-12 of a layer of columns 7-12"):
        layer.row(0, 6, 12)


def test_a_windowed_layer_goes_back_no_further_than_to_where_it_began():
    layer = WorkingLayer(window=4)
    layer.start_with(10, like())
    layer.update(*states(torch.full((1, 6), 5), 0))
    layer.crop(-6)
    assert layer.length == 10
    with pytest.raises(ConfigError, match="starts before column 7"):
        layer.crop(-1)
    assert layer.length == 10


def test_a_crop_that_one_layer_cannot_do_changes_no_layer():
    cache = one_row(0)
    for layer in cache.kv_layers.values():
        layer.start_with(10, like())
    cache.ledger.append(torch.ones(1, 10, dtype=torch.long))
    with pytest.raises(ConfigError, match="whose window"):
        cache.crop(-1)
    cache.check()
    assert cache.get_seq_length() == 10


# -- recurrent states --------------------------------------------------------------------

STATES = (
    StateShape("conv.0", (2, 3), torch.float32),
    StateShape("recurrent.0", (4,), torch.float32),
)


def recurrent_cache(rows=1, block_size=2):
    layers = [HybridLayer(window=4), StateLayer()]
    ledger = TokenLedger(torch.zeros(rows, 0, dtype=torch.long), np.zeros(rows, dtype=int))
    return WorkingCache(layers, ledger, block_size=block_size)


def feed(cache, ids, failing=False):
    """Run a forward whose states are the last three ids, and the sum of all, of each row."""
    ids = torch.as_tensor(ids)
    cache.forward_starts()
    for layer in range(2):
        inputs = ids[:, None, :].float().expand(-1, 2, -1)
        cache.update_conv_state(inputs, layer, conv_kernel_size=3)
        held = cache.get_recurrent_state(layer)
        total = ids.sum(1, keepdim=True).float().expand(-1, 4)
        cache.update_recurrent_state(total if held is None else held + total, layer)
        if failing:
            return
    cache.update(*states(ids, 0), 0)
    cache.forward_ends(ids)


def sums(cache):
    """The sum of all ids of each row, the same in the hybrid layer and in the recurrent one."""
    rows = [cache.row_states(row) for row in range(cache.ledger.num_rows)]
    hybrid, recurrent = ([row[layer][1][0].item() for row in rows] for layer in range(2))
    assert hybrid == recurrent
    return hybrid


def test_states_are_copied_where_a_block_ends_and_only_there():
    cache = recurrent_cache()
    feed(cache, [[1, 2, 3]])
    assert cache.snapshots == [None]
    feed(cache, [[4]])
    feed(cache, [[5]])
    assert cache.snapshots[0].length == 4
    conv, recurrent = cache.snapshots[0].states[1]
    assert conv[0].tolist() == [2, 3, 4]
    assert recurrent.tolist() == [10] * 4
    assert sums(cache) == [15]


def test_rows_take_their_states_and_snapshots_along():
    cache = recurrent_cache(2)
    feed(cache, [[1, 2], [3, 4]])
    cache.batch_repeat_interleave(2)
    feed(cache, [[10], [20], [30], [40]])
    assert sums(cache) == [13, 23, 37, 47]
    cache.reorder_cache(torch.tensor([1, 1, 3, 2]))
    assert sums(cache) == [23, 23, 47, 37]
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert sums(cache) == [37, 23]
    assert [snapshot.states[1][1][0].item() for snapshot in cache.snapshots] == [7, 3]
    cache.check()


def test_a_row_that_has_ended_keeps_the_states_from_before_its_end():
    cache = recurrent_cache(2)
    cache.ends, cache.prompt_columns = frozenset({9}), 2
    feed(cache, [[9, 1], [9, 1]])  # an end in the prompt is text like any other
    for ids in ([[9], [5]], [[0], [5]], [[0], [5]], [[0], [9]]):
        feed(cache, ids)
    assert [snapshot.length for snapshot in cache.snapshots] == [2, 6]


def test_a_recurrent_state_cannot_be_cropped_and_nothing_changes():
    cache = recurrent_cache()
    feed(cache, [[1, 2]])
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(ConfigError, match="cannot go back"):
        cache.crop(-1)
    cache.check()
    assert sums(cache) == [3]


def test_a_recurrence_beside_a_convolution_that_records_its_past_cannot_be_cropped_either():
    cache = recurrent_cache()
    cache.activate_past_recording()
    feed(cache, [[1, 2, 3, 4]])
    with pytest.raises(ConfigError, match="cannot go back"):
        cache.crop(-1)
    cache.check()
    assert sums(cache) == [10]
    assert cache.row_states(0)[1][0][0].tolist() == [2, 3, 4]


def test_a_convolution_that_records_its_past_is_cropped():
    cache = WorkingCache(
        [WorkingLayer(), StateLayer()],
        TokenLedger(torch.zeros(1, 0, dtype=torch.long), np.zeros(1, dtype=int)),
        block_size=2,
    )
    cache.activate_past_recording()
    for piece in ([[1, 2, 3]], [[4, 5, 6]]):
        ids = torch.tensor(piece)
        cache.forward_starts()
        cache.update(*states(ids, 0), 0)
        cache.update_conv_state(ids[:, None].float().expand(-1, 2, -1), 1, conv_kernel_size=3)
        cache.forward_ends(ids)
    assert cache.snapshots[0].length == 6
    cache.crop(-1)
    assert cache.snapshots == [None]
    assert cache.row_states(0)[0][0][0].tolist() == [3, 4, 5]
    cache.check()


def test_after_a_forward_that_failed_the_states_are_lost_and_say_so():
    cache = recurrent_cache()
    feed(cache, [[1, 2]])
    feed(cache, [[3]], failing=True)
    with pytest.raises(ConfigError, match="open a new session"):
        feed(cache, [[3]])
    with pytest.raises(InvariantError, match="at no position"):
        cache.row_states(0)
    assert cache.snapshots[0].length == 2  # taken before, and still right
    cache.reset()
    feed(cache, [[7]])
    assert sums(cache) == [7]


def test_states_of_other_rows_are_refused():
    cache = recurrent_cache()
    feed(cache, [[1, 2]])
    with pytest.raises(ConfigError, match="holds 1 rows and the model was fed 3"):
        feed(cache, [[1], [1], [1]])


def test_rows_that_were_computed_alone_are_joined_behind_their_padding():
    kinds = [
        LayerKind("hybrid_sliding", "sliding", 4, 1),
        LayerKind("linear_attention", None, None, 1),
    ]
    shapes = [KVShape(HEADS, K_WIDTH, V_WIDTH), None]
    layout = ModelLayout.of_layers(kinds, shapes, [STATES] * 2, torch.float32, 2)
    factory = CacheFactory(kinds, layout, torch.device("cpu"), debug_nan=True)
    texts = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [4]]
    pads = np.array([0, 5, 6])
    ids = torch.tensor([[0] * pad + text for pad, text in zip(pads, texts, strict=True)])
    tokens = [np.array(text, dtype=np.int32) for text in texts]
    prompts = Prompts(ids, (ids > 0).long(), pads, tokens)
    caches = []
    for row in range(3):
        caches.append(factory.cache(prompts.row(row).ids, np.zeros(1, dtype=int)))
        if len(texts[row]) > 1:
            feed(caches[-1], [texts[row][:-1]])
    with pytest.raises(InvariantError, match="row 0 has 6 tokens behind 0 columns"):
        stacked(caches, prompts.ids, prompts.pads, 5, factory)
    cache = stacked(caches, prompts.ids, prompts.pads, 6, factory)
    cache.check()
    assert cache.get_seq_length() == 6
    assert sums(cache) == [21, 8, 0]
    assert [row.tolist() for row in cache.ledger.rows()] == [[1, 2, 3, 4, 5, 6], [8], []]
    (k, _), (k_short, _) = cache.row_kv([0], 0, 0, 6)[0], cache.row_kv([0], 1, 0, 1)[0]
    assert torch.equal(k, states(torch.tensor([[1, 2, 3, 4, 5, 6]]), 0)[0][0])
    assert torch.equal(k_short, states(torch.tensor([[8]]), 0)[0][0])
    feed(cache, [[7], [9], [4]])
    assert sums(cache) == [28, 17, 4]
    assert bool(cache.layers[0].keys.isfinite().all())


@pytest.mark.parametrize("pads", [[0, 9], [9, 0], [2, 3], [2, 9, 5]])
def test_rows_are_joined_at_any_column_also_inside_the_padding_of_others(pads):
    kinds = [LayerKind("sliding_attention", "sliding", 4, 0)]
    shapes = [KVShape(HEADS, K_WIDTH, V_WIDTH)]
    layout = ModelLayout.of_layers(kinds, shapes, [()], torch.float32, 2)
    factory = CacheFactory(kinds, layout, torch.device("cpu"), debug_nan=True)
    ids = torch.tensor([[0] * pad + list(range(1, 13 - pad)) for pad in pads])
    tokens = [row[pad:].numpy().astype(np.int32) for row, pad in zip(ids, pads, strict=True)]
    prompts = Prompts(ids, (ids > 0).long(), np.array(pads), tokens)
    for column in range(1, 12):
        caches = []
        for row, pad in enumerate(pads):
            alone = factory.cache(prompts.row(row).ids, np.zeros(1, dtype=int))
            if column > pad:
                alone.update(*states(ids[row : row + 1, pad:column], 0), 0)
                alone.ledger.append(ids[row : row + 1, pad:column])
            caches.append(alone)
        cache = stacked(caches, prompts.ids, prompts.pads, column, factory)
        cache.check()
        assert cache.get_seq_length() == column
        k, _ = cache.update(*states(ids[:, column : column + 1], 0), 0)
        seen = ids[:, max(column - 3, 0) : column + 1]
        want = states(seen, 0)[0] * (seen > 0)[:, None, :, None]
        torch.testing.assert_close(k * (seen > 0)[:, None, :, None], want)
