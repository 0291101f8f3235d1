"""Traces become requests: sizes, times, and dense ids that name whole prefixes."""

import json
import os

import numpy as np
import pytest
import traces_read
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_help import by_prefix, ids_in, row, rows_in, runs_of, violations, write

import traces
from quire.errors import ConfigError, TraceError
from quire_sim.trace import Findings, chunks, files, numbering, open_trace
from quire_sim.trace.rows import compress

SIZES = {traces.CONVERSATION: 512, traces.AGENT: 16, traces.CODING_AGENT: 64}
FORMATS = {"mooncake_conversation": "mooncake"}


def blocks(trace):
    return [request.blocks.tolist() for request in trace]


def check_against_rows(trace, rows):
    rows = [row for row in rows if row["input_length"]]
    requests = list(trace)
    prompts = [ids_in(row) for row in rows]
    assert [request.blocks.tolist() for request in requests] == by_prefix(prompts)
    assert [r.prompt_tokens for r in requests] == [row["input_length"] for row in rows]
    assert [r.output_tokens for r in requests] == [row["output_length"] for row in rows]
    assert [r.session for r in requests] == [row.get("session_id") for row in rows]
    return requests


@pytest.mark.parametrize("name", traces.NAMES)
def test_the_beginning_of_a_public_trace_reads_as_its_rows_say(name):
    trace = traces_read.head(name)
    assert trace.block_size == SIZES[name]
    assert trace.format == FORMATS.get(name, "hash-runs")
    for request in check_against_rows(trace, rows_in(traces.head_path(name))):
        assert request.runs.dtype == np.int32
        assert request.runs.tolist() == compress(request.blocks).tolist()  # no run is cut in two


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [traces.CONVERSATION, traces.AGENT])
def test_a_whole_public_trace_reads_as_its_rows_say(name):
    check_against_rows(traces_read.whole(name), rows_in(traces.whole_path(name)))


def test_every_iteration_reads_the_trace_anew():
    trace = traces_read.head(traces.AGENT)
    assert blocks(trace) == blocks(trace)


def test_times_are_seconds_from_the_first_request(tmp_path):
    path = write(tmp_path / "t", [row([0], at=5000), row([0], at=5000), row([0], at=7500.5)])
    assert [r.time_s for r in open_trace(path, block_size=16)] == [0.0, 0.0, 2.5005]


def test_rows_without_a_prompt_are_left_out_and_counted(tmp_path):
    path = write(tmp_path / "t", [row([0], at=0), row([], at=1), row([0], at=2)])
    report = Findings()
    requests = list(open_trace(path, block_size=16).read(report))
    assert [request.row for request in requests] == [1, 3]
    assert (report.rows, report.without_prompt) == (3, 1)


def test_a_trace_of_one_request_is_a_trace(tmp_path):
    path = write(tmp_path / "t", [row([7, 8, 9, 10], rest=3)])
    (request,) = open_trace(path)
    assert request.blocks.tolist() == [0, 1, 2, 3]
    assert request.prompt_tokens == 51


def test_a_prompt_shorter_than_a_block_has_no_blocks(tmp_path):
    path = write(tmp_path / "t", [row([], rest=0) | {"input_length": 5}])
    (request,) = open_trace(path, block_size=16)
    assert (request.num_blocks, request.blocks.tolist()) == (0, [])


def test_a_last_partial_block_is_a_block_where_the_row_names_it(tmp_path):
    rows = [row([0, 1, 2], rest=2), row([0, 1, 5], rest=2), row([0, 1]) | {"input_length": 40}]
    for path in (
        write(tmp_path / "ids", rows),
        write(tmp_path / "runs", [_in_runs(each) for each in rows]),
    ):
        requests = list(open_trace(path, block_size=16))
        assert [each.blocks.tolist() for each in requests] == [[0, 1, 2], [0, 1, 3], [0, 1]]
        assert [each.prompt_tokens for each in requests] == [34, 34, 40]


def _in_runs(row):
    rest = {key: value for key, value in row.items() if key != "hash_ids"}
    return rest | {"hash_runs": runs_of(row["hash_ids"])}


def test_blank_lines_and_other_line_ends_are_accepted(tmp_path):
    path = tmp_path / "t"
    lines = [json.dumps(row([0, 1])), "", json.dumps(row([0, 1, 2])), "  ", json.dumps(row([3]))]
    path.write_text("\r\n".join(lines))
    assert blocks(open_trace(path, block_size=16)) == [[0, 1], [0, 1, 2], [3]]


@pytest.mark.parametrize("suffix", [".zst", ".gz", ""])
def test_compression_is_found_out_from_the_content_not_the_name(tmp_path, suffix):
    from quire_sim.trace.chunks import create_text

    named = tmp_path / f"trace{suffix}"
    with create_text(named) as text:
        for _ in range(3):
            text.write(json.dumps(row([4, 5, 6, 7, 8])).encode() + b"\n")
    disguised = named.rename(tmp_path / "trace.txt")
    assert blocks(open_trace(disguised)) == [[0, 1, 2, 3, 4]] * 3


def test_several_zstd_frames_and_gzip_members_are_one_trace(tmp_path):
    import gzip

    import zstandard

    line = json.dumps(row([4, 5, 6, 7, 8])).encode() + b"\n"
    for name, compress_ in (("z", zstandard.compress), ("g", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(compress_(line) + compress_(line))
        assert len(blocks(open_trace(path))) == 2


def test_bailian_rows_have_seconds_and_their_turns_make_a_session(tmp_path):
    chats = [(7, -1), (9, -1), (12, 7), (15, 12)]
    rows = [
        row([0, 1, 2, 3, 4], at=1.5 + i, chat_id=chat, parent_chat_id=parent, turn=1, type="text")
        for i, (chat, parent) in enumerate(chats)
    ]
    trace = open_trace(write(tmp_path / "t", rows))
    assert (trace.format, trace.block_size) == ("bailian", 16)
    assert [r.time_s for r in trace] == [0.0, 1.0, 2.0, 3.0]
    assert [r.session for r in trace] == ["7", "9", "7", "7"]


# Ids of any kind.


def test_ids_hashed_per_block_are_replaced_by_those_of_prefixes(tmp_path):
    prompts = [[1, 2, 3], [1, 2, 3], [4, 2, 3], [4, 2, 3, 1]]
    report = Findings()
    trace = open_trace(write(tmp_path / "t", [row(p) for p in prompts]), block_size=16)
    found = [r.blocks.tolist() for r in trace.read(report)]
    assert found == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5, 6]]
    assert report.violations == violations(prompts) == 3


@pytest.mark.parametrize(
    "rename",
    [
        lambda id_: id_ * 2**53 + 11,
        lambda id_: 2**64 - 1 - id_,
        lambda id_: -id_,
        lambda id_: 10**30 + id_,
        lambda id_: 50_000_000 - 100 * id_,
    ],
    ids=["64-bit", "unsigned", "negative", "huge", "millions"],
)
@pytest.mark.parametrize("known_before", [False, True])
def test_numbers_of_any_size_are_ids(tmp_path, monkeypatch, rename, known_before):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)  # a row at a time
    prompts = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [7]]
    renamed = [[rename(id_) for id_ in prompt] for prompt in prompts]
    small = [[0, 1], [0, 1, 2]] if known_before else []
    rows = [row(prompt) for prompt in small + renamed]
    trace = open_trace(write(tmp_path / "t", rows), block_size=16)
    assert blocks(trace) == by_prefix(small + renamed)


def test_text_names_blocks_and_is_not_read_as_a_number(tmp_path):
    prompts = [["12", "ab"], ["012", "ab"], ["12", "ab", "c"]]
    trace = open_trace(write(tmp_path / "t", [row(p) for p in prompts]), block_size=16)
    assert blocks(trace) == by_prefix(prompts)


def test_ids_of_a_session_mean_something_else_in_another(tmp_path):
    header = {"quire_trace": 1, "block_size": 16, "ids": "session"}
    rows = [
        {"t": 0, "in": 32, "out": 1, "runs": [[1, 2]], "session": "a"},
        {"t": 0, "in": 32, "out": 1, "runs": [[1, 2]], "session": "b"},
        {"t": 0, "in": 48, "out": 1, "runs": [[1, 3]], "session": "a"},
    ]
    assert blocks(open_trace(write(tmp_path / "t", [header, *rows]))) == [[0, 1], [2, 3], [0, 1, 4]]


def test_ids_of_a_session_need_a_session(tmp_path):
    header = {"quire_trace": 1, "block_size": 16, "ids": "session"}
    rows = [
        {"t": 0, "in": 32, "out": 1, "runs": [[1, 2]], "session": "a"},
        {"t": 0, "in": 32, "out": 1, "runs": [[1, 2]]},
    ]
    trace = open_trace(write(tmp_path / "t", [header, *rows]))
    with pytest.raises(TraceError, match=r"row 2: session is missing"):
        list(trace)


some_prompts = st.lists(st.lists(st.integers(0, 6), max_size=8), min_size=1, max_size=20)


RENAMES = (
    lambda id_: id_,  # dense already where chained
    lambda id_: id_ + (id_ > 4),  # a gap
    lambda id_: 200 - id_,  # not rising
    lambda id_: 3 * id_,  # no runs
    lambda id_: id_ * 2**40,  # no addresses
)


@pytest.mark.ci
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=some_prompts,
    ids=st.tuples(st.booleans(), st.sampled_from(RENAMES), st.booleans()),
    then=some_prompts,
    chunk=st.sampled_from([(40, 1), (300, 3), (1 << 20, 512)]),
)
def test_ids_name_prefixes_whatever_the_ids_and_the_chunks(
    tmp_path_factory, prompts, ids, then, chunk
):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    chained, rename, runs = ids
    if chained:
        prompts = by_prefix(prompts) + then  # where some are chained no more
    prompts = [[rename(id_) for id_ in prompt] for prompt in prompts]
    rows = [row(prompt) for prompt in prompts]
    if runs:
        for number, one in enumerate(rows):
            ids = one.pop("hash_ids")
            cut = len(ids) // 2 if number % 3 == 0 else 0  # runs may go on from each other
            one["hash_runs"] = runs_of(ids[:cut]) + runs_of(ids[cut:])
    if not any(prompts):
        return
    trace = open_trace(write(path, rows), block_size=16)
    report = Findings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", chunk[0])
        patch.setattr(files, "ROWS_AT_ONCE", chunk[1])
        patch.setattr(numbering, "PAGE", 4)
        found = [request.blocks.tolist() for request in trace.read(report)]
    expected = [prompt for prompt in by_prefix(prompts) if prompt]
    assert found == expected
    assert report.violations == violations(prompts)


# Block sizes.


def test_the_block_size_is_what_all_rows_agree_on(tmp_path):
    prompts = [list(range(20)), list(range(31))]
    for size in (16, 48, 64, 512):
        path = write(
            tmp_path / "t", [row(p, block_size=size, rest=r) for p in prompts for r in (0, 7)]
        )
        assert open_trace(path).block_size == size


def test_a_block_size_that_rows_leave_open_is_asked_for(tmp_path):
    path = write(
        tmp_path / "t",
        [{"timestamp": 0, "input_length": 100, "output_length": 1, "hash_runs": [[0, 1]]}],
    )
    with pytest.raises(ConfigError, match="--trace-block-size"):
        open_trace(path)
    assert open_trace(path, block_size=64).block_size == 64


def test_a_given_block_size_is_checked_against_each_row(tmp_path):
    path = write(tmp_path / "t", [row(list(range(20)))])
    with pytest.raises(TraceError, match=r"row 1: 20 block ids are fewer than the 40 full blocks"):
        list(open_trace(path, block_size=8))
    with pytest.raises(ConfigError, match="block_size=0"):
        open_trace(path, block_size=0)


def test_a_pipe_is_refused(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(TraceError, match="no regular file"):
        open_trace(path)
