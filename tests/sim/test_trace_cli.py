"""quire trace: what a trace is like, and converting it."""

import numpy as np
import pytest
from trace_help import row, write

import traces
from cli_help import refusal, shown, told
from quire_sim.trace import open_trace
from turns import few_rows

PUBLISHED = [
    (traces.CONVERSATION, 288_500, 182_790, 37.36),
    (traces.AGENT, 247_466, 24_751, 89.73),
    (traces.CODING_AGENT, 47_061_278, 1_727_499, 96.31),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "references", "unique", "ceiling"), few_rows(PUBLISHED, *PUBLISHED[:2])
)
def test_info_gives_the_published_numbers_of_whole_traces(name, references, unique, ceiling):
    found = told("trace", "info", traces.whole_path(name))
    assert (found["references"], found["unique_blocks"]) == (references, unique)
    assert round(100 * found["ceiling"], 2) == ceiling


def test_info_counts_what_the_rows_say(tmp_path):
    rows = [
        row([0, 1, 2, 3], at=0, session_id="a"),
        row([0, 1, 4, 5], rest=8, at=60_000, session_id="b"),
        row([], at=61_000),
        row([0, 1, 4, 5], rest=8, at=90_000, session_id="a"),
    ]
    path = write(tmp_path / "t", rows)
    found = told("trace", "info", path, "--trace-block-size", 16)
    assert (found["rows"], found["requests"], found["without_prompt"]) == (4, 3, 1)
    assert (found["span_s"], found["sessions"], found["violations"]) == (90.0, 2, 0)
    assert (found["prompt_tokens"], found["output_tokens"]) == (64 + 56 + 56, 3)
    assert (found["references"], found["unique_blocks"]) == (12, 6)
    assert found["footprint_tokens"] == 6 * 16
    assert found["ceiling"] == (5 * 16 + 8) / 176
    assert found["prompt_length"]["max"] == 64
    assert found["reuse_blocks"]["percentiles"]["max"] == 4
    assert found["reuse_seconds"]["percentiles"]["max"] == 60.0


@pytest.mark.ci
def test_distances_are_those_of_a_list_kept_block_by_block(tmp_path):
    path = tmp_path / "t.gz"
    path.write_bytes(traces.head_path(traces.AGENT).read_bytes())
    found = told("trace", "info", path)
    stack, distances, gaps, last = [], [], [], {}
    for request in open_trace(path):
        blocks = request.blocks.tolist()
        for block in blocks:
            if block in last:
                distances.append(len(stack) - stack.index(block))
                gaps.append(request.time_s - last[block])
            last[block] = request.time_s
        used = set(blocks)
        stack = [block for block in stack if block not in used] + blocks[::-1]
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
        at = int(np.ceil(share * len(distances))) - 1
        assert found["reuse_blocks"]["percentiles"][name] == sorted(distances)[at]
        assert found["reuse_seconds"]["percentiles"][name] == sorted(gaps)[at]
    below = 0.0
    for end, share in found["reuse_blocks"]["histogram"]:
        assert share == pytest.approx(np.mean([below < d <= end for d in distances]))
        below = end
    for document in (found["reuse_blocks"], found["reuse_seconds"]):
        assert sum(share for _, share in document["histogram"]) == pytest.approx(1)


def test_info_draws_sizes_and_distances():
    text = shown("trace", "info", traces.head_path(traces.CONVERSATION))
    for part in ("mooncake", "ceiling", "footprint", "blocks between uses", "time between uses"):
        assert part in text


def test_info_says_when_nothing_comes_back(tmp_path):
    path = write(tmp_path / "t", [row([0, 1, 2, 3])])
    assert "No block is used twice" in shown("trace", "info", path)


def test_info_says_that_ids_were_renamed(tmp_path):
    path = write(tmp_path / "t", [row([0, 1, 2, 3]), row([9, 1, 2, 3])])
    assert told("trace", "info", path)["violations"] == 1
    assert "renamed by prefix" in shown("trace", "info", path)


def test_convert_writes_a_trace_that_reads_the_same(tmp_path):
    source, target = traces.head_path(traces.AGENT), tmp_path / "t.jsonl.gz"
    written = told("trace", "convert", source, target)
    assert written["requests"] == sum(1 for _ in open_trace(source))
    assert (written["block_size"], written["bytes"]) == (16, target.stat().st_size)
    before, after = (
        [(r.time_s, r.prompt_tokens, r.blocks.tolist()) for r in open_trace(path)]
        for path in (source, target)
    )
    assert before == after


def test_convert_makes_larger_blocks(tmp_path):
    target = tmp_path / "t"
    words = ("trace", "convert", traces.head_path(traces.AGENT), target, "--to-block-size", 64)
    assert "blocks of 64 tokens" in " ".join(shown(*words).split())
    assert open_trace(target).block_size == 64


@pytest.mark.parametrize("command", ["info", "convert"])
def test_a_bad_file_is_one_line_and_exit_code_2(tmp_path, command):
    path = write(tmp_path / "t", [row([0, 1, 2, 3]), row([0]) | {"input_length": -3}])
    others = [tmp_path / "out"] if command == "convert" else []
    assert "row 2: input_length is -3" in refusal("trace", command, path, *others)
    assert not (tmp_path / "out").exists()
