"""The tensors and the engine on a CUDA device: the same code, the same answers."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from quire import ops  # noqa: E402
from quire.core.blocks import BlockCopy  # noqa: E402
from quire.engines.hf import PrefixCache  # noqa: E402
from quire.tensors import KVLayout, KVPool, apply_copies, gather, scatter  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def filled_pools(**options):
    layout = KVLayout(3, 4, 32, 16, torch.float16, 16)
    pools = [KVPool(layout, 64, device, **options) for device in ("cpu", "cuda")]
    for name in ("k", "v"):
        values = torch.randn(getattr(pools[0], name).shape).half()
        for pool in pools:
            getattr(pool, name).copy_(values)
    return pools


def assert_same(pools):
    cpu, cuda = pools
    torch.testing.assert_close(cuda.k.cpu(), cpu.k, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(cuda.v.cpu(), cpu.v, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("ids", [[9, 3, 60, 4], list(range(10, 40))])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 57])
def test_gather_reads_what_it_reads_on_the_host(ids, num_tokens):
    cpu, cuda = (gather(pool, ids, num_tokens) for pool in filled_pools())
    for (k, v), (k_cuda, v_cuda) in zip(cpu, cuda, strict=True):
        assert torch.equal(k_cuda.cpu(), k)
        assert torch.equal(v_cuda.cpu(), v)


def test_scatter_writes_what_it_writes_on_the_host():
    pools = filled_pools()
    kv = [(torch.randn(4, 41, 32).half(), torch.randn(4, 41, 16).half()) for _ in range(3)]
    for pool in pools:
        scatter(pool, [5, 0, 7, 63], 11, [(k.to(pool.device), v.to(pool.device)) for k, v in kv])
    assert_same(pools)


@pytest.mark.parametrize("debug_nan", [False, True])
def test_copies_are_one_simultaneous_assignment(debug_nan):
    pools = filled_pools(debug_nan=debug_nan)
    for pool in pools:
        apply_copies(
            pool, [BlockCopy(0, 1, 2, 16), BlockCopy(0, 2, 3, 7), BlockCopy(0, 3, 1, 1)], fresh=[9]
        )
    assert_same(pools)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().cuda()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(5.0)
    return model


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_generate_gives_the_tokens_of_the_plain_model(model, arguments):
    cache = PrefixCache(model, "4MiB", debug=True)
    ids = torch.randint(3, 97, (1, 70)).cuda()
    for _ in range(2):
        outputs = []
        for generate in (model.generate, cache.generate):
            torch.manual_seed(1)
            outputs.append(
                generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=12,
                    **arguments,
                )
            )
        assert torch.equal(*outputs)
    assert cache.last.cached_tokens >= 64
    ops.check(cache.manager)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}], ids=str)
def test_ids_on_the_host_are_fine(model, arguments):
    cache = PrefixCache(model, "4MiB", debug=True)
    ids = torch.randint(3, 97, (1, 50))
    plain = model.generate(ids, max_new_tokens=8, **arguments)
    for _ in range(2):
        assert torch.equal(cache.generate(ids, max_new_tokens=8, **arguments), plain)
    output = cache.generate(ids, max_new_tokens=8, return_dict_in_generate=True, **arguments)
    assert torch.equal(output.sequences, plain)
    assert cache.last.cached_tokens >= 48


def test_a_ragged_batch_gives_the_tokens_of_the_plain_model(model):
    cache = PrefixCache(model, "4MiB", debug=True)
    ids = torch.randint(3, 97, (3, 60)).cuda()
    mask = torch.ones_like(ids)
    ids[1, :23], mask[1, :23] = 0, 0
    for _ in range(2):
        outputs = [
            generate(input_ids=ids, attention_mask=mask, max_new_tokens=8)
            for generate in (model.generate, cache.generate)
        ]
        assert torch.equal(*outputs)
    assert cache.last.cached_tokens > 0
