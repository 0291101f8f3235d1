"""A trace of any length is read in little memory, and fast."""

import gzip
import json
import tracemalloc

import pytest
import traces_read
from trace_help import row

import traces
from quire_sim.trace import chunks, open_trace, save_trace
from quire_sim.workload import Chat, Traffic, Workload
from turns import few_rows


def long_trace(path, num_rows):
    """Write rows of 40 blocks from a pool of 4,000; return how many bytes they are."""
    lines = [json.dumps(row([40 * i + j for j in range(40)], rest=3)) + "\n" for i in range(100)]
    with gzip.open(path, "wt", compresslevel=1) as text:
        for i in range(num_rows):
            text.write(lines[i % 100])
    return num_rows * len(lines[-1])


def peak_of_reading(path):
    tracemalloc.start()
    try:
        for _ in open_trace(path):
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.ci
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**15)
    counts = (1_000, 5_000)
    sizes = [long_trace(tmp_path / str(count), count) for count in counts]
    peaks = [peak_of_reading(tmp_path / str(count)) for count in counts]
    assert sizes[1] > 30 * chunks.CHUNK_BYTES
    assert peaks[1] < 1.05 * peaks[0]
    assert peaks[1] < 40 * chunks.CHUNK_BYTES


def test_a_few_huge_ids_cost_no_more_memory_than_small_ones(tmp_path):
    path = tmp_path / "t"
    path.write_text("".join(json.dumps(row([10**k, 10**k + 1])) + "\n" for k in range(19)))
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_trace(path, block_size=16)) == 19
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


@pytest.mark.ci
def test_a_trace_that_quire_wrote_costs_eight_bytes_a_branch(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**15)
    trace = Workload({"chat": Traffic(Chat())}, 20_000, seed=1)
    save_trace(trace, tmp_path / "t.jsonl")
    few, many = (head_of(tmp_path, count) for count in (2_000, 20_000))
    grown = peak_of_reading(many) - peak_of_reading(few)
    assert grown < 25 * 18_000  # 8 bytes, in arrays that double, and while they do


PUBLISHED = [
    (traces.CONVERSATION, 288_500, 182_790),
    (traces.AGENT, 247_466, 24_751),
    (traces.CODING_AGENT, 47_061_278, 1_727_499),
]


def head_of(folder, count):
    """Return the file of the first requests of a trace."""
    path = folder / str(count)
    lines = (folder / "t.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: count + 1]))
    return path


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "references", "unique"), few_rows(PUBLISHED, *PUBLISHED[:2]))
def test_whole_traces_have_the_published_numbers_of_blocks(name, references, unique):
    count, largest = 0, -1
    for request in traces_read.whole(name):
        count += request.num_blocks
        if len(request.runs):
            largest = max(largest, int(request.runs.sum(axis=1).max()) - 1)
    assert (count, largest + 1) == (references, unique)
