"""SmolLM2 135M Instruct: full attention in each layer, and a chat template."""

import inspect

import pytest
import torch
from real_contract import Borders, Evictions, Preemptions
from real_help import NEAR, TIE, asked, cache_of, lent, plain, shared_head, text
from serve_help import command

import plain_http
import real_models

NAME = "smollm2-135m"
SYSTEM = f"Answer questions about these Python functions. {inspect.getdoc(sorted)} {inspect.getdoc(print)} {inspect.getdoc(open)[:1200]}"
pytestmark = [pytest.mark.system(NAME), pytest.mark.slow]


class TestSmolLM2(Preemptions):
    name, num_shared = NAME, 160


@pytest.mark.long
class TestSmolLM2Long(Borders, Evictions):
    name = NAME


def chat(*said):
    """The ids of a conversation that begins with the system prompt; the user and the model take turns."""
    words = [{"role": "system", "content": SYSTEM}]
    words += [
        {"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(said)
    ]
    return lent(NAME)[1].apply_chat_template(words, add_generation_prompt=True)["input_ids"]


def test_conversations_share_the_system_prompt_and_each_turn_finds_those_before_it():
    cache, stored = cache_of(NAME, 80), []
    decode = lent(NAME)[1].decode
    for first, second in (
        ("What does sorted do?", "And print?"),
        ("How do I open a file?", "Why?"),
    ):
        said = [first]
        for more in (second, None):
            prompt = chat(*said)
            found = shared_head(prompt, stored)
            answer = asked(cache, NAME, prompt, 6)
            assert cache.last.cached_tokens == found
            stored.append(prompt + answer)
            said += [decode(answer, skip_special_tokens=True), more]
    assert (
        found > shared_head(prompt, stored[:2]) > 300
    )  # its own first turn, and the system prompt
    with cache.session(torch.tensor([prompt])) as past, torch.inference_mode():
        assert past.get_seq_length() >= found
        rest = torch.tensor([prompt[past.get_seq_length() :]])
        logits = lent(NAME)[0](rest, past_key_values=past).logits[0, -1:]
    torch.testing.assert_close(logits, plain(NAME).logits(prompt, 1), atol=NEAR, rtol=0)


@pytest.mark.ci
def test_rows_behind_padding_and_beams_start_from_what_is_cached():
    ids, cache = chat("What does sorted do?"), cache_of(NAME, 120)
    asked(cache, NAME, ids, 1)
    rows = [ids[:300] + text(NAME, 9), ids, ids[:280] + text(NAME, 3, 50)]
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    made = cache.generate(padded, attention_mask=mask, max_new_tokens=3)
    assert cache.last.cached_tokens >= 3 * 256
    for row, answer in zip(rows, made[:, longest:].tolist(), strict=True):
        plain(NAME).agrees(row, answer)
    beams = cache.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        num_beams=2,
        num_return_sequences=2,
        max_new_tokens=3,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert cache.last.cached_tokens >= (len(ids) - 1) // 16 * 16
    for score, known in zip(beams.sequences_scores, beams.sequences.tolist(), strict=True):
        answer = known[len(ids) :]
        chances = plain(NAME).logits(known[:-1], len(answer)).log_softmax(-1)
        assert abs(chances[torch.arange(len(answer)), torch.tensor(answer)].mean() - score) <= TIE


@pytest.mark.ci
def test_a_server_reuses_the_system_prompt_for_clients_of_openai():
    words = ["--model", str(real_models.folder(NAME)), "--dtype", "float32", "--kv-memory", "64MiB"]
    with command(*words) as (_, told):
        for question in ("What does sorted do?", "And print?"):
            reply = plain_http.openai_client(told["url"]).chat.completions.create(
                model=told["model"],
                messages=[
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": question},
                ],
                max_completion_tokens=6,
                temperature=0,
            )
            answer = lent(NAME)[1](reply.choices[0].message.content)["input_ids"]
            assert len(answer) == reply.usage.completion_tokens
            plain(NAME).agrees(chat(question), answer)
    assert reply.usage.prompt_tokens_details.cached_tokens > 300
