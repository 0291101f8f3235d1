"""Invalid traces are refused: with the row, the value, and what to do."""

import gzip
import json

import pytest
from trace_help import row, write

import traces
from quire.errors import ConfigError, QuireError, TraceError
from quire_sim.trace import FORMATS, chunks, open_trace

GOOD = row([0, 1, 2, 3], at=10)


def reading(path, **options):
    return list(open_trace(path, **options))


def text_file(path, *lines):
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


BAD_ROWS = {
    "time backwards": (GOOD | {"timestamp": 9}, r"time goes backwards: it came 0.001 s before"),
    "time huge": (GOOD | {"timestamp": 1e300}, r"over the limit of 1e\+10 s"),
    "time out of range": ('{"timestamp": 1e999}', r"out of range"),
    "time nan": ('{"timestamp": NaN}', r"not JSON"),
    "time null": (GOOD | {"timestamp": None}, r"timestamp is None: expected float, got null"),
    "time missing": ({"input_length": 1}, r"missing required field timestamp"),
    "negative prompt": (GOOD | {"input_length": -3}, r"input_length is -3: expected int >= 0"),
    "negative output": (GOOD | {"output_length": -1}, r"output_length is -1: expected int >= 0"),
    "huge prompt": (GOOD | {"input_length": 10**30}, r"input_length is 10+: expected int <= "),
    "true for a number": (GOOD | {"input_length": True}, r"input_length is True: expected int"),
    "part of a token": (GOOD | {"input_length": 64.5}, r"input_length is 64.5: expected int"),
    "text for a number": (GOOD | {"output_length": "1"}, r"output_length is '1': expected int"),
    "too few ids": (
        GOOD | {"hash_ids": [0, 1, 2]},
        r"3 block ids are fewer than the 4 full blocks of 16 tokens in a prompt of 64",
    ),
    "too many ids": (
        GOOD | {"hash_ids": [0, 1, 2, 3, 4]},
        r"5 block ids are more than a prompt of 64 tokens has blocks of 16 \(4\)",
    ),
    "ids without a prompt": (
        GOOD | {"input_length": 0},
        r"4 block ids are more than a prompt of 0",
    ),
    "an id that is true": (GOOD | {"hash_ids": [True, 1, 2, 3]}, r"hash_ids\[0\] is True"),
    "ids missing": ({"timestamp": 10, "input_length": 1, "output_length": 1}, r"hash_ids"),
    "brackets without end": ('{"else": ' + "[" * 100_000, r"not JSON"),
    "no object": ("[1, 2]", r"expected object, got array"),
    "no JSON": ("timestamp,input_length", r"not JSON"),
    "no text": ("\ufffe\x00", r"not JSON"),
    "a truncated line": (json.dumps(GOOD)[:40], r"not JSON \(input data was truncated\)"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize("before", [1, 3])
def test_a_row_that_cannot_be_is_named(tmp_path, bad, message, before):
    path = text_file(tmp_path / "t", *[GOOD] * before, bad)
    trace = open_trace(path, block_size=16)
    requests = iter(trace)
    for _ in range(before):
        next(requests)  # what comes before the bad row was read
    with pytest.raises(TraceError, match=rf"t, row {before + 1}: .*(?i:{message})"):
        next(requests)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([[0, 4], [9, 0]], r"hash_runs\[1\]\[1\] is 0: expected int >= 1"),
        ([[0, -4]], r"hash_runs\[0\]\[1\] is -4: expected int >= 1"),
        ([[0, 10**12]], r"hash_runs\[0\]\[1\] is 10+: expected int <= "),
        ([[0, 100_000_000]] * 3, r"block ids are more than"),
        ([[0, 1, 2]], r"expected array of length 2"),
        ([[0, 2]], r"2 block ids are fewer than the 4"),
    ],
)
def test_runs_that_cannot_be_are_named(tmp_path, runs, message):
    good = {"timestamp": 0, "input_length": 64, "output_length": 1, "hash_runs": [[0, 4]]}
    path = write(tmp_path / "t", [good, good | {"hash_runs": runs}])
    with pytest.raises(TraceError, match=rf"row 2: .*(?i:{message})"):
        reading(path, block_size=16)


def test_a_bad_first_row_is_named_when_the_file_is_opened(tmp_path):
    path = text_file(tmp_path / "t", '{"timestamp": 0, "input_le')
    with pytest.raises(TraceError, match=r"row 1: not JSON"):
        open_trace(path)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_no_trace(tmp_path, content):
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="is empty: a trace has at least one request"):
        open_trace(path)


def test_a_trace_without_any_prompt_is_refused_at_its_end(tmp_path):
    path = write(tmp_path / "t", [row([])])
    with pytest.raises(TraceError, match="none of its 1 rows has a prompt"):
        reading(path, block_size=16)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(TraceError, match=r"cannot read '.*nothing': No such file"):
        open_trace(tmp_path / "nothing")
    with pytest.raises(TraceError, match="Is a directory"):
        open_trace(tmp_path)


def test_another_kind_of_file_is_no_trace(tmp_path):
    path = text_file(tmp_path / "t", {"prompt": "hello"})
    with pytest.raises(TraceError, match="no trace that is known"):
        open_trace(path)


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"there are {', '.join(FORMATS)}"):
        open_trace(tmp_path, format="csv")


def test_a_given_format_is_not_guessed(tmp_path):
    path = write(tmp_path / "t", [GOOD])
    with pytest.raises(TraceError, match="missing required field hash_runs"):
        open_trace(path, format="hash-runs")


@pytest.mark.parametrize("share", [0.3, 0.9])
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_truncated_compressed_file_is_an_error(tmp_path, kind, share):
    import zstandard

    whole = gzip.decompress(traces.head_path(traces.CONVERSATION).read_bytes()) * 3
    packed = gzip.compress(whole) if kind == "gz" else zstandard.compress(whole)
    path = tmp_path / "t"
    path.write_bytes(packed[: int(len(packed) * share)])
    with pytest.raises(TraceError, match=r"truncated|not JSON|ends too early"):
        reading(path)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damaged_compressed_data_is_an_error(tmp_path, kind):
    import zstandard

    whole = gzip.decompress(traces.head_path(traces.CONVERSATION).read_bytes())
    packed = bytearray(gzip.compress(whole) if kind == "gz" else zstandard.compress(whole))
    middle = len(packed) // 2
    packed[middle : middle + 40] = bytes(40)
    path = tmp_path / "t"
    path.write_bytes(packed)
    with pytest.raises(TraceError):
        reading(path)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    monkeypatch.setattr(chunks, "LINE_LIMIT", 1000)
    path = text_file(tmp_path / "t", GOOD, '{"timestamp": ' + " " * 5000 + "1}")
    with pytest.raises(TraceError, match="a line is longer than 1,000 bytes"):
        reading(path, block_size=16)


HEADERS = {
    "another version": ({"quire_trace": 2, "block_size": 16}, r"quire_trace is 2"),
    "no block size": ({"quire_trace": 1}, r"missing required field block_size"),
    "no block": ({"quire_trace": 1, "block_size": 0}, r"block_size is 0: expected int >= 1"),
    "unknown ids": ({"quire_trace": 1, "block_size": 1, "ids": "x"}, r"ids is 'x'"),
    "no rows": ({"quire_trace": 1, "block_size": 16}, r"a header and no rows"),
}


@pytest.mark.parametrize(("header", "message"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_cannot_be_is_refused(tmp_path, header, message):
    rows = [] if message.endswith("no rows") else [{"t": 0, "in": 16, "out": 0, "runs": [[0, 1]]}]
    with pytest.raises(TraceError, match=message):
        open_trace(write(tmp_path / "t", [header, *rows]))


def test_another_block_size_than_the_headers_is_refused(tmp_path):
    rows = [{"quire_trace": 1, "block_size": 16}, {"t": 0, "in": 16, "out": 0, "runs": [[0, 1]]}]
    path = write(tmp_path / "t", rows)
    assert len(reading(path, block_size=16)) == 1
    with pytest.raises(ConfigError, match="blocks of 16 tokens, not of 32; with_block_size"):
        open_trace(path, block_size=32)


def test_a_time_before_the_beginning_is_refused(tmp_path):
    bad = {"t": -3, "in": 16, "out": 0, "runs": [[0, 1]]}
    path = write(tmp_path / "t", [{"quire_trace": 1, "block_size": 16}, bad])
    with pytest.raises(TraceError, match=r"row 1: t is -3: expected float >= 0"):
        reading(path)


@pytest.mark.parametrize("hint", [{"reuse": "session"}, {"ttl_s": -1}, {"returns_in_s": -3}])
def test_a_hint_that_cannot_be_is_an_error_of_the_row(tmp_path, hint):
    bad = {"t": 0, "in": 16, "out": 0, "runs": [[0, 1]], "hint": hint}
    path = write(tmp_path / "t", [{"quire_trace": 1, "block_size": 16}, bad])
    with pytest.raises(TraceError, match=r"row 1: .*(session_id|number of seconds)"):
        reading(path)


def test_every_cut_of_a_trace_gives_requests_or_an_error_of_quire(tmp_path):
    whole = "\n".join(json.dumps(row([0, 1, 2, 3, 4], at=i)) for i in range(4)).encode()
    path = tmp_path / "t"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            reading(path)
        except QuireError:
            continue
        assert whole[length : length + 1] in {b"\n", b"{"}
