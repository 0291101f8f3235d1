"""LoRA adapters in an engine: answers are those of PEFT, KV is apart, and adapters take turns."""

import copy
import json
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_help import adapted, is_likeliest
from quire import ops
from quire.core import CacheManager, LayerGroup, Scope
from quire.engines.loop import Engine, SamplingParams
from quire.errors import ConfigError
from quire.scheduling import Job, Limits, Scheduler

TEXT = "A list keeps its order, and a tuple does so as well; a set does not keep any. " * 2
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def base():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quire import demo_model

    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(demo_model())


@pytest.fixture(scope="module")
def folders(tmp_path_factory, base):
    """Folders of two adapters, and references by name."""
    place, model = tmp_path_factory.mktemp("adapters"), base[0]
    made = {name: adapted(model, place / name, seed) for seed, name in enumerate("ab")}
    return {name: place / name for name in made}, {None: copy.deepcopy(model)} | made


def of(name, **more):
    return Scope(lora=name, **more)


def run(engine):
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check()
        ops.check(engine.manager)
    assert not engine.manager.sequences
    return outputs


def check_answers(outputs, asked, references):
    for request_id, name in asked.items():
        output = outputs[request_id]
        assert output.error is None
        for answer in output.outputs:
            assert is_likeliest(references[name], output.prompt_token_ids, answer.token_ids), name


def test_requests_of_several_adapters_at_once_get_the_answers_of_peft(base, folders):
    engine = Engine(*base, num_blocks=256, max_step_tokens=48, max_running=8, adapters=folders[0])
    asked = {}
    for number, tail in enumerate(("", " Why", " How", " When")):
        for name in (None, "a", "b"):
            params = SamplingParams(max_tokens=6 + number, n=1 + number % 2, **GREEDY)
            asked[engine.add_request(TEXT + tail, params, scope=of(name))] = name
    outputs = run(engine)
    check_answers(outputs, asked, folders[1])
    texts = {name: outputs[each].outputs[0].text for each, name in asked.items()}
    assert len(set(texts.values())) == 3


def test_a_prompt_is_found_under_its_own_adapter_alone(base, folders):
    engine = Engine(*base, num_blocks=256, adapters=folders[0])
    params = SamplingParams(max_tokens=2, **GREEDY)
    found = [
        engine.generate(TEXT, params, scope=of(name))[0].num_cached_tokens
        for name in ("a", "b", None, "a", "b", None)
    ]
    assert found[:3] == [0, 0, 0]
    assert min(found[3:]) > 16


FORMS = (
    {},
    {},
    {"bad_words": ["e", "li"]},
    {"structured_outputs": {"choice": ["yes", "no", "never"]}},
    {"structured_outputs": {"regex": "[a-c]{2}-(x|yz)"}, "reasoning_tags": ("", "t")},
    {"structured_outputs": {"choice": ["yes", "no"]}, "reasoning_tags": ("<think>", "</think>")},
)


def drawn(rng):
    """Return a random prompt, the adapter that is asked, and parameters: scores, forms, reasoning, several answers."""
    name, form = rng.choice((None, "a", "b")), rng.choice(FORMS)
    prompt = TEXT[: rng.choice((1, 32, 33, 90, 150))] + rng.choice(("", " Why", " How is that?"))
    how = rng.choice(({"temperature": 0}, {"temperature": 1.0, "seed": rng.randrange(9)}))
    params = SamplingParams(
        max_tokens=rng.choice((1, 5, 14)),
        n=rng.choice((1, 1, 3)),
        logprobs=rng.choice((None, 1)),
        prompt_logprobs=rng.choice((None, None, 0, 2)),
        speculation=rng.choice((0, 0, 2)),
        **form | how,
    )
    return prompt, name, params


def check_scores(reference, output):
    """Check the log-probabilities of a prompt beside those of a reference."""
    ids = output.prompt_token_ids
    with torch.inference_mode():
        right = reference(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    told = [each[token].logprob for token, each in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]  # fmt: skip
    found = right[torch.arange(len(ids) - 1), torch.tensor(ids[1:], dtype=torch.long)]
    torch.testing.assert_close(torch.tensor(told, dtype=torch.float32), found, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(0, 16, marks=pytest.mark.ci),
        *(pytest.param(seed, 200, marks=pytest.mark.long) for seed in (1, 2)),
    ],
)
def test_random_requests_of_adapters_are_answered_and_scored_as_alone(base, folders, seed, count):
    rng, roomy = Random(seed), Engine(copy.deepcopy(base[0]), base[1], num_blocks=256, adapters=folders[0])  # fmt: skip
    small = {"num_blocks": 16, "max_running": 8, "max_step_tokens": 60, "max_prefill_tokens": 30}
    engine = Engine(*base, adapters=folders[0], **small)
    asked = {}
    for _ in range(count):
        prompt, name, params = drawn(rng)
        asked[engine.add_request(prompt, params, scope=of(name))] = prompt, name, params
    outputs, num_scored = run(engine), 0
    for request_id, (prompt, name, params) in asked.items():
        (alone,) = roomy.generate(prompt, params, scope=of(name))
        output = outputs[request_id]
        assert output.error is None
        for one, other in zip(output.outputs, alone.outputs, strict=True):
            assert (one.token_ids, one.text) == (other.token_ids, other.text), (name, params)
            assert one.finish_reason == other.finish_reason
        if params.prompt_logprobs is not None:
            num_scored += 1
            check_scores(folders[1][name], output)
    assert num_scored > count // 8
    assert engine.stats().preemptions or count < 100


@pytest.mark.ci
def test_preempted_requests_of_adapters_go_on_where_they_were(base, folders):
    engine = Engine(*base, num_blocks=24, max_running=6, max_step_tokens=64, adapters=folders[0])
    params = SamplingParams(max_tokens=60, **GREEDY)
    asked = {engine.add_request(f"{at} {TEXT}", params, scope=of(name)): name for at in range(2) for name in (None, "a", "b")}  # fmt: skip
    check_answers(run(engine), asked, folders[1])
    assert engine.stats().preemptions


def test_the_model_is_as_it_was_when_nothing_is_computed(base, folders):
    model = base[0]
    modules = dict(model.named_modules())
    engine = Engine(*base, num_blocks=64, adapters=folders[0])
    engine.generate(TEXT, SamplingParams(max_tokens=2, **GREEDY), scope=of("a"))
    assert {name: id(each) for name, each in model.named_modules()} == {name: id(each) for name, each in modules.items()}  # fmt: skip
    assert not hasattr(model, "peft_config")
    assert engine.scope().model == Engine(*base, num_blocks=64).scope().model


@pytest.mark.ci
def test_tiers_keep_adapters_apart_by_their_weights_and_not_by_their_names(base, folders, tmp_path):
    from quire.tiers.disk import Disk

    params = SamplingParams(max_tokens=2, **GREEDY)

    def cached(lora, adapters):
        tiers = [Disk(tmp_path / "kv", "64MiB")]
        engine = Engine(*base, num_blocks=64, tiers=tiers, adapters=adapters)
        found = engine.generate(TEXT, params, scope=of(lora))[0].num_cached_tokens
        engine.close()
        return found

    a, b = folders[0].values()
    assert cached("x", {"x": a}) == 0
    assert cached("x", {"x": a}) > 16
    assert cached("x", {"x": b}) == 0
    assert cached("x", {}) == 0


def job_of(name, *given):
    """A job that an adapter computes."""
    job = Job(*given, scope=of(name))
    job.adapter = name
    return job


def test_scopes_that_name_no_adapter_share_a_step_and_no_kv(base, folders):
    engine = Engine(*base, num_blocks=256, max_step_tokens=1024, max_running=9, adapters=folders[0])
    names, params = [None, "x", "y", "z"], SamplingParams(max_tokens=8, **GREEDY)
    for each in range(2):
        asked = {engine.add_request(TEXT, params, scope=of(name)): name for name in names}
        before, outputs = engine.stats().steps, run(engine)
        check_answers(outputs, asked, dict.fromkeys(names, folders[1][None]))
        assert engine.stats().steps - before == 8
        found = {output.num_cached_tokens for output in outputs.values()}
        assert found == {0} if not each else min(found) > 16


def test_tenants_with_scopes_of_their_own_share_steps_beside_an_adapter(base, folders):
    engine = Engine(*base, num_blocks=256, max_step_tokens=1024, max_running=9, adapters=folders[0])
    params, asked = SamplingParams(max_tokens=8, **GREEDY), {}
    for name in ("a", "x", "y", None):
        asked[engine.add_request(TEXT, params, scope=of(name, tenant=f"of {name}"))] = name
    outputs = run(engine)
    check_answers(outputs, asked, folders[1] | dict.fromkeys("xy", folders[1][None]))
    assert engine.stats().steps == 16


@pytest.mark.parametrize("others", [(), ("b",), ("b", None)])
def test_the_oldest_prompt_gets_half_of_the_steps_of_its_adapter(others):
    manager = CacheManager(block_size=4, groups=[LayerGroup("full", 4096)])
    scheduler = Scheduler(manager, Limits(max_step_tokens=16, max_running=12))
    long, number = job_of("a", [1] * 400, 1), 1
    scheduler.add(long)
    for name in others:
        scheduler.add(job_of(name, [2] * 6, 4000))
    steps = 0
    while not long.num_generated:
        while sum(not job.num_generated for job in scheduler.queues.waiting) < 4:
            number += 1
            scheduler.add(job_of("a", [number + 1] * 15, 1))
        step = scheduler.plan()
        steps += step.jobs[0].adapter == "a"
        scheduler.complete(step, [7] * len(step.samples))
        for job in step.sampled:
            if job.num_generated == job.max_tokens:
                scheduler.finish(job)
        scheduler.check()
    assert steps < 400 / 8 + 12


def test_adapters_take_turns_and_none_waits_for_another():
    manager = CacheManager(block_size=4, groups=[LayerGroup("full", 256)])
    scheduler = Scheduler(manager, Limits(max_step_tokens=16, max_running=8))
    jobs = [job_of(name, [at + 1] * 6, 40) for at, name in enumerate(["a", "a", "a", "b", None])]
    for job in jobs:
        scheduler.add(job)
    order = []
    for _ in range(60):
        step = scheduler.plan()
        assert len({job.adapter for job in step.jobs}) == 1
        order.append(step.jobs[0].adapter)
        scheduler.complete(step, [7] * len(step.samples))
        scheduler.check()
    assert [order.count(name) for name in ("a", "b", None)] == [20, 20, 20]
    for job in jobs:
        scheduler.finish(job)
    assert not scheduler.queues.turns
    assert not scheduler.queues.resting


def test_a_prompt_without_room_lets_jobs_of_other_adapters_go_on():
    manager = CacheManager(block_size=4, groups=[LayerGroup("full", 12)])
    scheduler = Scheduler(manager, Limits(max_step_tokens=16, max_running=8, watermark=0))
    first, second = job_of("a", [1] * 20, 20), job_of("b", [2] * 20, 20)
    ended = 0
    for job in (first, second):
        scheduler.add(job)
    for _ in range(200):
        if (step := scheduler.plan()) is None:
            break
        scheduler.complete(step, [7] * len(step.samples))
        for job in step.sampled:
            if job.num_generated == 20:
                scheduler.finish(job)
                ended += 1
        scheduler.check()
        ops.check(manager)
    assert ended == 2


# -- adapters that cannot be served --------------------------------------------------------


def changed(folder, made, **settings):
    """A copy of an adapter's folder with other settings."""
    made.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (made / file).write_bytes((folder / file).read_bytes())
    config = json.loads((folder / "adapter_config.json").read_text()) | settings
    (made / "adapter_config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "type 'IA3'; only LORA"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"r": 7}, "r=7, but .* has rank 4"),
        ({"target_modules": ["nothing_proj"]}, "does not fit the model: .*nothing_proj"),
        ({"target_modules": ["q_proj"]}, "does not fit the model: it has other layers"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_and_the_model_is_as_it_was(base, folders, tmp_path, settings, words):  # fmt: skip
    folder = changed(folders[0]["a"], tmp_path / "other", **settings)
    modules = [id(each) for each in base[0].modules()]
    with pytest.raises(ConfigError, match=words):
        Engine(*base, num_blocks=64, adapters={"x": folder})
    assert [id(each) for each in base[0].modules()] == modules


def test_an_adapter_of_another_model_or_without_files_is_refused(base, folders, tmp_path):
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        Engine(*base, num_blocks=64, adapters={"x": tmp_path / "none"})
    other = changed(folders[0]["a"], tmp_path / "wide")
    weights = load_file(other / "adapter_model.safetensors")
    wide = {
        key: torch.cat([value, value], -1) if "lora_A" in key else value
        for key, value in weights.items()
    }
    save_file(wide, other / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="does not fit the model"):
        Engine(*base, num_blocks=64, adapters={"x": other})
    (other / "adapter_model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="cannot be read"):
        Engine(*base, num_blocks=64, adapters={"x": other})
