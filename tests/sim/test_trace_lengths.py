"""CSV traces of lengths and times: Azure's, BurstGPT's and Vidur's."""

import gzip

import pytest

from cli_help import refusal, told
from quire.errors import ConfigError, TraceError
from quire_sim.trace import Findings, open_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,20000,5000
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:00.001163+00:00,1452,3
2024-05-12 00:00:00.102+00:00,586,47
"""
AZURE_IMAGES = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-15 00:00:00.0000000,2,900,120
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
120,GPT-4,300,0,300,API log
"""
BURST_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log
19440161.0,d5983bf9-4b48-497b-892b-a58995247443,2,ChatGPT,36,29,65,Conversation log
"""
VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
"""


def saved(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize(
    ("text", "name", "rows"),
    [
        (AZURE, "azure", [(0.0, 374, 44), (4.314579, 396, 109), (60.0, 20000, 5000)]),
        (AZURE_2024, "azure", [(0.0, 1452, 3), (0.100837, 586, 47)]),
        (AZURE_IMAGES, "azure", [(0.0, 900, 120)]),
        (BURST, "burstgpt", [(0.0, 472, 18), (40.0, 1087, 230)]),
        (BURST_2, "burstgpt", [(0.0, 906, 446), (51.0, 36, 29)]),
        (VIDUR, "vidur", [(0.0, 374, 44), (4.314579, 396, 109)]),
    ],
    ids=["2023", "2024", "images", "burst", "sessions", "vidur"],
)
@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_lengths_and_times_are_read(tmp_path, text, name, rows, ending):
    trace = open_trace(saved(tmp_path, text, f"trace.{ending}"))
    found = list(trace)
    assert (trace.format, trace.block_size, trace.names_blocks) == (name, 16, False)
    assert [
        (round(each.time_s, 6), each.prompt_tokens, each.output_tokens) for each in found
    ] == rows
    assert all(not each.num_blocks for each in found)


def test_sessions_and_durations_are_read_and_what_failed_is_counted(tmp_path):
    first, _ = open_trace(saved(tmp_path, BURST_2))
    assert (first.session, first.duration_s) == ("1722ac82-0a46-4bf0-aa08-89794e7a2b3f", 43.0)
    report = Findings()
    list(open_trace(saved(tmp_path, BURST)).read(report))
    assert report.notes == [
        "it names no blocks, so each prompt is new and nothing is found again",
        "1 requests without an answer are left out",
    ]
    list(open_trace(saved(tmp_path, AZURE_IMAGES)).read(report := Findings()))
    assert "images are left out" in report.notes[-1]


def test_names_of_columns_may_have_a_byte_order_mark_quotes_and_other_cases(tmp_path):
    text = '\ufeff"Arrived_At","Num_Prefill_Tokens","NUM_DECODE_TOKENS"\r\n0,7,2\r\n'
    (request,) = open_trace(saved(tmp_path, text))
    assert (request.prompt_tokens, request.output_tokens) == (7, 2)


def test_simulate_plays_lengths_and_what_asks_for_hits_refuses_them(tmp_path):
    path = saved(tmp_path, VIDUR)
    found = told("simulate", "--trace", path, "--model", "llama-3.1-8b")
    assert (found["num_requests"], found["hit_rate"]) == (2, 0.0)
    for words in (
        ("replay", path),
        ("curve", path),
        ("plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--trace", path),
        ("trace", "convert", path, tmp_path / "out.jsonl"),
    ):
        assert "quire simulate --trace plays it" in refusal(*words)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_prefill_tokens,num_decode_tokens,num_total_tokens\n1,2,3\n", "lengths and no times"),
        ("a,b,c\n1,2,3\n", "a CSV file of no trace that is known; its columns are a,b,c"),
        (VIDUR + "1.0,5,5\n", "row 3: time goes backwards by 3.31"),
        (VIDUR + "9,many,5\n", "row 3: num_prefill_tokens is 'many'; it is a whole number"),
        (VIDUR + "9,-1,5\n", "num_prefill_tokens is '-1'"),
        (VIDUR + "9,1.5,5\n", "num_prefill_tokens is '1.5'"),
        (VIDUR + "9,nan,5\n", "num_prefill_tokens is 'nan'"),
        (VIDUR + "9,5\n", "num_decode_tokens is ''"),
        (VIDUR + "soon,5,5\n", "arrived_at is 'soon'; it is seconds, or a date and time"),
        (VIDUR + "inf,5,5\n", "row 3"),
        (VIDUR + "nan,5,5\n", "row 3"),
        (
            "arrived_at,num_prefill_tokens,num_decode_tokens\n0,0,3\n1,4,0\n",
            "none of its 2 rows has",
        ),
    ],
)
def test_a_csv_file_that_cannot_be_says_why_and_what_to_do(tmp_path, text, says):
    with pytest.raises(TraceError, match=says):
        list(open_trace(saved(tmp_path, text)))


def test_a_format_that_is_named_needs_its_columns(tmp_path):
    with pytest.raises(TraceError, match="has no column"):
        list(open_trace(saved(tmp_path, VIDUR), format="azure"))
    with pytest.raises(ConfigError, match="leave the tokenizer out"):
        open_trace(saved(tmp_path, VIDUR), tokenizer="x")
