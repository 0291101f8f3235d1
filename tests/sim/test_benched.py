"""Results of benchmarks beside their simulation: the shapes that vLLM, SGLang, guidellm and LLMServingSim write."""

import json

import pytest

from cli_help import refusal, told
from quire.errors import ConfigError, TraceError
from quire_sim.serving.benched import read_benched
from quire_sim.serving.recorded import RecordedRun

SIZES = [(120, 16), (300, 4), (64, 8)]
STARTS = [100.5, 100.0, 101.25]
TTFTS = [0.08, 0.05, 0.06]
EACH_S = 0.01

GIVEN = {"device": "rtx-4090", "model": "llama-3.1-8b"}
WORDS = ("--gpu", "rtx-4090", "--model", "llama-3.1-8b")


def bench_serve(**changes):
    """A result of `vllm bench serve --save-result --save-detailed`, as release 0.32 writes it."""
    count = len(SIZES)
    return {
        "date": "20261130-131613", "endpoint_type": "openai", "backend": "openai", "label": None,
        "model_id": "meta-llama/Llama-3.1-8B", "tokenizer_id": "meta-llama/Llama-3.1-8B",
        "num_prompts": count, "gpu": "RTX4090", "data_parallel_size": "1", "request_rate": 8.0,
        "burstiness": 1.0, "max_concurrency": None, "duration": 1.77, "completed": count, "failed": 0,
        "total_input_tokens": 484, "total_output_tokens": 28, "request_throughput": 6.8,
        "request_goodput": None, "output_throughput": 108.7,
        "input_lens": [prompt for prompt, _ in SIZES], "output_lens": [output for _, output in SIZES],
        "ttfts": TTFTS, "itls": [[EACH_S] * (output - 1) for _, output in SIZES],
        "latencies": [0.5] * count, "start_times": STARTS, "queue_times": [1e-4] * count,
        "generated_texts": ["but the"] * count, "errors": [""] * count, "mean_ttft_ms": 63.3,
    } | changes  # fmt: skip


def guidellm_old():
    """A report of guidellm 0.2 and 0.3: times and lengths stand in the request."""
    done = [
        {"type_": "generative_text_response", "request_id": str(at), "request_type": "text_completions",
         "scheduler_info": {"requested": True, "completed": True}, "prompt": "a", "output": "b",
         "prompt_tokens": prompt, "output_tokens": output, "start_time": start,
         "end_time": start + ttft + 1.0, "first_token_time": start + ttft,
         "last_token_time": start + ttft + EACH_S * (output - 1), "request_latency": ttft + 1.0,
         "time_to_first_token_ms": 1000 * ttft, "inter_token_latency_ms": 1000 * EACH_S}
        for at, ((prompt, output), start, ttft) in enumerate(zip(SIZES, STARTS, TTFTS, strict=True))
    ]  # fmt: skip
    benchmark = {
        "type_": "generative_benchmark", "id_": "1", "args": {"profile": {"type_": "constant"}},
        "worker": {"backend_model": "meta-llama/Llama-3.1-8B"},
        "requests": {"successful": done, "incomplete": [{"request_id": "x"}], "errored": [], "total": None},
    }  # fmt: skip
    return {"benchmarks": [benchmark]}


def guidellm_new():
    """A report of guidellm since 0.4: times stand in `info.timings`, lengths in the metrics of usage."""
    done = [
        {"type_": "generative_request_stats", "request_id": str(at), "response_id": None,
         "request_args": "{}", "output": "b", "reasoning_output": None, "tool_calls": None,
         "info": {"request_id": str(at), "status": "completed", "timings": {
             "targeted_start": start, "resolve_start": start, "request_start": start,
             "first_token_iteration": start + ttft, "token_iterations": output,
             "last_token_iteration": start + ttft + EACH_S * (output - 1),
             "request_end": start + 2.0, "resolve_end": start + 2.0}},
         "input_metrics": {"text_tokens": prompt, "total_tokens": prompt, "cached_tokens": 0},
         "output_metrics": {"text_tokens": output, "total_tokens": output},
         "request_start_time": start, "request_end_time": start + 2.0, "request_latency": 2.0,
         "prompt_tokens": prompt, "output_tokens": output, "time_to_first_token_ms": 1000 * ttft}
        for at, ((prompt, output), start, ttft) in enumerate(zip(SIZES, STARTS, TTFTS, strict=True))
    ]  # fmt: skip
    requests = {
        "successful": done,
        "incomplete": [],
        "errored": [{"request_id": "y"}],
        "total": None,
    }
    benchmark = {"type_": "generative_benchmark", "config": {}, "requests": requests}
    args = {
        "target": "http://localhost:8000",
        "model": "meta-llama/Llama-3.1-8B",
        "backend": "openai_http",
    }
    return {"metadata": {"version": 1}, "args": args, "benchmarks": [benchmark]}


def save(path, *documents, indent=None):
    path.write_text("\n".join(json.dumps(each, indent=indent) for each in documents))
    return path


def sizes_and_times(rows):
    return [
        (row.input_length, row.output_length, round(row.timestamp, 6), round(row.ttft_s, 6),
         round(row.duration_s, 6))
        for row in rows
    ]  # fmt: skip


EXPECTED = sorted(
    (
        (prompt, output, start - 100.0, ttft, round(ttft + EACH_S * (output - 1), 6))
        for (prompt, output), start, ttft in zip(SIZES, STARTS, TTFTS, strict=True)
    ),
    key=lambda each: each[2],
)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("made", [bench_serve, guidellm_old, guidellm_new])
def test_results_of_clients_give_each_request_with_its_times(tmp_path, made, indent):
    found = read_benched(save(tmp_path / "result.json", made(), indent=indent))
    assert sizes_and_times(found.rows) == EXPECTED
    assert found.by_clients
    assert found.header["model"] == "meta-llama/Llama-3.1-8B"
    assert "names no blocks" in found.notes[0]


def test_requests_that_failed_are_left_out_and_counted(tmp_path):
    result = bench_serve(ttfts=[0.08, 0.0, 0.06], errors=["", "Internal Server Error", ""])
    found = read_benched(save(tmp_path / "result.json", result))
    assert len(found.rows) == 2
    assert found.notes[1] == "1 requests without an answer are left out"
    old = read_benched(save(tmp_path / "old.json", guidellm_old()))
    assert old.notes[1] == "1 requests without an answer are left out"


def test_the_requests_of_llmservingsim_have_the_settings_beside_them(tmp_path):
    rows = [
        {"request_id": str(at), "input_toks": prompt, "output_toks": output, "arrival_time": 1.7e9 + start,
         "queued_ts": start + 5, "scheduled_ts": start + 5.01, "first_token_ts": start + 5 + ttft,
         "last_token_ts": start + 5 + ttft + EACH_S * (output - 1)}
        for at, ((prompt, output), start, ttft) in enumerate(zip(SIZES, STARTS, TTFTS, strict=True))
    ]  # fmt: skip
    meta = {
        "schema_version": 1, "model": "meta-llama/Llama-3.1-8B", "vllm_version": "0.19.0",
        "engine_kwargs": {"tensor_parallel_size": 2, "max_num_seqs": 128, "max_num_batched_tokens": 2048},
        "hardware": {"device_name": "NVIDIA RTX PRO 6000 Blackwell Server Edition"},
    }  # fmt: skip
    path = save(tmp_path / "requests.jsonl", *rows)
    save(tmp_path / "meta.json", meta)
    run = RecordedRun(path)
    assert sizes_and_times(run.rows) == EXPECTED
    assert not run.by_clients
    settings = run.settings
    assert (settings.device.name, settings.tensor_parallel, settings.max_sequences) == (
        "rtx-pro-6000", 2, 128,
    )  # fmt: skip
    assert run.compare().simulated.makespan > 1.25


def test_a_result_is_compared_by_the_clients_clock_with_settings_from_the_command(tmp_path):
    path = save(tmp_path / "result.json", bench_serve(gpu=None))
    found = told("simulate", "--recorded", path, "--gpu", "rtx-4090", "--max-num-seqs", 2)
    assert (found["requests"], found["times_from"], found["device"]) == (3, "clients", "rtx-4090")
    assert found["measured"]["ttft_mean"] == pytest.approx(sum(TTFTS) / 3)
    assert found["measured"]["tpot_mean"] == pytest.approx(EACH_S)
    served = RecordedRun(path, GIVEN)
    ttfts = [each.ttft_s for each in served.served()]
    assert served.compare().simulated.ttft_mean == pytest.approx(sum(ttfts) / 3)


def test_metadata_of_a_result_are_its_settings(tmp_path):
    settings = RecordedRun(
        save(tmp_path / "r.json", bench_serve(tensor_parallel_size="2"))
    ).settings
    assert (settings.device.name, settings.tensor_parallel) == ("rtx-4090", 2)


def test_a_benchmark_of_a_report_with_several_is_named(tmp_path):
    report = guidellm_old()
    slow = json.loads(json.dumps(report["benchmarks"][0]))
    for each in slow["requests"]["successful"]:
        each["time_to_first_token_ms"] *= 2
    report["benchmarks"].append(slow)
    path = save(tmp_path / "report.json", report)
    with pytest.raises(
        ConfigError, match=r"2 benchmarks; name one, from report.json#1 to report.json#2"
    ):
        read_benched(path)
    second = read_benched(tmp_path / "report.json#2")
    assert second.rows[0].ttft_s == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="and no #3"):
        read_benched(tmp_path / "report.json#3")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ttfts": None, "itls": None}, "has means and no times of requests .ttfts, itls."),
        ({"start_times": None}, "does not say when requests came"),
        ({"output_lens": [1]}, "lists of requests have different lengths"),
        ({"input_lens": "many"}, "input_lens is no list"),
        ({"ttfts": [0.0] * 3}, "none of its 3 requests has an answer"),
        ({"start_times": ["x", "y", "z"]}, "request 1"),
        ({"itls": [1, 2, 3]}, "goes on otherwise"),
    ],
)
def test_results_without_what_is_needed_say_what_to_do(tmp_path, changes, says):
    with pytest.raises(TraceError, match=says):
        read_benched(save(tmp_path / "result.json", bench_serve(**changes)))


def test_requests_of_an_old_release_that_came_at_once_need_no_times(tmp_path):
    result = bench_serve(request_rate="inf")
    del result["start_times"]
    found = read_benched(save(tmp_path / "result.json", result))
    assert {row.timestamp for row in found.rows} == {0.0}


def test_files_with_several_results_workloads_and_missing_devices_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="several results, a line each"):
        read_benched(save(tmp_path / "two.json", bench_serve(), bench_serve()))
    workload = {"input_toks": 10, "output_toks": 5, "arrival_time_ns": 0, "input_tok_ids": [1, 2]}
    with pytest.raises(TraceError, match="row 1 has no arrival_time and was not measured"):
        read_benched(save(tmp_path / "work.jsonl", workload))
    path = save(tmp_path / "result.json", bench_serve(gpu=None))
    assert "does not say which device it measured: name it with --gpu" in refusal(
        "simulate", "--recorded", path
    )
    path = save(tmp_path / "report.json", {**guidellm_new(), "args": {}})
    assert "does not say which model it measured: name it with --model" in refusal(
        "simulate", "--recorded", path, "--gpu", "h100"
    )
    says = refusal("simulate", "--recorded", path, *WORDS, "--replicas", 2)
    assert "leave out --replicas" in says
