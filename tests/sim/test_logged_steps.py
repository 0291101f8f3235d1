"""`timings` of quire's answers in logs, as steps of its engine."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_sim.logs import open_log
from quire_sim.logs.steps import MOST_TOKENS, steps_of

TIMINGS = {
    "cache_n": 0, "prompt_n": 20, "prompt_ms": 30.0, "predicted_n": 4, "predicted_ms": 60.0, "queue_ms": 10.0,
    "arrived_at": 1.7e9, "arrived_step": 2, "prompt_steps": [[3, 8, 12], [4, 12, 0]], "last_step": 7, "engine": "e",
}  # fmt: skip
WRONG = [
    {"arrived_step": 3}, {"arrived_step": -1}, {"arrived_step": "2"}, {"arrived_step": 1.5}, {"arrived_step": None},
    {"last_step": 3}, {"last_step": 1 << 80}, {"last_step": -1}, {"last_step": True}, {"last_step": "7"},
    {"prompt_steps": []}, {"prompt_steps": None}, {"prompt_steps": "3"}, {"prompt_steps": [[3, 8]]},
    {"prompt_steps": [[4, 12, 0], [3, 8, 0]]}, {"prompt_steps": [[3, 8, 0], [3, 8, 0]]}, {"prompt_steps": [[3, -1, 0]]},
    {"prompt_steps": [[3, 8, 12]]}, {"prompt_steps": [[3, "8", 0]]}, {"prompt_steps": [3, 8, 0]},
    {"prompt_steps": [[3 + n, 1, 0] for n in range(MOST_TOKENS + 1)]}, {"prompt_steps": {"3": 8}},
    {"predicted_n": -1}, {"predicted_n": MOST_TOKENS + 1}, {"predicted_n": 1e300}, {"predicted_n": []},
    {"queue_ms": -1.0}, {"queue_ms": 1e300}, {"queue_ms": float("nan")}, {"prompt_ms": float("inf")},
    {"predicted_ms": "60"}, {"arrived_at": -1.0}, {"arrived_at": 1e300}, {"arrived_at": None}, {"engine": 3},
]  # fmt: skip


def test_a_whole_answer_tells_steps():
    steps = steps_of({"choices": [], "timings": TIMINGS})
    assert steps.prompts == ((3, 8, 12), (4, 12, 0))
    assert (steps.engine, steps.arrived_step, steps.last_step, steps.num_tokens) == ("e", 2, 7, 4)
    assert (steps.queued_s, steps.answered_s) == pytest.approx((0.01, 0.1))


@pytest.mark.parametrize("event", [{"timings": TIMINGS}, {"response": {"timings": TIMINGS}}])
def test_a_stream_tells_steps(event):
    text = f'event: x\ndata: {{"choices": []}}\n\ndata: {json.dumps(event)}\n\ndata: [DONE]\n\n'
    assert steps_of(text) == steps_of({"timings": TIMINGS})


@pytest.mark.parametrize(
    "answer",
    [None, 3, "", [], {}, {"timings": None}, {"timings": {"cache_n": 3}}, '"prompt_steps"'],
)
def test_answers_without_steps_tell_none(answer):
    assert steps_of(answer) is None


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:40])
def test_timings_that_cannot_be_tell_none(wrong):
    assert steps_of({"timings": TIMINGS | wrong}) is None


@pytest.mark.parametrize("name", sorted(TIMINGS.keys() - {"cache_n", "prompt_n", "engine"}))
def test_timings_that_lack_a_field_tell_none(name):
    assert (
        steps_of({"timings": {key: value for key, value in TIMINGS.items() if key != name}}) is None
    )


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(TIMINGS)), ANY))
def test_any_timings_are_read_or_passed_over(told):
    steps = steps_of({"timings": TIMINGS | told})
    assert steps is None or steps.prompts[0][0] > steps.arrived_step


def test_records_have_the_steps_of_their_answers(tmp_path):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    stream = f"data: {json.dumps({'choices': [], 'timings': TIMINGS})}\n\n"
    answers = [
        {"choices": [], "timings": TIMINGS},
        stream,
        {"choices": []},
        {"timings": TIMINGS | {"last_step": 1}},
    ]
    lines = [
        {"time": 1.7e9 + place, "request": body, "response": answer}
        for place, answer in enumerate(answers)
    ]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, [*lines, lines[0] | {"time": None}])))
    read = [*open_log(path, format="requests")]
    assert [each.steps is not None for each in read] == [True, True, False, False, True]
    assert (read[-1].time_s, read[-1].duration_s) == pytest.approx((1.7e9, 0.1))
