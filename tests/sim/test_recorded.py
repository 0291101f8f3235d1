"""Recorded runs of real engines: read as they are, and met by the simulation."""

import gzip
import json

import pytest
from trace_help import write

from cli_help import refusal, shown, told
from quire.errors import ConfigError, TraceError
from quire_sim.hardware import model_named
from quire_sim.hardware.left_out import FIGURES, errors_like, left_out_runs
from quire_sim.plan import budget
from quire_sim.serving.recorded import Figures, RecordedRun
from quire_sim.trace import open_trace
from traces import HEADS

RTX_4090 = HEADS / "serving_rtx4090_llama8b.jsonl.gz"
TWO_CARDS = HEADS / "serving_rtxpro6000_tp2_qwen32b.jsonl.gz"
ONE_CARD = HEADS / "serving_rtxpro6000_llama8b.jsonl.gz"
EACH = pytest.mark.parametrize("path", [RTX_4090, ONE_CARD, TWO_CARDS], ids=lambda path: path.name)


def row(number, **changes):
    blocks = [*range(3), *range(1000 * number, 1000 * number + 4)]
    made = {"arrival_s": 0.1 * number, "input_tokens": 117, "output_tokens": 20}
    return made | {"block_ids": blocks, "ttft_s": 0.2, "total_s": 1.5} | changes


HEADER = {"engine": "vLLM", "device": "NVIDIA H100 80GB HBM3", "model": "meta-llama/Llama-3.1-8B"}


def recorded(tmp_path, rows=None, **header):
    rows = [row(number) for number in range(5)] if rows is None else rows
    told = {key: value for key, value in (HEADER | header).items() if value is not None}
    return write(tmp_path / "run.jsonl", [told, *rows])


# -- against real engines ------------------------------------------------------------------


@pytest.mark.cases(1)
@EACH
def test_a_recorded_run_is_met_within_what_runs_left_out_were_off_by(path):
    run = RecordedRun(path)
    errors, known = run.compare().errors, run.settings.timing.figure_errors()
    assert known.runs >= 1
    for name in FIGURES:
        assert abs(getattr(errors, name)) <= max(getattr(known, name), 0.03)


def test_every_run_was_left_out_and_met_within_the_bounds():
    assert {each.run for each in left_out_runs()} == {
        path.name.removesuffix(".jsonl.gz") for path in (RTX_4090, ONE_CARD, TWO_CARDS)
    }
    for each in left_out_runs():
        assert abs(each.ttft_mean) <= 0.25
        assert abs(each.ttft_p99) <= 0.25
        assert abs(each.tpot_mean) <= 0.1
        assert abs(each.makespan) <= 0.1


def test_errors_are_those_of_the_runs_most_like_the_model_and_the_device():
    card = errors_like("rtx-pro-6000", experts=False)
    assert (card.runs, card.basis) == (2, "dense models on rtx-pro-6000")
    other = errors_like("h100", experts=False)
    assert (other.runs, other.basis) == (3, "dense models, none of them on h100")
    assert other.tpot_mean == max(abs(each.tpot_mean) for each in left_out_runs())
    routed = errors_like("rtx-4090", experts=True)
    assert (routed.runs, routed.basis) == (3, "other kinds, none of models with routed experts")
    assert routed.largest == max(getattr(routed, name) for name in FIGURES)


@pytest.mark.parametrize("path", [RTX_4090, ONE_CARD], ids=lambda path: path.name)
def test_requests_that_come_before_any_queue_wait_as_long_as_measured(path):
    """Prompts alone with a few decoding sequences: where the engine had warmed up, before requests wait."""
    run = RecordedRun(path)
    served = run.served()
    pairs = [
        (mine.first_token_s - mine.queued_s, row.ttft_s)
        for mine, row in zip(served, run.rows, strict=True)
        if 1.2 < row.timestamp < 3.5
    ]
    assert len(pairs) >= 25
    ratios = sorted(mine / real for mine, real in pairs)
    assert ratios[len(ratios) // 2] == pytest.approx(1, abs=0.1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["busy_unshared", "over_shared"])
def test_a_run_on_a_cpu_is_met_within_ten_percent_after_calibration(name):
    path = HEADS / f"vllm_cpu_{name}.jsonl.gz"
    found = told(
        "simulate", "--recorded", path, "--measured", HEADS / f"vllm_cpu_{name}.steps.jsonl.gz"
    )
    assert found["requests"] > 100
    assert max(map(abs, found["errors"].values())) <= 0.1
    assert found["times_off_by"] == {"step": pytest.approx(0.16, abs=0.06)}
    uncalibrated = told("simulate", "--recorded", path)
    assert max(map(abs, uncalibrated["errors"].values())) > 0.1


def test_the_blocks_that_fit_are_the_engines_within_three_percent():
    run = RecordedRun(RTX_4090)
    blocks = run.compare().blocks
    assert blocks.engine == 2588
    assert blocks.simulated == pytest.approx(blocks.engine, rel=0.03)
    assert blocks.simulated == budget(run.settings.placement, 8192).num_blocks


def test_an_engine_that_does_not_say_how_many_blocks_it_has_has_none_beside_those_simulated():
    blocks = RecordedRun(TWO_CARDS).compare().blocks
    assert blocks.engine is None
    assert blocks.simulated > 20_000


def test_a_plan_for_the_recorded_settings_has_the_blocks_of_the_simulation():
    words = ("--max-num-batched-tokens", 2048, "--max-num-seqs", 128, "--num-gpus", 2)
    made = told("plan", "--model", "qwen3-32b", "--gpu", "rtx-pro-6000", *words)
    found = told("simulate", "--recorded", TWO_CARDS)
    assert made["memory"]["num_blocks"] == found["blocks"]["simulated"]


# -- reading -------------------------------------------------------------------------------


@EACH
def test_a_recorded_run_can_be_read_as_a_trace(path):
    trace = open_trace(path)
    requests = list(trace)
    assert (trace.format, trace.block_size, len(requests)) == ("recorded", 16, 300)
    assert requests[0].time_s == 0
    assert all(each.duration_s > 0 for each in requests)


def test_settings_are_taken_from_wherever_the_first_line_has_them(tmp_path):
    deep = {
        "engine_kwargs": {"tensor_parallel_size": 4, "max_num_seqs": 32, "kv_cache_dtype": "fp8_e4m3",
                          "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.8},
        "kv_cache": {"num_gpu_blocks": 777, "block_size": 32},
        "hardware": {"device_total_memory_bytes": 85_000_000_000},
        "resolved_config": {"model_config": {"enforce_eager": True, "dtype": "torch.float16"},
                            "scheduler_config": {"async_scheduling": False, "max_num_seqs": 99}},
        "unheard_of": {"a": [1, {"b": 2}]},
    }  # fmt: skip
    rows = [row(number, block_ids=[0, number + 1, number + 9]) for number in range(3)]
    settings = RecordedRun(recorded(tmp_path, rows, meta=deep)).settings
    assert (settings.tensor_parallel, settings.max_sequences, settings.max_step_tokens) == (
        4,
        32,
        4096,
    )
    assert (settings.num_blocks, settings.block_size, settings.utilization) == (777, 32, 0.8)
    assert settings.device.name == "h100"
    assert settings.device.memory_bytes == 85_000_000_000
    assert settings.model.kv.per_token == 65_536
    assert settings.model.weight_bytes_per_param == 2.0
    assert (settings.eager, settings.plans_ahead, settings.prefix_caching) == (True, False, True)


def test_blocks_that_an_engine_was_told_to_have_are_not_estimated(tmp_path):
    told = {"num_gpu_blocks_override": 500, "num_gpu_blocks": 499}
    assert RecordedRun(recorded(tmp_path, **told)).compare().blocks.simulated == 500
    two = {"kv_cache_memory_bytes": 16 * 131_072 * 50, "tensor_parallel_size": 2}
    assert RecordedRun(recorded(tmp_path, **two)).compare().blocks.simulated == 100


def test_quires_own_engine_has_its_own_schedule(tmp_path):
    for engine, scheduler in (("vLLM", "first-come"), ("quire", "quire")):
        run = RecordedRun(recorded(tmp_path, engine=engine))
        assert run.settings.cluster(1000, run.settings.timing).scheduler == scheduler
        assert run.compare().simulated.ttft_mean > 0


def test_settings_missing_in_a_recorded_run_are_vllms_defaults(tmp_path):
    large = RecordedRun(recorded(tmp_path)).settings
    assert (large.max_step_tokens, large.max_sequences, large.block_size) == (8192, 1024, 16)
    small = RecordedRun(recorded(tmp_path, device="RTX4090", model="Llama-3.1-8B-FP8")).settings
    assert (small.max_step_tokens, small.max_sequences, small.utilization) == (2048, 256, 0.9)
    assert small.model.weight_bytes_per_param == 1.0
    assert (small.num_blocks, small.plans_ahead, small.eager) == (None, True, False)


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        ({"quantization": "fp8"}, 1.0),
        ({"model": "Llama-3.1-8B-Instruct-FP8-dynamic", "quantization": "compressed-tensors"}, 1.0),
        ({"model": "Meta-Llama-3.1-8B-Instruct-AWQ", "quantization": "awq_marlin"}, 4.15625 / 8),
        ({"dtype": "torch.float32"}, 4.0),
        ({"dtype": "half"}, 2.0),
        ({"model": "gpt-oss-20b", "quantization": "mxfp4"}, model_named("gpt-oss-20b").weight_bytes_per_param),
    ],
)  # fmt: skip
def test_weights_have_the_format_that_the_engine_ran(tmp_path, header, num_bytes):
    model = RecordedRun(recorded(tmp_path, **header)).settings.model
    assert model.weight_bytes_per_param == num_bytes


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"device": "RTX9999"}, "first line: unknown accelerator 'RTX9999'"),
        ({"model": "some-model"}, "first line: unknown model 'some-model'"),
        ({"model": None}, "there is no model or model_name; a recorded run says which"),
        ({"device": None}, "there is no device or device_name"),
        ({"pipeline_parallel_size": 2}, "pipelines are not simulated"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size is '2'; it is a whole number"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it is 1 or more"),
        ({"max_num_seqs": True}, "max_num_seqs is True; it is a whole number"),
        ({"enforce_eager": 1}, "enforce_eager is 1; it is true or false"),
        ({"kv_cache_dtype": "fp3"}, "unknown number format 'fp3'"),
        ({"block_size": -16}, "block_size in its first line is -16"),
    ],
)
def test_a_first_line_that_cannot_be_used_says_why(tmp_path, header, says):
    with pytest.raises((ConfigError, TraceError), match=says):
        RecordedRun(recorded(tmp_path, **header))


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"tensor_parallel_size": 3}, "3 devices cannot share the 32 heads"),
        ({"gpu_memory_utilization": 1.2}, "utilization is 1.2; it is above 0, at most 1"),
        ({"model": "llama-3.1-70b"}, "take more devices per replica"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, header, says):
    assert says in refusal("simulate", "--recorded", recorded(tmp_path, **header))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("changes", "sequences"),
    [
        ({"device": "NVIDIA H100 80GB HBM3"}, 256),
        ({"device": "NVIDIA A100-SXM4-40GB"}, 16),
        ({"device": "NVIDIA L40S", "model": "Qwen/Qwen3-30B-A3B", "tensor_parallel_size": 2}, 256),
        ({"device": "H100", "model": "meta-llama/Llama-3.1-70B", "tensor_parallel_size": 4}, 64),
        ({"device": "H200", "model": "Qwen3-30B-A3B", "data_parallel_size": 2}, 256),
    ],
)
def test_the_same_load_on_other_devices_models_and_parallelism_is_simulated(
    tmp_path, changes, sequences
):
    _, *rows = gzip.decompress(RTX_4090.read_bytes()).splitlines()
    changes = {"tensor_parallel_size": 1, "data_parallel_size": 1} | changes
    said = {"engine": "vLLM", "model": "Llama-3.1-8B", "block_size": 16, "max_num_seqs": sequences}
    path = tmp_path / "other.jsonl"
    path.write_bytes(b"\n".join([json.dumps(said | changes).encode(), *rows]))
    run = RecordedRun(path)
    found = run.compare()
    assert run.settings.max_sequences == sequences
    assert found.blocks.engine is None
    assert found.blocks.simulated > 1000
    assert 0.001 < found.simulated.tpot_mean < 0.2
    assert 0 < found.simulated.ttft_mean <= found.simulated.ttft_p99 < found.simulated.makespan


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ttft_s": None}, "row 2"),
        ({"total_s": -1.0}, "row 2"),
        ({"input_tokens": "many"}, "row 2: input_tokens"),
        ({"arrival_s": -0.5}, "row 2"),
        ({"block_ids": [1]}, "row 2: 1 block ids are fewer than the 7 full blocks"),
    ],
)
def test_a_row_that_cannot_be_is_named(tmp_path, change, says):
    with pytest.raises(TraceError, match=says):
        RecordedRun(recorded(tmp_path, [row(0), row(1, **change)]))


def test_a_recorded_run_has_requests(tmp_path):
    with pytest.raises(TraceError, match="settings and no rows"):
        RecordedRun(recorded(tmp_path, []))
    with pytest.raises(ConfigError, match="blocks of 16 tokens, not of 32"):
        open_trace(recorded(tmp_path), block_size=32)


# -- what is compared ----------------------------------------------------------------------


def test_errors_are_signed_shares_of_what_was_measured():
    simulated, measured = Figures(2.0, 3.0, 0.05, 10.0), Figures(1.0, 4.0, 0.05, 0.0)
    assert simulated.off(measured) == Figures(1.0, -0.25, 0.0, 0.0)


def test_measured_figures_come_from_the_rows_of_a_recorded_run(tmp_path):
    rows = [row(0, ttft_s=0.1, total_s=2.0), row(1, ttft_s=0.3, total_s=0.3, output_tokens=1)]
    measured = RecordedRun(recorded(tmp_path, rows)).measured
    assert measured == Figures(
        pytest.approx(0.2), pytest.approx(0.298), pytest.approx(0.1), pytest.approx(2.0)
    )


def test_without_prefix_caching_nothing_is_found_again(tmp_path):
    rows = [row(number, arrival_s=5.0 * number, input_tokens=3999, block_ids=[*range(249)])
            for number in range(4)]  # fmt: skip
    found = {
        caching: RecordedRun(recorded(tmp_path, rows, enable_prefix_caching=caching)).compare()
        for caching in (True, False)
    }
    assert found[False].simulated.ttft_mean > 2 * found[True].simulated.ttft_mean


@pytest.mark.parametrize(
    ("model", "replicas", "ranks"), [("llama-3.1-8b", 2, 1), ("qwen3-30b-a3b", 1, 2)]
)
def test_groups_that_share_experts_are_ranks_of_one_replica_and_others_are_apart(
    tmp_path, model, replicas, ranks
):
    told = {"model": model, "data_parallel_size": 2, "max_num_seqs": 64}
    run = RecordedRun(recorded(tmp_path, **told))
    cluster = run.settings.cluster(1000, run.settings.timing)
    assert (cluster.num_replicas, cluster.num_ranks) == (replicas, ranks)
    assert (cluster.limits.num_blocks, cluster.limits.max_sequences) == (1000, 64)
    assert run.compare().blocks.simulated > 10_000


def test_the_json_has_the_errors_and_the_blocks():
    found = told("simulate", "--recorded", RTX_4090)
    assert set(found["errors"]) == {"ttft_mean", "ttft_p99", "tpot_mean", "makespan"}
    assert set(found["blocks"]) == {"simulated", "engine"}
    assert found["errors"]["makespan"] == pytest.approx(
        found["simulated"]["makespan"] / found["measured"]["makespan"] - 1
    )
    assert set(found["times_off_by"]) == {*FIGURES, "runs", "basis"}
    assert found["times_off_by"]["ttft_mean"] == errors_like("rtx-4090", experts=False).ttft_mean
    assert json.dumps(found, allow_nan=False)


def test_the_table_has_both_and_by_how_much_they_differ():
    text = shown("simulate", "--recorded", RTX_4090)
    for part in ("simulated", "measured", "off by", "2,588", "first token, p99"):
        assert part in text
    assert "left out: dense models on rtx-4090" in " ".join(text.split())


def test_a_recorded_run_brings_its_own_settings():
    says = refusal("simulate", "--recorded", RTX_4090, "--gpu", "h100", "--replicas", 2)
    assert "--recorded takes all settings from its file; leave out --gpu, --replicas" in says
