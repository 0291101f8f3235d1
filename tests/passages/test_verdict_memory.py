"""Samples of verdicts that outlive the process, and an operator's prompts that rule while a tenant's own are few."""

import json

import pytest
import transformers

from quire.core import Scope
from quire.errors import ConfigError
from quire_passages import Epic, NoRows, Passages, Segments
from quire_passages.hf.verdict_memory import VerdictMemory
from quire_passages.verdict import LEAST_PROMPTS, PolicyOutcome, Verdicts

ONE, TWO = Scope(tenant="one", model="m"), Scope(tenant="two", model="m")
PLACED = ("contextual", 4)


def policies():
    return [NoRows(), Epic(16)]


def outcomes(*, moved=20, epic=32):
    return {
        "none": PolicyOutcome(32, moved, 1.5, 0.2),
        "epic 16": PolicyOutcome(32, epic, 0.01, 0.3),
    }


def verdicts(memory=None):
    return Verdicts(0.98, 50, memory)


def shown(made, scope, number=LEAST_PROMPTS, **given):
    made.of(scope, policies)
    for _ in range(number):
        made.add(scope, outcomes(**given))
    return made.of(scope, policies)


def test_the_next_process_goes_on_with_the_samples(tmp_path):
    first = shown(verdicts(VerdictMemory(tmp_path, PLACED)), ONE)
    assert first.chosen.name == "epic 16"
    found = verdicts(VerdictMemory(tmp_path, PLACED)).of(ONE, policies)
    assert found.chosen.name == "epic 16"
    assert found.num_prompts == LEAST_PROMPTS
    assert found.estimates() == first.estimates()
    assert verdicts(VerdictMemory(tmp_path, PLACED)).of(TWO, policies).num_prompts == 0
    assert {each.suffix for each in tmp_path.rglob("*")} == {"", ".json"}  # nothing half-written


@pytest.mark.parametrize(
    "scope",
    [
        Scope(tenant="one", model="another"),
        Scope(tenant="one", model="m", lora="x"),
        Scope(tenant="One", model="m"),
        Scope(model="m"),
    ],
)
def test_samples_are_of_one_model_and_tenant(tmp_path, scope):
    memory = VerdictMemory(tmp_path, PLACED)
    shown(verdicts(memory), ONE)
    assert memory.recall(ONE) is not None
    assert memory.recall(scope) is None
    assert memory.recall(ONE, "of the operator") is None


def test_other_settings_and_versions_measure_again(tmp_path, monkeypatch):
    shown(verdicts(VerdictMemory(tmp_path, PLACED)), ONE)
    assert VerdictMemory(tmp_path, ("isolated", 4)).recall(ONE) is None
    monkeypatch.setattr(transformers, "__version__", "0")
    assert VerdictMemory(tmp_path, PLACED).recall(ONE) is None


def test_samples_of_policies_that_are_not_tried_any_more_count_for_nothing(tmp_path):
    memory = VerdictMemory(tmp_path, PLACED)
    shown(verdicts(memory), ONE)
    found = verdicts(memory).of(ONE, lambda: [NoRows()])
    assert found.chosen is None
    assert [each.policy for each in found.estimates()] == ["none"]


def damage(data):
    """Yield what a file may have become."""
    told = json.loads(data)
    yield b""
    yield data[: len(data) // 2]
    yield b"[]"
    yield json.dumps(told | {"num_prompts": told["num_prompts"] + 1}).encode()
    yield json.dumps(told | {"samples": {"epic 16": [[32, 32, 0.0, 0.1]] * 99}}).encode()
    yield json.dumps(told | {"digest": ""}).encode()


def test_a_damaged_file_counts_as_none_and_is_written_anew(tmp_path):
    memory = VerdictMemory(tmp_path, PLACED)
    shown(verdicts(memory), ONE)
    (path,) = tmp_path.rglob("*.json")
    data = path.read_bytes()
    for other in damage(data):
        path.write_bytes(other)
        assert memory.recall(ONE) is None
        assert verdicts(memory).of(ONE, policies).num_prompts == 0
    path.write_bytes(data)
    assert memory.recall(ONE) is not None
    path.write_bytes(b"")
    shown(verdicts(memory), ONE, 8)
    assert memory.recall(ONE)[0] == 8


def test_figures_that_cannot_be_are_refused_even_if_they_are_sealed(tmp_path):
    memory = VerdictMemory(tmp_path, PLACED)
    for row in [(32, 33, 0.0, 0.1), (0, 0, 0.0, 0.1), (32, 2, -1.0, 0.1), (32, -1, 1.0, 0.1)]:
        made = verdicts(memory).of(TWO, policies)
        made.go_on(8, {"none": [PolicyOutcome(*row)]} if row[0] else {})
        memory.keep(ONE, made)
        found = memory.recall(ONE)
        assert found is None or found[1] == {}


def test_a_purge_takes_what_is_kept_of_a_tenant(tmp_path):
    memory = VerdictMemory(tmp_path, PLACED)
    made = verdicts(memory)
    for scope in (ONE, TWO):
        shown(made, scope)
    made.purge(Scope(tenant="one"), lambda scope: scope.tenant == "one")
    assert memory.recall(ONE) is None
    assert memory.recall(TWO) is not None
    assert made.of(ONE, policies).num_prompts == 0
    made.purge(Scope(tenant="two"), lambda _: False)  # of a process that has not met it
    assert memory.recall(TWO) is None


def test_a_directory_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    made = shown(verdicts(VerdictMemory(tmp_path / "file", PLACED)), ONE)
    assert made.chosen is not None


def test_an_operators_prompts_rule_until_a_tenants_own_have_decided():
    made = verdicts()
    given = made.of_operator(ONE, policies, "texts")
    assert made.ruling(ONE, policies) is made.of(ONE, policies)  # nothing is known yet
    for _ in range(LEAST_PROMPTS):
        made.add(ONE, outcomes(), "texts")
    assert given.chosen.name == "epic 16"
    assert made.ruling(ONE, policies) is made.ruling(TWO, policies) is given
    other_model = Scope(tenant="one", model="another")
    assert made.ruling(other_model, policies).chosen is None
    shown(made, ONE, 40, epic=20)
    assert made.of(ONE, policies).is_decided
    assert made.ruling(ONE, policies).chosen is None  # its own texts are otherwise
    assert made.ruling(TWO, policies) is given
    assert made.counts()["prompts"] == LEAST_PROMPTS + 40


def test_an_operators_prompts_that_allow_nothing_leave_tenants_to_their_own():
    made = verdicts()
    given = made.of_operator(ONE, policies, "texts")
    for _ in range(LEAST_PROMPTS):
        made.add(ONE, outcomes(epic=20), "texts")
    assert given.is_decided
    assert made.ruling(ONE, policies) is made.of(ONE, policies)
    assert shown(made, ONE).chosen.name == "epic 16"


def test_an_operators_samples_outlive_the_process_by_the_name_of_its_prompts(tmp_path):
    memory = VerdictMemory(tmp_path, PLACED)
    made = verdicts(memory)
    made.of_operator(ONE, policies, "texts")
    for _ in range(LEAST_PROMPTS):
        made.add(ONE, outcomes(), "texts")
    found = verdicts(memory)
    assert found.of_operator(TWO, policies, "texts").chosen.name == "epic 16"
    assert verdicts(memory).of_operator(TWO, policies, "other texts").num_prompts == 0


def test_prompts_are_named_by_their_tokens():
    def named(*parts):
        return Passages(prompts=[Segments.of(each) for each in parts]).prompts_name

    one, two = [[1], [2, 3], [4]], [[1], [2], [3, 4]]
    assert Passages().prompts_name == ""
    assert named(one) == named(one) != named(one, one)
    assert named(one) != named([[1], [2, 5], [4]])
    with pytest.raises(ConfigError, match="target=None"):
        Passages(prompts=[Segments.of(two)], target=None)


def test_captures_are_contextual_where_nothing_needs_isolated_ones():
    assert Passages().capturing == "contextual"
    assert Passages(warm="host:1MiB").capturing == "isolated"
    assert Passages(share_isolated=True).capturing == "isolated"
    assert Passages(share_isolated=True, capture="contextual").capturing == "contextual"
    assert Passages(capture="none").capturing == "none"
