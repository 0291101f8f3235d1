"""Sessions: whatever a caller does with the cache, only what was computed is kept."""

import pytest
import torch
from hf_help import StopHereError, check_stored, random_ids, same


def held(cache, tokens):
    """Tokens of a text that the cache would reuse."""
    one_more = torch.cat([tokens.flatten(), tokens.flatten()[:1]]).numpy()
    return cache.manager.probe(one_more, cache.kept.identity.scope(None)).num_tokens


def test_a_loop_of_ones_own_reuses_and_keeps(model, cache, ids):
    expected = model.generate(ids, max_new_tokens=10, min_new_tokens=10)
    for reused in (0, 40):
        with cache.session(ids) as past, torch.no_grad():
            assert past.get_seq_length() == reused
            feed, out = ids[:, past.get_seq_length() :], ids
            for _ in range(10):
                logits = model(feed, past_key_values=past, use_cache=True).logits[:, -1]
                logits[:, 2] = -torch.inf
                feed = logits.argmax(-1, keepdim=True)
                out = torch.cat([out, feed], dim=1)
            past.check()
        assert torch.equal(out, expected)
        assert cache.last.cached_tokens == reused
    assert held(cache, out) == 48
    assert check_stored(model, cache, out[0]) == 48
    assert cache.manager.num_active == 0


def test_two_turns_in_one_session(model, cache, ids):
    with cache.session(ids) as past:
        first = model.generate(ids, past_key_values=past, max_new_tokens=6)
        second = torch.cat([first, ids[:, :7]], dim=1)
        out = model.generate(second, past_key_values=past, max_new_tokens=6)
    assert torch.equal(out, model.generate(second, max_new_tokens=6))
    assert check_stored(model, cache, out[0]) >= second.shape[1] - 4


def fail_in_layer(model, layer, at_call):
    """Make a layer's forward raise at its n-th call."""
    calls = []

    def hook(module, args):
        calls.append(1)
        if len(calls) == at_call:
            raise StopHereError

    return model.model.layers[layer].register_forward_pre_hook(hook)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_forward_that_fails_half_way_counts_for_nothing(model, cache, ids, layer):
    handle = fail_in_layer(model, layer, at_call=2)
    with pytest.raises(StopHereError):  # noqa: PT012, SIM117
        with cache.session(ids) as past, torch.no_grad():
            model(ids[:, :18], past_key_values=past)
            model(ids[:, 18:], past_key_values=past)
    assert held(cache, ids) == 16
    assert check_stored(model, cache, ids[0]) == 16
    handle.remove()
    assert cache.manager.num_active == 0
    same(model, cache, ids)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_failed_forward_can_be_tried_again(model, cache, ids, layer):
    handle = fail_in_layer(model, layer, at_call=2)
    with cache.session(ids) as past, torch.no_grad():
        model(ids[:, :18], past_key_values=past)
        with pytest.raises(StopHereError):
            model(ids[:, 18:], past_key_values=past)
        logits = model(ids[:, 18:], past_key_values=past).logits
        past.check()
    torch.testing.assert_close(logits[:, -1], model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)
    assert check_stored(model, cache, ids[0]) == 40
    handle.remove()


def test_an_exception_of_the_caller_keeps_what_was_computed(model, cache, ids):
    with pytest.raises(StopHereError):  # noqa: PT012, SIM117
        with cache.session(ids) as past, torch.no_grad():
            model(ids, past_key_values=past)
            raise StopHereError
    assert held(cache, ids) == 40


def test_an_unused_session_keeps_nothing(model, cache, ids):
    with cache.session(ids):
        pass
    assert cache.manager.num_cached == cache.manager.num_active == 0
    assert cache.last.ttft_s is None


def test_kv_computed_from_embeddings_is_never_kept(model, cache, ids):
    with cache.session(ids) as past, torch.no_grad():
        model(ids[:, :20], past_key_values=past)
        model(inputs_embeds=model.get_input_embeddings()(ids[:, 20:30]), past_key_values=past)
        model(ids[:, 30:], past_key_values=past)
        past.check()
    assert held(cache, ids) == 20


def test_a_forward_past_the_recorder_is_never_kept(model, cache, ids):
    with cache.session(ids) as past, torch.no_grad():
        model(ids[:, :20], past_key_values=past)
        model.model(ids[:, 20:30], past_key_values=past)
        model(ids[:, 30:], past_key_values=past)
        past.check()
    assert held(cache, ids) == 20


def test_tokens_that_were_cropped_are_not_kept(model, cache, ids):
    with cache.session(ids) as past, torch.no_grad():
        model(ids, past_key_values=past)
        past.crop(-21)
    assert held(cache, ids) == 20


def test_a_reset_session_keeps_nothing(model, cache, ids):
    with cache.session(ids) as past, torch.no_grad():
        model(ids, past_key_values=past)
        past.reset()
        past.check()
    assert held(cache, ids) == 0


def test_another_text_than_the_opened_one_is_kept_as_what_it_is(model, cache, ids):
    other = random_ids(torch.Generator().manual_seed(8), 30)
    with cache.session(ids) as past, torch.no_grad():
        model(other, past_key_values=past)
    assert held(cache, ids) == 0
    assert held(cache, other) == 28
    assert check_stored(model, cache, other[0]) == 28


def test_rows_follow_repeat_reorder_and_selection(model, cache, ids):
    branches = random_ids(torch.Generator().manual_seed(4), 8, rows=3)
    with cache.session(ids) as past, torch.no_grad():
        model(ids, past_key_values=past)
        past.batch_repeat_interleave(3)
        model(branches, past_key_values=past)
        past.reorder_cache(torch.tensor([2, 0, 0]))
        past.batch_select_indices(torch.tensor([0, 2]))
        past.check()
    texts = [torch.cat([ids[0], branch]) for branch in branches]
    assert [held(cache, text) for text in texts] == [48, 41, 48]  # 41: one token of a shared block
    for text in texts:
        check_stored(model, cache, text)


def test_two_sessions_side_by_side_record_their_own_tokens(model, cache, ids):
    other = random_ids(torch.Generator().manual_seed(8), 30)
    with cache.session(ids) as one, cache.session(other) as two, torch.no_grad():
        model(ids[:, :20], past_key_values=one)
        model(other, past_key_values=two)
        model(ids[:, 20:], past_key_values=one)
        model(ids)
    assert (held(cache, ids), held(cache, other)) == (40, 28)


def test_generate_inside_a_session_leaves_it_alone(model, cache, ids):
    with cache.session(ids) as past, torch.no_grad():
        model(ids[:, :20], past_key_values=past)
        same_inside = cache.generate(ids, max_new_tokens=4)
        logits = model(ids[:, 20:], past_key_values=past).logits
    assert torch.equal(same_inside, model.generate(ids, max_new_tokens=4))
    torch.testing.assert_close(logits[:, -1], model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)


def test_states_with_gradients_are_cached_without_them(model, cache, ids):
    with cache.session(ids) as past:
        model(ids[:, :20], past_key_values=past)
        model(ids[:, 20:], past_key_values=past)
        assert not past.layers[0].keys.requires_grad
    assert check_stored(model, cache, ids[0]) == 40
