"""Forwards under masks, positions or arguments of the caller's: their K and V are never found again."""

import random

import pytest
import torch
from hf_help import (
    WINDOWED_FAMILIES,
    check_stored,
    left_padded,
    make_cache,
    random_ids,
    same,
    tiny_model,
)

from quire import ops
from quire.errors import TokensError
from turns import by_turns


def hole(mask, start, stop, at=None):
    """The mask of columns up to `stop`, where one that holds a token is hidden."""
    mask = mask[:, :stop].clone()
    mask[:, (stop - 2) if at is None else at] = 0
    return mask


def four(mask, start, stop):
    """A mask `[rows, 1, n, columns]` under which no token sees the column before its own."""
    columns, queries = torch.arange(stop), torch.arange(start, stop)[:, None]
    seen = (columns <= queries) & (columns != queries - 1)
    return (seen[None, None] & (mask[:, None, None, :stop] > 0)) | (columns == queries)


def positions(mask, start, stop):
    return (mask.cumsum(-1) - 1).clamp_min(0)[:, start:stop]


OURS = {
    "all that quire gives": lambda mask, start, stop: {
        "attention_mask": mask[:, :stop],
        "position_ids": positions(mask, start, stop),
    },
    "no positions": lambda mask, start, stop: {"attention_mask": mask[:, :stop]},
    "a mask of booleans": lambda mask, start, stop: {"attention_mask": mask[:, :stop].bool()},
    "what changes the output alone": lambda mask, start, stop: {
        "attention_mask": mask[:, :stop],
        "return_dict": True,
        "logits_to_keep": 1,
        "use_cache": True,
        "token_type_ids": None,
    },
}
FOREIGN = {
    "a hole": lambda mask, start, stop: {"attention_mask": hole(mask, start, stop)},
    "a hole in what is held": lambda mask, start, stop: {
        "attention_mask": hole(mask, start, stop, start - 1)
    },
    "four dimensions": lambda mask, start, stop: {"attention_mask": four(mask, start, stop)},
    "positions moved": lambda mask, start, stop: {
        "attention_mask": mask[:, :stop],
        "position_ids": positions(mask, start, stop) + 1,
    },
    "positions from 0": lambda mask, start, stop: {
        "attention_mask": mask[:, :stop],
        "position_ids": torch.arange(stop - start)[None],
    },
}


def held(cache, tokens):
    """Tokens of a text that the cache would reuse."""
    one_more = torch.cat([tokens.flatten(), tokens.flatten()[:1]]).numpy()
    return cache.manager.probe(one_more, cache.kept.identity.scope(None)).num_tokens


def foreign_to(family):
    """The kinds for a family: windows see part of the columns, which one mask of all does not fit."""
    return sorted(FOREIGN.keys() - ({"four dimensions"} if family in WINDOWED_FAMILIES else set()))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family in ("llama", "gemma3_text") for name in foreign_to(family)],
)
def test_kv_of_a_foreign_forward_is_not_kept_and_the_report_says_why(family, name):
    model, ids = tiny_model(family), random_ids(torch.Generator().manual_seed(2), 41)
    cache = make_cache(model, block_size=4)
    mask = torch.ones_like(ids)
    with cache.session(ids) as past, torch.no_grad():
        cache.model(ids[:, :20], past_key_values=past)
        cache.model(ids[:, 20:30], past_key_values=past, **FOREIGN[name](mask, 20, 30))
        cache.model(ids[:, 30:], past_key_values=past)
        past.check()
    assert held(cache, ids) == 20
    assert cache.last.unknown_tokens == 21
    assert cache.last.unknown_reason.startswith(("attention_mask was not [1, 30]", "position_ids"))
    same(model, cache, ids)
    assert cache.last.unknown_tokens == 0
    assert cache.last.unknown_reason is None
    assert held(cache, ids) >= 40


@pytest.mark.cases(2)
@pytest.mark.parametrize("at", [0, 1, 4, 39])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", ["a hole", "shifted positions", "embeddings"])
def test_every_column_behind_an_unknown_column_is_unknown(model, ids, at, num_rows, name):
    cache, ids = make_cache(model, block_size=4), ids.repeat(num_rows, 1)
    given = {
        "a hole": lambda: {"attention_mask": hole(torch.ones_like(ids), at, at + 1, at // 2)},
        "shifted positions": lambda: {"position_ids": torch.tensor([[at + 3]])},
        "embeddings": dict,
    }[name]()
    with cache.session(ids) as past, torch.no_grad():
        if at:
            model(ids[:, :at], past_key_values=past)
        one = ids[:, at : at + 1]
        if name == "embeddings":
            given["inputs_embeds"] = model.get_input_embeddings()(one)
        else:
            given["input_ids"] = one
        model(past_key_values=past, **given)
        for _ in range(4):
            model(ids, past_key_values=past)
        past.check()
    assert cache.last.unknown_tokens == num_rows * (1 + 4 * 41)
    assert held(cache, ids[:1]) == at // 4 * 4
    same(model, cache, ids)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", OURS)
def test_kv_computed_with_quires_own_arguments_is_kept(model, cache, ids, name):
    padded, mask = left_padded([ids[0], ids[0, :17]])
    with cache.session(padded, attention_mask=mask) as past, torch.no_grad():
        for start, stop in ((0, 20), (20, 26), (26, 41)):
            cache.model(
                padded[:, start:stop], past_key_values=past, **OURS[name](mask, start, stop)
            )
    assert cache.last.unknown_tokens == 0
    assert held(cache, ids) == 40
    assert check_stored(model, cache, ids[0]) == 40
    same(model, cache, padded, attention_mask=mask)


def test_positional_arguments_of_a_forward_count_as_named_ones(model, cache, ids):
    with cache.session(ids) as past, torch.no_grad():
        cache.model(ids[:, :20], None, torch.arange(20)[None], past)
        cache.model(ids[:, 20:30], None, torch.arange(10)[None], past)
    assert held(cache, ids) == 20


def test_padding_without_a_mask_is_text_and_is_not_kept(model, cache, ids):
    padded, mask = left_padded([ids[0], ids[0, :17]])
    with cache.session(padded, attention_mask=mask) as past, torch.no_grad():
        cache.model(padded, past_key_values=past)
    assert (cache.last.stored_tokens, cache.last.unknown_tokens) == (0, 41 + 17)
    same(model, cache, ids[:, :17])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inputs_embeds": torch.zeros(1, 10, 32), "input_ids": None}, "input_ids were not"),
        ({"cache_position": torch.arange(10)}, "cache_position may change K and V"),
        ({"token_type_ids": torch.ones(1, 10)}, "token_type_ids may change K and V"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_that_is_not_known_to_be_harmless_makes_the_columns_unknown(
    model, cache, ids, arguments, words
):
    with cache.session(ids) as past, torch.no_grad():
        cache.model(ids[:, :20], past_key_values=past)
        cache.model(**{"input_ids": ids[:, 20:30], "past_key_values": past, **arguments})
    assert held(cache, ids) == 20
    assert words in cache.last.unknown_reason
    assert cache.last.unknown_tokens == 10


def test_kv_of_a_model_in_training_mode_is_not_kept(model, cache, ids):
    with cache.session(ids) as past, torch.no_grad():
        cache.model(ids[:, :20], past_key_values=past)
        model.train()
        try:
            cache.model(ids[:, 20:], past_key_values=past)
        finally:
            model.eval()
    assert held(cache, ids) == 20
    assert cache.last.unknown_reason == "the model was in training mode"


def test_a_crop_of_foreign_columns_makes_the_rest_known_again(model, cache, ids):
    with cache.session(ids) as past, torch.no_grad():
        cache.model(ids[:, :20], past_key_values=past)
        cache.model(ids[:, 20:], past_key_values=past, position_ids=torch.arange(21)[None])
        past.crop(-21)
        cache.model(ids[:, 20:], past_key_values=past)
    assert cache.last.unknown_tokens == 0
    assert check_stored(model, cache, ids[0]) == 40


@pytest.mark.parametrize("value", [2, 0.5])
def test_a_mask_of_other_numbers_than_0_and_1_is_refused(cache, ids, value):
    mask = torch.ones(ids.shape)
    mask[0, 5:] = value
    before = ops.snapshot(cache.manager)
    with pytest.raises(TokensError, match=f"attention_mask holds {value}"):
        cache.generate(ids, attention_mask=mask, max_new_tokens=1)
    assert ops.snapshot(cache.manager) == before


def test_drafts_over_one_padded_row_reuse_its_head(model, cache, ids):
    padded = torch.nn.functional.pad(ids, (3, 0))
    mask = (padded != 0).long()
    for _ in range(2):
        same(model, cache, padded, attention_mask=mask, prompt_lookup_num_tokens=3)
    assert cache.last.cached_tokens == 40


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("seed", "family"), by_turns(range(4), ["llama", "mistral+window", "llama4_text", "lfm2"])
)
def test_any_loop_leaves_what_each_text_alone_computes(family, seed):
    rng, model = random.Random(f"{family} {seed}"), tiny_model(family)
    cache = make_cache(model, block_size=rng.choice([1, 4]))
    texts = [
        random_ids(torch.Generator().manual_seed(rng.randrange(3)), rng.randint(1, 40))[0]
        for _ in range(rng.randint(1, 3))
    ]
    for _ in range(2):
        ids, mask = left_padded(texts)
        unknown = 0
        with cache.session(ids, attention_mask=mask) as past, torch.no_grad():
            start = past.get_seq_length()
            while start < ids.shape[1]:
                stop = min(start + rng.randint(1, 20), ids.shape[1])
                is_ours = rng.random() < 0.7 or start == 0
                name = rng.choice(sorted(OURS) if is_ours else foreign_to(family))
                given = (OURS if is_ours else FOREIGN)[name](mask, start, stop)
                foreign = given["attention_mask"].ndim == 4 or not torch.equal(
                    given["attention_mask"].long(), mask[:, :stop]
                )
                if "position_ids" in given:
                    ours = positions(mask, start, stop)
                    differs = (given["position_ids"] != ours) & (mask[:, start:stop] > 0)
                    foreign = foreign or bool(differs.any())
                if unknown or foreign:
                    unknown += int(mask[:, start:stop].sum())
                cache.model(ids[:, start:stop], past_key_values=past, **given)
                start = stop
        assert cache.last.unknown_tokens == unknown
        for text in texts:
            check_stored(model, cache, text)
            same(model, cache, text[None], max_new_tokens=2)
