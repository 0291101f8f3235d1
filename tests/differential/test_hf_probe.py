"""Checks before a model's KV is reused: of the model itself, and of a tiny twin of its config."""

import pytest
import torch
import transformers
from hf_help import (
    ALL_FAMILIES,
    TRAINED,
    left_padded,
    make_cache,
    random_ids,
    same,
    tiny_model,
)
from hf_media_help import media_model
from hf_wrong import (
    COUNTING,
    LONG,
    MUTATIONS,
    CannotBeSmall,
    ChangesAtLength,
    CountsPadding,
    KeepsState,
    mutant,
    wrong_model,
)

from quire.engines.hf import PrefixCache
from quire.engines.models.battery import check_kind
from quire.errors import ConfigError, UnsupportedModel
from turns import few

MEDIA = ("llava", "gemma3", "qwen3_vl", "smolvlm", "aya_vision", "mistral3")
THRESHOLDS = {"llama4_text": 8192}
"""The column from which a family's rows behind padding differ from rows alone, as transformers has it."""

OF_A_KIND = ["llama", "gpt_neox", "gpt2", "deepseek_v3"]
OF_A_KIND += ["gemma2", "llama4_text", "qwen3_next", "falcon_h1", "lfm3"]
"""Every kind of attention and state; the long run has the other families of the table too."""


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", few(ALL_FAMILIES, *OF_A_KIND))
def test_a_family_of_the_table_passes_behind_padding_as_well(family):
    assert check_kind(tiny_model(family), PrefixCache, needs_twin=True) == THRESHOLDS.get(family)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", few(MEDIA, *MEDIA[::2]))
def test_a_family_with_media_passes_over_text(family):
    model = media_model(family)
    assert check_kind(model, PrefixCache, needs_twin=True) is None
    PrefixCache(model, "1MiB")


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", COUNTING)
def test_a_decoder_whose_positions_count_padding_is_refused(family):
    with pytest.raises(UnsupportedModel, match=f"{family}.*padding.*limit 0.001"):
        PrefixCache(wrong_model(family), "1MiB")


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", LONG)
def test_a_model_that_is_wrong_past_its_window_or_threshold_is_refused(family):
    with pytest.raises(
        UnsupportedModel, match=rf"{family}.*twin.*logits are \S+ from.*limit 0.001"
    ):
        PrefixCache(wrong_model(family), "1MiB")


@pytest.mark.cases(2)
@pytest.mark.parametrize("model_class", MUTATIONS)
def test_a_mutation_of_a_healthy_model_fails_on_its_twin(model_class):
    check = MUTATIONS[model_class]
    with pytest.raises(UnsupportedModel, match=rf"{model_class.__name__}\).*{check}.*limit \d"):
        check_kind(mutant(model_class), PrefixCache, needs_twin=True)


@pytest.mark.parametrize("model_class", [CountsPadding, KeepsState])
def test_the_model_itself_is_checked_in_pieces_and_behind_padding(model_class):
    with pytest.raises(UnsupportedModel, match=r"layer 0.*distance \S+, limit 0.001"):
        PrefixCache(mutant(model_class), "1MiB", verify=None)


def test_a_model_of_another_number_of_layers_than_its_config_says_is_refused_by_name():
    config = transformers.BartConfig(**{**COUNTING["bart"], "encoder_layers": 1})
    model = transformers.BartForCausalLM(config).eval()
    with pytest.raises(UnsupportedModel, match="bart does not compute with a transformers cache"):
        PrefixCache(model, "1MiB")


def test_a_model_of_any_size_is_tried_without_its_weights():
    config = transformers.Gemma2Config(num_hidden_layers=6, hidden_size=8192)
    with torch.device("meta"):
        model = transformers.Gemma2ForCausalLM(config)
    assert check_kind(model, PrefixCache, needs_twin=True) is None


def test_trying_a_twin_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model = mutant(CannotBeSmall.__base__, num_hidden_layers=1)
    torch.set_rng_state(state)
    PrefixCache(model, "1MiB")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_without_a_twin_is_refused_unless_calls_are_compared():
    model = mutant(CannotBeSmall, vocab_size=300)
    with pytest.raises(UnsupportedModel, match=r'made for 300 tokens.*verify="first"'):
        PrefixCache(model, "1MiB")
    PrefixCache(model, "1MiB", verify="first")


def test_a_word_that_verify_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"verify='all'.*'probe', 'first', None"):
        PrefixCache(tiny_model("llama"), "1MiB", verify="all")


@pytest.mark.ci
class TestAThresholdThatCountsPadding:
    """Llama 4 scales queries by the column, in steps of `floor_scale`."""

    @pytest.fixture
    def model(self):
        return tiny_model("llama4_text", floor_scale=24)

    @pytest.mark.ci
    def test_single_rows_are_right_past_the_threshold(self, model):
        cache = make_cache(model, block_size=4, verify="probe")
        ids = random_ids(torch.Generator().manual_seed(1), 40)
        for length in (20, 30, 40):
            same(model, cache, ids[:, :length])
        assert cache.last.cached_tokens >= 28

    def test_prompts_behind_padding_are_refused_from_there_on(self, model):
        cache = make_cache(model, block_size=4, verify="probe")
        ids, mask = left_padded([random_ids(None, 24)[0], random_ids(None, 9)[0]])
        with pytest.raises(ConfigError, match=r"from column 24 on.*have 24 columns"):
            cache.generate(ids, attention_mask=mask)
        same(model, cache, ids[:, 1:], attention_mask=mask[:, 1:], max_new_tokens=1)

    def test_kv_computed_past_the_threshold_is_not_kept(self, model):
        cache = make_cache(model, block_size=4, verify="probe")
        ids, mask = left_padded([random_ids(None, 20)[0], random_ids(None, 12)[0]])
        out = same(model, cache, ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12)
        scope = cache.kept.identity.scope(None)
        kept = [cache.manager.probe(row.numpy(), scope).num_tokens for row in (out[0], out[1, 8:])]
        assert kept == [24, 16]
        for row in (out[:1], out[1:, 8:]):
            same(model, cache, torch.cat([row, ids[:1, :3]], dim=1))


@pytest.mark.skipif(not (TRAINED / "config.json").exists(), reason="no trained model in assets")
def test_the_same_kind_with_other_weights_is_not_tried_again(monkeypatch):
    from quire.engines.models import battery

    first = mutant(ChangesAtLength.__base__, num_hidden_layers=1)
    check_kind(first, PrefixCache, needs_twin=True)
    monkeypatch.setattr(battery, "ask", None)
    check_kind(mutant(ChangesAtLength.__base__, num_hidden_layers=1), PrefixCache, needs_twin=True)
