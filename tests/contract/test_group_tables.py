"""Block tables of windowed groups: what they name, and what they leave out."""

import numpy as np
import pytest
from core_help import prefill, run, serve
from hybrid_help import (
    BLOCK,
    conserved,
    held,
    make,
)
from hypothesis import given
from hypothesis import strategies as st

from quire.core import FullAttention
from quire.core.decode import NO_BLOCK
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow

FULL = FullAttention()


def test_a_table_after_a_hit_names_only_what_the_hit_needs():
    manager = make(("full", 64, FULL), ("sliding", 64, SlidingWindow(8)))
    serve(manager, run(0, 32))
    seq = manager.open(run(0, 33))
    assert held(seq, 0) == list(range(8))
    assert held(seq, 1) == [6, 7]


@given(
    kind=st.one_of(
        st.just(FULL),
        st.builds(
            lambda window, sinks: SlidingWindow(window, min(window, sinks)),
            st.integers(1, 12),
            st.integers(0, 9),
        ),
        st.builds(ChunkedAttention, st.integers(1, 12)),
        st.builds(Recurrent, st.integers(4, 12)),
    ),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=4),
)
def test_no_padding_is_a_block_or_an_index(kind, lengths):
    manager = make(("full", 64, FULL), ("other", 64, kind))
    seqs = []
    for number, (length, reserved) in enumerate(lengths):
        seqs.append(prefill(manager, run(1000 * number, length)))
        if reserved:
            manager.reserve(seqs[-1], reserved)
    tables = manager.tables(seqs, group=1)
    pool = np.zeros(64)
    for row, seq in enumerate(seqs):
        own = [block for block in seq.block_ids(1).tolist() if block >= 0]
        ragged = tables.indices[tables.indptr[row] : tables.indptr[row + 1]].tolist()
        for entries in (tables.padded[row].tolist(), ragged):
            assert [block for block in entries if 0 <= block < 64] == own
            for other in set(entries).difference(own):
                assert other == NO_BLOCK
                with pytest.raises(IndexError):
                    pool[other]
                with pytest.raises(IndexError):
                    np.take(pool, [other])


def test_tables_stay_right_in_decode_steps():
    manager = make(("full", 64, FULL), ("sliding", 64, SlidingWindow(5)))
    seqs = [prefill(manager, run(1000 * i, length)) for i, length in enumerate((3, 9))]
    batch = manager.batch(seqs)
    for step in range(30):
        manager.reserve_step(batch)
        tables = manager.tables(seqs, group=1, pad=99)
        for row, seq in enumerate(seqs):
            ids = [block if block >= 0 else 99 for block in seq.block_ids(1).tolist()]
            assert tables.padded[row].tolist()[: len(ids)] == ids
            assert held(seq, 1)[0] == max(0, seq.computed - 5) // BLOCK
        manager.commit_step(batch, [step] * 2)
    assert conserved(manager)
