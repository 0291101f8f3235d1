"""Windows, chunks and states on a CUDA device: the same code, the same answers."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

from hf_help import HYBRID_FAMILIES, left_padded, random_ids, tiny_config  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from quire import ops  # noqa: E402
from quire.core.blocks import BlockCopy  # noqa: E402
from quire.engines.hf import PrefixCache  # noqa: E402
from quire.tensors import StateLayout, StatePool, StateShape, apply_copies  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("debug_nan", [False, True])
def test_states_are_copied_and_resized_as_on_the_host(debug_nan):
    shapes = (
        StateShape("conv.0", (4, 3), torch.float16),
        StateShape("recurrent.0", (8,), torch.float32),
    )
    layout = StateLayout((shapes, shapes[:1]))
    pools = [StatePool(layout, 12, device, debug_nan=debug_nan) for device in ("cpu", "cuda")]
    for held, held_cuda in zip(*map(_tensors, pools), strict=True):
        held.copy_(torch.randn(held.shape))
        held_cuda.copy_(held)
    for pool in pools:
        apply_copies(pool, [BlockCopy(0, 1, 2, 1), BlockCopy(0, 2, 1, 1)], fresh=[5])
        pool.write(7, pool.read(3))
        pool.resize(9)
    for held, held_cuda in zip(*map(_tensors, pools), strict=True):
        torch.testing.assert_close(held_cuda.cpu(), held, equal_nan=True, rtol=0, atol=0)


def _tensors(pool):
    return [held for layer in pool.layers for held in layer]


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_three_turns_give_the_tokens_of_the_plain_model(family, arguments):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family)).eval().cuda()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and weight.std() < 0.05:
                weight.mul_(5.0)
    cache = PrefixCache(model, "8MiB", 4, debug=True)
    texts = [random_ids(torch.Generator().manual_seed(n), n)[0] for n in (31, 44)]
    for _ in range(3):
        ids, mask = left_padded(texts)
        outputs = [
            generate(
                input_ids=ids.cuda(),
                attention_mask=mask.cuda(),
                max_new_tokens=9,
                eos_token_id=-1,
                pad_token_id=0,
                **arguments,
            )
            for generate in (model.generate, cache.generate)
        ]
        assert torch.equal(*outputs)
        texts = [row[row != 0].cpu() for row in outputs[0]]
    assert cache.last.cached_tokens > cache.last.computed_tokens
    ops.check(cache.manager)
