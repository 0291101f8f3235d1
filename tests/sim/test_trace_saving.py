"""Traces written in quire's own format, and traces in larger blocks."""

import json

import numpy as np
import pytest
import traces_read
from trace_help import by_prefix, row, write

import traces
from quire.core.terms import Hint
from quire.errors import ConfigError, TraceError
from quire_sim.trace import TraceRequest, open_trace, save_trace, with_block_size
from quire_sim.trace.rows import compress


def everything(request):
    return (
        request.time_s,
        request.prompt_tokens,
        request.output_tokens,
        request.runs.tolist(),
        request.session,
        request.hint,
        request.duration_s,
    )


class Written:
    """A trace in memory."""

    source, format, block_size = "memory", "memory", 4

    def __init__(self, requests):
        self._requests = requests

    def __iter__(self):
        return iter(self._requests)


def request(blocks, row=1, **others):
    runs = compress(np.array(blocks, np.int32))
    return TraceRequest(row, 0.1 * row, 4 * len(blocks) + 1, 5, runs, **others)


FULL = Written(
    [
        request([0, 1, 2]),
        request([0, 1, 3], 2, session="a", duration_s=0.1 + 0.2),
        request([0, 1, 3, 4], 3, session="ä", hint=Hint("session", 1 / 3, "ä")),
        request([], 4, hint=Hint("never")),
    ]
)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_trace_reads_as_it_was_written(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    assert save_trace(FULL, path) == 4
    back = open_trace(path)
    assert (back.format, back.block_size) == ("quire", 4)
    assert [everything(one) for one in back] == [everything(one) for one in FULL]


@pytest.mark.parametrize("name", traces.NAMES)
def test_a_public_trace_reads_as_it_was_converted(tmp_path, name):
    trace = traces_read.head(name)
    save_trace(trace, tmp_path / "t.gz")
    back = open_trace(tmp_path / "t.gz")
    assert [everything(one) for one in back] == [everything(one) for one in trace]


def test_the_file_is_a_header_and_a_line_per_request(tmp_path):
    save_trace(FULL, tmp_path / "t")
    header, first, second, *_ = map(json.loads, (tmp_path / "t").read_text().splitlines())
    assert header == {"quire_trace": 1, "block_size": 4, "ids": "trace"}
    assert first == {"t": 0.1, "in": 13, "out": 5, "runs": [[0, 3]]}
    assert second == {
        "t": 0.2,
        "in": 13,
        "out": 5,
        "runs": [[0, 2], [3, 1]],
        "session": "a",
        "took": 0.1 + 0.2,
    }


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_the_same_trace_gives_the_same_bytes(tmp_path, suffix):
    for name in ("a", "b"):
        save_trace(FULL, tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_a_trace_may_be_written_over_its_own_file(tmp_path):
    path = write(tmp_path / "t", [row([4, 5, 6, 7]), row([4, 5, 8, 9])])
    before = [everything(one) for one in open_trace(path)]
    save_trace(open_trace(path), path)
    assert [everything(one) for one in open_trace(path)] == before


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "t"
    path.write_text("precious")
    bad = write(tmp_path / "bad", [row([4, 5, 6, 7]), {"timestamp": "x"}])
    with pytest.raises(TraceError):
        save_trace(open_trace(bad), path)
    assert path.read_text() == "precious"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bad", "t"]


def test_a_trace_without_requests_is_not_saved(tmp_path):
    with pytest.raises(TraceError, match="nothing to write"):
        save_trace(Written([]), tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"cannot write .*: No such file"):
        save_trace(FULL, tmp_path / "no" / "t")


# Larger blocks.


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", traces.NAMES)
@pytest.mark.parametrize("factor", [2, 3, 7])
def test_a_larger_block_is_named_by_the_prefix_up_to_its_end(name, factor):
    trace = traces_read.head(name)
    coarse = with_block_size(trace, trace.block_size * factor)
    assert coarse.block_size == trace.block_size * factor
    fine, larger = list(trace), list(coarse)
    expected = by_prefix([one.blocks.tolist()[factor - 1 :: factor] for one in fine])
    assert [one.blocks.tolist() for one in larger] == expected
    for before, after in zip(fine, larger, strict=True):
        assert everything(before)[:3] == everything(after)[:3]
        assert after.num_blocks == before.num_blocks // factor
        assert after.session == before.session


def test_the_same_block_size_is_the_same_trace():
    assert with_block_size(FULL, 4) is FULL


@pytest.mark.parametrize("block_size", [0, -4, 2, 6, 1023])
def test_another_block_size_than_a_multiple_is_refused(block_size):
    with pytest.raises(ConfigError, match=rf"4, 8, 12, 16, ... tokens, not of {block_size}"):
        with_block_size(FULL, block_size)
