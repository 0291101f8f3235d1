"""The real file of SmolLM2, as its package has it."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

import real_models
from quire.cli.models import load
from quire.engines.models.identity import Identity
from quire.engines.models.inventory import Inventory

NAME = "smollm2-135m"
pytestmark = [pytest.mark.system(NAME), pytest.mark.slow]


def names_of(model):
    """The name of a model within this process, and that for every process."""
    identity = Identity(model, "a layout", Inventory(model), lambda: None)
    return identity.fingerprint, identity.whole()


@pytest.mark.ci
def test_a_real_gguf_file_has_the_name_of_the_folder_that_was_made_of_it(monkeypatch):
    gguf = pytest.importorskip("gguf")
    for slow in ("GGUFReader", "get_tensor_name_map"):  # transformers calls them again and again
        monkeypatch.setattr(gguf, slow, functools.cache(getattr(gguf, slow)))
    files = real_models.packaged(NAME)
    if not files:
        pytest.skip(f"{NAME} was converted, and its package is gone")
    model, tokenizer = load(str(files[0].parent), real_models.DTYPE)
    assert tokenizer.chat_template
    name = names_of(model)
    kept = AutoModelForCausalLM.from_pretrained(real_models.folder(NAME), dtype=model.dtype).eval()
    assert names_of(kept) == name
    with torch.no_grad():
        kept.model.layers[29].self_attn.v_proj.weight[5, 7] += 1
    assert names_of(kept)[1] != name[1]
