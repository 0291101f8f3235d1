"""`quire simulate`: a table and small pictures for people, JSON for programs."""

import pytest
from trace_help import write

from cli_help import refusal, shown, told


@pytest.fixture
def command(tmp_path):
    rows = []
    for i in range(60):
        blocks = [*range(8), *range(1000 * i, 1000 * i + i % 5)]
        length = {"input_length": 512 * len(blocks) + 9, "output_length": 20}
        rows.append({"timestamp": 100 * i, **length, "hash_ids": [*blocks, 900_000 + i]})
    return ("simulate", "--trace", write(tmp_path / "trace.jsonl", rows))


def test_json_is_the_same_to_the_byte_each_time(command):
    words = ("--replicas", 2, "--arrivals", "poisson:20", "--seed", 3, "--json")
    first = shown(*command, *words)
    assert shown(*command, *words) == first
    assert shown(*command, *words[:-2], 4, "--json") != first


def test_json_names_the_settings_and_the_figures(command):
    words = ("--below", "host=1GiB@50GB/s", "--slo-ttft", 5, "--kv-memory", "4GiB")
    found = told(*command, *words)
    assert (found["model"], found["gpu"], found["router"]) == ("llama-3.1-8b", "h100", "prefix")
    assert (found["num_blocks"], found["block_size"]) == (64, 512)
    assert found["num_requests"] == 60
    assert found["goodput"]["share"] == 1.0
    assert 0 < found["hit_rate"] < 1
    assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["max"]
    assert found["tiers"][0]["name"] == "host"
    assert len(found["timeline"]["waiting"]) == len(found["timeline"]["until_s"]) == 60


def test_the_table_shows_times_throughput_and_queues(command):
    text = shown(*command, "--replicas", 2, "--slo-ttft", 1)
    for part in ("first token", "p99", "throughput", "goodput", "hit rate", "waiting", "running"):
        assert part in text
    assert "60 were fast enough" in text


def test_an_overloaded_service_says_so(command):
    text = shown(*command, "--model", "llama-3.1-70b", "--num-gpus", 2, "--speed", 100)
    assert "overloaded: " in text
    assert "replicas" in text


def test_no_requests_give_a_sentence_and_empty_json(command):
    assert "No requests" in shown(*command, "--num-requests", 0)
    assert told(*command, "--num-requests", 0)["num_requests"] == 0


def test_requests_and_time_can_be_limited(command):
    def count(*words):
        return told(*command, *words)["num_requests"]

    assert count("--num-requests", 7) == 7
    assert count("--duration", 2) == 21
    assert count("--arrivals", "closed:4:0.1", "--num-requests", 20) == 20
    assert count("--block-size", 1024) == 60


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--router", "prefx"), "did you mean prefix"),
        (("--model", "lama-3.1-8b"), "did you mean llama-3.1-8b"),
        (("--gpu", "h10"), "did you mean h100"),
        (("--policy", "nope"), "unknown policy 'nope'"),
        (("--arrivals", "poison:2"), "did you mean poisson"),
        (("--arrivals", "poisson:2", "--speed", "2"), "--speed 2 changes the times of a trace"),
        (("--below", "host"), "'host' is not a tier"),
        (("--kv-memory", "1KiB"), "holds not one block of 512 tokens"),
        (("--kv-memory", "256MiB"), "row 1: 4105 tokens of prompt and 20 of output need 10 blocks"),
        (("--replicas", "0"), "num_replicas"),
        (("--slo-ttft", "0"), "ttft_s is a number above 0"),
        (("--model", "llama-3.1-70b"), "take more devices per replica"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, words, message):
    assert message in refusal(*command, *words)
