"""Many requests at once: the same load for each system, and rows of the fields that are promised."""

import stat
import sys

import pytest
import torch
from cli_help import told

from quire.bench import serve_rows, serve_systems
from quire.bench.serve_loads import LONGEST, ServeLoad, TrafficLoad, waves
from quire.bench.serve_rows import ServeChoice
from quire.bench.serve_systems import ServedModelFiles
from quire.errors import ConfigError
from quire.sim.workload import Chat, Lognormal

FIELDS = {
    "workload", "system", "model", "dtype", "requests_per_s", "ttft_ms_median", "itl_ms_median", "cached_share"
}  # fmt: skip
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


def test_all_systems_generate_the_same_and_tell_their_times(tmp_path):
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


def test_what_is_not_there_is_refused_where_it_was_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="vllm_environment"):
        serve_rows.rows(ServeChoice(systems=["vllm-cpu"], vllm=tmp_path / "none"))
    for wrong in ({"rows": ["nowhere"]}, {"systems": ["nothing"]}, {"dtypes": ["int8"]}):
        with pytest.raises(ValueError, match="no rows named"):
            serve_rows.rows(ServeChoice(**wrong))
