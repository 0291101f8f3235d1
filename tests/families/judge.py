"""Whether quire gives the tokens and logits of one class's model, or why it refuses it.

A class is sorted into one of

    identical   every request gives what `model.generate` gives, and what is stored is what a
                fresh forward computes; a corrupted cache is noticed by the same comparison
    refused     quire's error says why, before anything is computed
    unbuildable transformers itself makes or runs no such model here
    wrong       anything else: a defect, of quire or of this suite
"""

import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

from classes import CannotBeBuilt, tiny
from hf_help import check_stored, left_padded

from quire import ops
from quire.engines.hf import PrefixCache
from quire.errors import ConfigError, QuireError
from quire.tensors.kinds import MEDIA_MODELS, decoder_config, layer_kinds

STATES = ("identical", "refused", "unbuildable", "wrong")
LIMIT_S = 180
ORDER = (
    "full",
    "sliding",
    "chunked",
    "recurrent",
    "convolution",
    "hybrid (full and recurrent in one layer)",
    "hybrid (sliding and recurrent in one layer)",
    "none of its own",
)
PADDING = "computes rows behind padding differently"  # and a batch is refused from there on


@dataclass
class Verdict:
    """The verdict on one class. `without`: requests that transformers or quire does not take, and why."""

    name: str
    model_class: str = ""
    state: str = "wrong"
    reason: str = ""
    layers: str = ""
    reused: int = 0
    without: dict = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self):
        return asdict(self)


class _NotPlain(Exception):  # noqa: N818
    """`model.generate` itself does not take such a request."""


def judge(name):
    """Sort one class; never raises."""
    began, verdict = time.perf_counter(), Verdict(name)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(LIMIT_S)
    try:
        _judge(name, verdict)
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this class
        verdict.state, verdict.reason = "wrong", _said(error)
    finally:
        signal.alarm(0)
    verdict.seconds = round(time.perf_counter() - began, 1)
    return verdict


def _judge(name, verdict):
    try:
        model = tiny(name)
    except CannotBeBuilt as error:
        verdict.state, verdict.reason = "unbuildable", str(error)
        return
    verdict.model_class = type(model).__name__
    try:
        cache = PrefixCache(model, "64MiB", block_size=4, debug=True)
    except QuireError as error:
        verdict.state, verdict.reason = "refused", _said(error)
        return
    verdict.layers = _layers(model.config)
    requests, wrong = Requests(model, cache), []
    for request in (*REQUESTS, stored, corrupted):
        try:
            request(requests)
        except _NotPlain as error:
            verdict.without[request.__name__] = f"transformers: {error}"
        except ConfigError as error:
            if PADDING not in str(error):
                wrong.append(f"{request.__name__}: {_said(error)}")
            verdict.without[request.__name__] = f"quire: {error}"
        except Exception as error:  # noqa: BLE001 - every kind of it is told, by its request
            wrong.append(f"{request.__name__}: {_said(error)}")
    verdict.reused = requests.reused
    verdict.state = "wrong" if wrong else "identical"
    verdict.reason = "; ".join(wrong)


class Requests:
    """Requests against one model and its cache, each compared with the plain model."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache
        self.draw = torch.Generator().manual_seed(4)
        num_ids = model.get_input_embeddings().num_embeddings
        self.limit = min(num_ids, 97)  # behind it are placeholders of media
        self.never = list(range(self.limit, num_ids)) or None
        self.texts, self.reused = [], 0

    def ids(self, length):
        return torch.randint(3, self.limit, (length,), generator=self.draw)

    def same(self, rows, **arguments):
        """Generate with and without quire; demand the same tokens and logits; return the texts."""
        ids, mask = left_padded(rows)
        return self.same_padded(ids, mask, **arguments)

    def same_padded(self, ids, mask, **arguments):
        arguments = {"max_new_tokens": 4, "suppress_tokens": self.never, **arguments}
        given = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
        torch.manual_seed(5)
        try:
            plain = self.model.generate(input_ids=ids, **given, **arguments)
        except Exception as error:
            raise _NotPlain(_said(error)) from error
        torch.manual_seed(5)
        reused = self.cache.generate(input_ids=ids, **given, **arguments)
        self.reused += self.cache.last.cached_tokens
        for step, (one, two) in enumerate(zip(plain.logits, reused.logits, strict=False)):
            off = float((one - two).abs().nan_to_num().max())
            scale = max(1.0, float(one.abs().nan_to_num(posinf=0, neginf=0).max()))
            assert off <= 1e-4 * scale, f"logits of step {step} are off by {off:.2g}"
        assert torch.equal(plain.sequences, reused.sequences), "other tokens"
        ops.check(self.cache.manager)
        texts = [row[row != 0] for row in reused.sequences]
        self.texts += texts
        return texts


def turns(requests):
    """Three turns of a conversation, the second past every window of a twin."""
    (text,) = requests.same([requests.ids(37)])
    (text,) = requests.same([torch.cat([text, requests.ids(50)])], max_new_tokens=14)
    requests.same([torch.cat([text, requests.ids(3)])])


def branch(requests):
    """Another end behind the head of an earlier prompt, inside a window and past it."""
    text = requests.texts[-1]
    for head in (18, 70):
        requests.same([torch.cat([text[:head], requests.ids(9)])])


def a_token_at_a_time(requests):
    """The same prompt again, and with one token more."""
    text = requests.texts[0]
    for extra in (0, 1):
        requests.same([torch.cat([text, requests.ids(extra)])])


def ragged_new_first(requests):
    """A new short row and a long one with a cached head."""
    head = requests.texts[0][:32]
    requests.same([requests.ids(20), torch.cat([head, requests.ids(28)])])


def ragged_cached_first(requests):
    """The same the other way round, with a third row."""
    head = requests.texts[0][:32]
    rows = [torch.cat([head, requests.ids(28)]), requests.ids(20), requests.ids(47)]
    requests.same(rows)


def padded(requests):
    """A row behind padding that no other row asks for, cached and new."""
    for text in (requests.texts[0][:30], requests.ids(13)):
        ids = torch.cat([torch.zeros(7, dtype=torch.long), text])[None]
        mask = torch.ones_like(ids)
        mask[:, :7] = 0
        requests.same_padded(ids, mask)


def return_sequences(requests):
    """Samples of one prompt."""
    requests.same([requests.texts[0]], do_sample=True, num_return_sequences=3, temperature=0.9)


def beams(requests):
    """A beam search."""
    requests.same([requests.texts[0]], num_beams=2, num_return_sequences=2)


def ragged_again(requests):
    """Another turn of what ragged batches left, as one batch and each on its own."""
    rows = [torch.cat([text, requests.ids(2)]) for text in requests.texts[-3:]]
    requests.same(rows)
    for row in rows:
        requests.same([row])


REQUESTS = (
    turns,
    branch,
    a_token_at_a_time,
    ragged_new_first,
    ragged_cached_first,
    ragged_again,
    padded,
    return_sequences,
    beams,
)


def stored(requests):
    """Check that the stored KV of the longest texts is that of a fresh forward."""
    assert requests.reused > 0, "nothing was ever reused"
    for text in sorted(requests.texts, key=len)[-5:]:
        assert check_stored(requests.model, requests.cache, text) > 0


def corrupted(requests):
    """Without this a class whose tokens do not depend on the context would pass."""
    for pool in requests.cache.kept.store.pools:
        for states in _tensors(pool):
            states.copy_(-3 * states)
    try:
        requests.same([requests.texts[0]])
    except AssertionError:
        return
    raise AssertionError("a corrupted cache changes nothing")


def _tensors(pool):
    if hasattr(pool, "k"):
        return [pool.k, pool.v]
    return [states for layer in pool.layers for states in layer]


def _layers(config):
    """The kinds of layers in a fixed order, and what else tells models apart."""
    words = " + ".join(sorted({_word(kind) for kind in layer_kinds(config)}, key=ORDER.index))
    latent = " (latent: MLA)" if getattr(decoder_config(config), "kv_lora_rank", None) else ""
    media = ", with images, video or audio" if config.model_type in MEDIA_MODELS else ""
    return words + latent + media


def _word(kind):
    if kind.tokens and kind.states:
        return f"hybrid ({kind.tokens} and recurrent in one layer)"
    if kind.states:
        return "convolution" if kind.word == "conv" else "recurrent"
    return kind.tokens or "none of its own"


def _said(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _too_long(*_):
    raise TimeoutError(f"not done after {LIMIT_S} s")
