"""Sessions of a coding agent by three APIs: each turn computes its new part only, and says so."""

import copy
import sys
from pathlib import Path

import pytest
from serve_help import running, tiny

import real_models

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from agent_session import APIS, NAME, SMALL, changed_line, played
from made_agent import made_model


def served(tokenizer, **options):
    tokenizer = copy.deepcopy(tokenizer)
    model = made_model(tokenizer)
    names = {"other_names": (NAME, SMALL)}
    return running(model, tokenizer=tokenizer, served=names, **options)


def check_session(server, api, num_lines, num_turns):
    before = server.manager.stats
    session = APIS[api](server.url, num_lines)
    turns = [*played(session, num_turns)]
    server.quiet()
    computed = sum(turn.prompt - turn.cached for turn in turns[1:])
    assert computed < turns[-1].prompt - turns[0].prompt + num_turns * server.manager.block_size
    after = server.manager.stats
    # counts of tokens and requests for a title, to another name of the model, are no turns
    assert after.hit_tokens - before.hit_tokens >= sum(turn.cached for turn in turns)
    if api != "responses":
        line = changed_line(session)
        assert line["text"] == f"Today's date is 2026-11-{session.day}."
        assert line["token"] < turns[-1].prompt // 10
    return turns


@pytest.mark.cases(1)
@pytest.mark.parametrize("api", APIS)
def test_each_turn_of_an_agent_computes_its_new_part_only(api):
    with served(tiny()[1]) as server:
        check_session(server, api, 4, 3)


@pytest.mark.ci
@pytest.mark.skipif(
    bool(real_models.missing(real_models.SMOLLM2)), reason=str(real_models.missing(real_models.SMOLLM2))
)  # fmt: skip
def test_thirty_turns_behind_20_000_tokens_compute_their_new_parts_only():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_models.folder(real_models.SMOLLM2))
    with served(tokenizer, num_blocks=4096) as server:
        turns = check_session(server, "messages", 75, 30)
        assert turns[0].prompt > 20_000
        for api in ("chats", "responses"):
            turns = check_session(server, api, 75, 6)
            assert turns[0].prompt > 20_000
