"""The demo shows conversations: each question has an answer of its own."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="install it with: make setup")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import torch
from tiny_talks import ASKED, MORE, Talks, system_text
from transformers import AutoModelForCausalLM, AutoTokenizer

import quire
from quire.cli.chat import message, prompt_inputs, reply_text
from quire.cli.demo import NUM_TURNS
from quire.cli.talks import REAL_TALKS, TINY_TALKS
from turns import few


@pytest.fixture(scope="module", params=few([1, 3], 1))
def num_talks(request):
    """Return how many of the demo's conversations are held."""
    return request.param


@pytest.fixture(scope="module")
def replies(num_talks):
    """The demo's conversations, all of its turns, under its system prompt."""
    model = AutoModelForCausalLM.from_pretrained(quire.demo_model())
    tokenizer = AutoTokenizer.from_pretrained(quire.demo_model())
    cache = quire.PrefixCache(model, "64MiB")
    system = message("system", TINY_TALKS.system)
    found = []
    for questions in TINY_TALKS.questions[:num_talks]:
        talk = [system]
        for question in questions[:NUM_TURNS]:
            ids = prompt_inputs(tokenizer, [*talk, message("user", question)])["input_ids"]
            output = cache.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64)
            found.append(reply_text(tokenizer, output[0, ids.shape[1] :].tolist()))
            talk += [message("user", question), message("assistant", found[-1])]
    return found


@pytest.mark.ci
def test_questions_get_different_answers_in_whole_sentences(replies):
    assert len(set(replies)) >= len(replies) - 2
    assert sum(reply.endswith(".") and reply[0].isupper() for reply in replies) >= len(replies) - 2


@pytest.mark.ci
def test_answers_are_those_that_the_model_was_taught(replies, num_talks):
    taught = [answer for talk in ASKED[:num_talks] for _, answer in talk[:NUM_TURNS]]
    assert (
        sum(said == answer for said, answer in zip(replies, taught, strict=True))
        >= 7 * num_talks // 3
    )


def test_answers_that_quire_tiny_was_trained_on_fit_the_demo():
    answers = [answer for talk in (*ASKED, *MORE) for _, answer in talk]
    assert max(map(len, answers)) < 64
    assert len(set(answers)) == len(answers)


def test_only_answers_count_in_a_lesson():
    import numpy as np

    tokens, labels = Talks(["a stranger"], np.random.default_rng(1)).row(700)
    said = labels != -100
    assert (tokens[said] == labels[said]).all()
    assert 40 < said.sum() < 500


def test_a_lesson_has_a_system_prompt_of_any_length():
    for wanted in (1, 300, 3000, 9000):
        text = system_text(wanted)
        assert wanted <= len(text) <= max(wanted, 200) + 400
        assert text.endswith(".")


@pytest.mark.parametrize("talks", [TINY_TALKS, REAL_TALKS])
def test_conversations_have_equally_many_questions_and_none_twice(talks):
    assert len({len(asked) for asked in talks.questions}) == 1
    questions = [question for asked in talks.questions for question in asked]
    assert len(set(questions)) == len(questions)
