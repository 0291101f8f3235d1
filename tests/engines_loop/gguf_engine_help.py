"""A tiny Llama in a GGUF file, and random traffic to engines that compute it with llama.cpp."""

import functools
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from loop_help import EOS, tiny_model
from rules_help import letters
from traffic_help import Traffic

from gguf_help import write_llama
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


@functools.cache
def tiny_file():
    """The file of the tiny Llama, made once per process."""
    folder = tempfile.TemporaryDirectory(prefix="quire-gguf-")
    tiny_file.folder = folder  # removed with the process
    return write_llama(Path(folder.name) / "tiny.gguf", tiny_model("llama"), TOKENS)


def tiny_gguf(**settings):
    """The tiny Llama, computed by llama.cpp; in float32, so that the places of cells hardly show."""
    exact = {"type_k": "f32", "type_v": "f32", "n_threads": 1}
    return GgufModel(tiny_file(), **exact | settings)


class GgufTraffic(Traffic):
    """Traffic to engines over the GGUF file of a model; each engine has a context of its own, mostly a small one."""

    def __init__(self, seed):
        super().__init__(tiny_model("llama"), seed)
        self.roomy.close()
        self.gguf = tiny_gguf(n_ctx=2048)
        self.roomy = Engine(self.gguf, letters(), num_blocks=100, block_size=8)

    def _engine(self, options):
        pick, given = self.random.choice, self._drawn() | options
        gguf = tiny_gguf(n_ctx=pick((256, 256, 1024)))
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
