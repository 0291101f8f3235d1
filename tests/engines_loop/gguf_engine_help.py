"""Tiny models in GGUF files, and random traffic to engines that compute them with llama.cpp.

A Llama, an LFM2 of attention and convolutions, and a Mamba, which keeps recurrent states alone.
"""

import functools
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch
from loop_help import EOS, VOCAB, make_cache, tiny_model
from rules_help import letters
from traffic_help import Traffic
from transformers import MambaConfig, MambaForCausalLM

from gguf_help import write_lfm2, write_llama, write_mamba
from quire.engines.gguf import GgufModel
from quire.engines.gguf.context import NoCells
from quire.engines.loop import Engine

TOKENS = SimpleNamespace(
    backend_tokenizer=SimpleNamespace(
        to_str=lambda: json.dumps({"model": {"merges": [["t", "5"]]}})
    ),
    convert_ids_to_tokens=lambda ids: [f"t{each}" for each in ids],
    get_added_vocab=lambda: {"": EOS},
    chat_template=None,
)


WRITERS = {"llama": write_llama, "lfm2": write_lfm2, "mamba": write_mamba}


@functools.cache
def plain_model(kind):
    """The model of transformers that a file is made of."""
    if kind != "mamba":
        return tiny_model(kind)
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, initializer_range=0.3,
        pad_token_id=0, bos_token_id=1, eos_token_id=EOS,
    )  # fmt: skip
    return MambaForCausalLM(config).eval()


@functools.cache
def tiny_file(kind="llama"):
    """The file of a tiny model, made once per process."""
    folder = tempfile.TemporaryDirectory(prefix="quire-gguf-")
    KEPT.append(folder)  # removed with the process
    return WRITERS[kind](Path(folder.name) / "tiny.gguf", plain_model(kind), TOKENS)


KEPT = []


def tiny_gguf(kind="llama", **settings):
    """A tiny model, computed by llama.cpp; in float32, so that the places of cells hardly show."""
    exact = {"type_k": "f32", "type_v": "f32", "n_threads": 1}
    return GgufModel(tiny_file(kind), **exact | settings)


class GgufTraffic(Traffic):
    """Traffic to engines over the GGUF file of a model; each engine has a context of its own, mostly a small one."""

    def __init__(self, seed, kind="llama"):
        self.kind = kind
        super().__init__(plain_model(kind), seed)

    def _beside(self):
        self.gguf = tiny_gguf(self.kind, n_ctx=2048)
        cache = (
            make_cache(self.model, block_size=4, num_blocks=30) if self.kind == "llama" else None
        )
        return cache, Engine(self.gguf, letters(), num_blocks=100, block_size=8)

    def _engine(self, options):
        pick, given = self.random.choice, self._drawn() | options
        gguf = tiny_gguf(self.kind, n_ctx=pick((256, 256, 1024)))
        engine = Engine(gguf, letters(), **given)
        engine._forward.residents.idle_steps = pick((-1, 0, 3, 64))
        engine.when_computing(lambda: self._look(engine))
        return engine

    def _look(self, engine):
        """See that sequences have the positions that the pool believes; sometimes have llama.cpp fail."""
        engine._forward.residents.check()
        if self.random.random() < 0.1:  # what runs has to be restored
            with suppress(NoCells):
                engine._forward.residents.make_room(())
        if self.random.random() < 0.02:
            self.raised = True
            raise RuntimeError("a part of the model broke")

    def _write(self):
        """Change nothing: the weights of a file stay."""

    def _fail(self, module, _):
        """Fail elsewhere."""
