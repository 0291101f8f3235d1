"""A model has one name however it was loaded: from a folder, from a GGUF file, or as it was made."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_help import ALL_FAMILIES, TRAINED, make_cache, own, prompt, same, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from quire.engines.hf import PrefixCache
from quire.engines.models.identity import Identity
from quire.engines.models.inventory import Inventory
from quire.tiers import Files
from turns import few

CODE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
from quire import PrefixCache
from quire.tiers import Files
tier, *models = sys.argv[1:]
for folder, name in map(json.loads, models):
    more = {"gguf_file": name} if name else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()
    with PrefixCache(model, "4MiB", verify=None, tiers=[Files(tier)]) as cache:
        cache.generate(torch.arange(3, 64)[None], max_new_tokens=2)
        print(json.dumps([cache.fingerprint, cache.last.cached_tokens]))
"""


def names_of(model):
    """The name of a model within this process, and that for every process."""
    identity = Identity(model, "a layout", Inventory(model), lambda: None)
    return identity.fingerprint, identity.whole()


def loaded(folder, dtype=torch.float32, **more):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more).eval()


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", few(ALL_FAMILIES, *[*ALL_FAMILIES][::3]))
def test_a_model_that_was_saved_and_loaded_has_the_name_it_had(family, tmp_path):
    model = tiny_model.__wrapped__(family)  # as it is made: other tests set what saving leaves out
    before = names_of(model)
    model.save_pretrained(tmp_path)
    assert names_of(model) == before  # saving writes into its config
    assert names_of(loaded(tmp_path)) == before


def test_a_model_that_is_saved_between_two_calls_finds_what_it_has_computed(tmp_path):
    model = own("llama")
    cache = make_cache(model, block_size=4)
    for found in (0, 40):
        same(model, cache, prompt(41))
        assert cache.last.cached_tokens == found
        model.save_pretrained(tmp_path)


def test_settings_in_another_order_are_the_same_and_other_settings_are_not():
    models = [own("gemma3_text") for _ in range(3)]
    rope = models[1].config.rope_parameters
    models[1].config.rope_parameters = {
        kind: dict(reversed(settings.items())) for kind, settings in reversed(rope.items())
    }
    models[2].config.rope_parameters["full_attention"]["rope_theta"] += 1
    one, two, three = map(names_of, models)
    assert one == two
    assert three[1] != one[1]


def test_a_quantizer_whose_settings_modules_may_not_hold_counts():
    names = []
    for kind in ("nf4", "fp4"):
        model = own("llama")
        model.config.quantization_config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=kind
        )
        names.append(names_of(model)[1])
    assert len({*names, names_of(tiny_model("llama"))[1]}) == 3


# -- GGUF files ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of GGUF files: one model under two titles, with other weights, and in half precision."""
    gguf_help = pytest.importorskip("gguf_help")
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("files")
    model, tokenizer = loaded(TRAINED), AutoTokenizer.from_pretrained(TRAINED)
    gguf_help.write_llama(folder / "one.gguf", model, tokenizer)
    gguf_help.write_llama(folder / "titled.gguf", model, tokenizer, title="another title")
    gguf_help.write_llama(folder / "half.gguf", model, tokenizer, dtype="float16")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] += 0.5
    gguf_help.write_llama(folder / "other.gguf", model, tokenizer)
    return folder


def converted(model, folder):
    """The folder of a model that came from a GGUF file, in the dtype that it has."""
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    return folder


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_of_a_gguf_file_have_one_name_however_they_are_loaded(files, tmp_path, dtype):
    one, titled, other, half = (
        loaded(files, dtype, gguf_file=f"{name}.gguf")
        for name in ("one", "titled", "other", "half")
    )
    name = names_of(one)
    assert names_of(titled) == name
    assert names_of(other)[1] != name[1]
    assert names_of(half)[1] != name[1]
    assert names_of(loaded(converted(titled, tmp_path), dtype)) == name
    assert names_of(titled) == name  # also without what its quantizer left


def test_a_cache_of_a_gguf_file_goes_on_when_the_model_is_made_an_ordinary_one(files, tmp_path):
    model = loaded(files, gguf_file="one.gguf")
    cache = make_cache(model, block_size=4)
    for found in (0, 40, 40):
        same(model, cache, prompt(41))
        assert cache.last.cached_tokens == found
        if found:
            with contextlib.suppress(AttributeError):
                converted(model, tmp_path)


@pytest.mark.ci
def test_tiers_find_the_kv_of_a_gguf_file_in_another_process(files, tmp_path):
    model, place = loaded(files, gguf_file="one.gguf"), str(tmp_path / "kv")
    with PrefixCache(model, "4MiB", verify=None, tiers=[Files(place)]) as cache:
        cache.generate(torch.arange(3, 64)[None], max_new_tokens=2)
        name = cache.fingerprint
    saved = converted(model, tmp_path / "saved")
    source = str(Path(__file__).parents[2] / "src")
    asked = (saved, ""), (files, "titled.gguf"), (files, "other.gguf")
    done = subprocess.run(
        [sys.executable, "-c", CODE, place, *(json.dumps([str(a), b]) for a, b in asked)],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": source},
    )  # fmt: skip
    same, titled, other = map(json.loads, done.stdout.splitlines())
    assert same == titled == [name, 48]
    assert other[0] != name
    assert other[1] == 0
