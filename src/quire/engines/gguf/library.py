"""The shared library of llama.cpp: where it is, what of it is called, and whether it fits."""

import ctypes
import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from quire.config import user_cache
from quire.engines.gguf.bindings import DECLARATIONS, installed
from quire.engines.gguf.declarations import number, structures
from quire.errors import ConfigError

VARIABLE = "QUIRE_LLAMA_LIB"
SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
FILE = f"{'' if sys.platform == 'win32' else 'lib'}llama{SUFFIX}"
ATTENTION = "libquire-attention.so"
"""The file of quire's attention, beside a library that `quire gguf build` made."""

STATE_VERSIONS = range(3, 5)
"""Versions of a sequence's state that the parser knows."""

_MEND = "`quire gguf build` makes one"
_SYSTEM = ("/usr/lib", "/usr/local/lib", "/opt/homebrew/lib")
_SAID = 20

_P, _I, _U, _Z, _B = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_size_t,
    ctypes.c_bool,
)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_print_system_info": (ctypes.c_char_p, ()),
    "llama_supports_gpu_offload": (_B, ()),
    "llama_max_parallel_sequences": (_Z, ()),
    "llama_model_free": (None, (_P,)),
    "llama_free": (None, (_P,)),
    "llama_get_memory": (_P, (_P,)),
    "llama_model_get_vocab": (_P, (_P,)),
    "llama_model_n_ctx_train": (_I, (_P,)),
    "llama_model_n_swa": (_I, (_P,)),
    "llama_model_rope_type": (_I, (_P,)),
    "llama_model_size": (ctypes.c_uint64, (_P,)),
    "llama_model_desc": (_I, (_P, _P, _Z)),
    "llama_model_has_encoder": (_B, (_P,)),
    "llama_model_is_recurrent": (_B, (_P,)),
    "llama_model_is_hybrid": (_B, (_P,)),
    "llama_model_is_diffusion": (_B, (_P,)),
    "llama_model_meta_val_str": (_I, (_P, ctypes.c_char_p, _P, _Z)),
    "llama_vocab_n_tokens": (_I, (_P,)),
    "llama_vocab_is_eog": (_B, (_P, _I)),
    "llama_n_ctx": (_U, (_P,)),
    "llama_n_batch": (_U, (_P,)),
    "llama_n_seq_max": (_U, (_P,)),
    "llama_memory_clear": (None, (_P, _B)),
    "llama_memory_seq_rm": (_B, (_P, _I, _I, _I)),
    "llama_memory_seq_cp": (None, (_P, _I, _I, _I, _I)),
    "llama_memory_seq_pos_min": (_I, (_P, _I)),
    "llama_memory_seq_pos_max": (_I, (_P, _I)),
    "llama_state_seq_get_size_ext": (_Z, (_P, _I, _U)),
    "llama_state_seq_get_data_ext": (_Z, (_P, _P, _Z, _I, _U)),
    "llama_state_seq_set_data_ext": (_Z, (_P, _P, _Z, _I, _U)),
    "llama_state_get_size": (_Z, (_P,)),
    "llama_state_get_data": (_Z, (_P, _P, _Z)),
    "llama_get_logits": (_P, (_P,)),
    "llama_log_set": (None, (_P, _P)),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama_model_params": {"vocab_only": False, "progress_callback": None},
    "llama_context_params": {
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "type_k": 1,
        "type_v": 1,
        "offload_kqv": True,
        "kv_unified": False,
    },
}
"""Defaults of llama.cpp by which a structure that does not fit shows."""


class LlamaLibrary:
    """llama.cpp as functions: `library.llama_decode(context, batch)`.

    `path`      the file; its `llama.h` lies beside it, or in the folder `include` beside its folder, or above that; or a
                binding's declarations lie beside it
    `version`   the version that it tells, or that of its header's state
    `state_version`  that of its states; None where a binding's declarations lack it: each context proves their form
    `said`      its last lines of errors
    `has_attention`  quire's attention lies beside it; else `why_no_attention` says why not

    Raises `ConfigError` for a library that cannot be loaded, has no header, or does not fit it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = _header_of(path)
        self._structures = structures(header)
        self.state_version = number(header, "LLAMA_STATE_SEQ_VERSION")
        if self.state_version is not None and self.state_version not in STATE_VERSIONS:
            raise ConfigError(
                f"{path} writes states of version {self.state_version}, and quire reads "
                f"{STATE_VERSIONS.start} to {STATE_VERSIONS.stop - 1}: {_MEND} that fits"
            )
        self._loaded = _loaded(path)
        model, context, batch = (
            self._structures[f"llama_{each}"]
            for each in ("model_params", "context_params", "batch")
        )
        functions = _FUNCTIONS | {
            "llama_model_default_params": (model, ()),
            "llama_context_default_params": (context, ()),
            "llama_model_load_from_file": (_P, (ctypes.c_char_p, model)),
            "llama_init_from_model": (_P, (_P, context)),
            "llama_decode": (_I, (_P, batch)),
        }
        for name, (result, arguments) in functions.items():
            function = getattr(self._loaded, name, None)
            if function is None:
                raise ConfigError(f"{path} has no function {name}: {_MEND} that fits")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self._check()
        self.version = self._version()
        self._attention, self.why_no_attention = _attention_beside(path)
        self.has_attention = self._attention is not None
        self.said: deque[str] = deque(maxlen=_SAID)
        log = _LOG(self._take_line)
        _KEPT.append(log)
        self.llama_log_set(ctypes.cast(log, _P), None)
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"quire calls no function {name!r} of llama.cpp")

    def batch(self, **fields: Any) -> Any:
        """Return a `llama_batch` of these fields; addresses are integers."""
        return self._structures["llama_batch"](**fields)

    @contextmanager
    def attention(self, *, is_own: bool) -> Generator[None]:
        """Have contexts that are made within compute attention by quire's code, or llama.cpp's."""
        if self._attention is None:
            yield
            return
        with _SETTLED:
            self._attention.quire_attention_use(is_own)
            try:
                yield
            finally:
                self._attention.quire_attention_use(False)

    def why(self) -> str:
        """Return its first line of the last error, as the end of a sentence; empty for none."""
        return f": {self.said[0]}" if self.said else ""

    def _check(self) -> None:
        for name, wanted in _DEFAULTS.items():
            made = getattr(self, name.replace("_params", "_default_params"))()
            for field, value in wanted.items():
                if (found := getattr(made, field)) != value:
                    raise ConfigError(
                        f"{self.path} does not fit its llama.h: {name}.{field} is {found!r}, and its default is "
                        f"{value!r}; {_MEND} with its own header"
                    )

    def _version(self) -> str:
        told = getattr(self._loaded, "llama_version", None)
        if told is None:
            return f"state {self.state_version}"
        told.restype = ctypes.c_char_p
        return told().decode("utf-8", "replace")

    def _take_line(self, level: int, text: bytes, _: object) -> None:
        if level == _ERROR and (line := text.decode("utf-8", "replace").strip()):
            self.said.append(line)


_SETTLED = Lock()
"""Held while contexts are made: what computes their attention is a setting of the process."""

_ERROR = 4
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_KEPT: list[Any] = []
"""Functions that loaded libraries call, for as long as the process lives."""


def builds() -> Path:
    """Return the folder of the libraries that `quire gguf build` makes."""
    return user_cache() / "llama.cpp"


def find(tell: Callable[[str], object] = str) -> Path:
    """Return the library: of `QUIRE_LLAMA_LIB`, an installed binding, the newest `quire gguf build`, or the system.

    tell  called with why a binding is passed over
    Raises `ConfigError` where there is none.
    """
    if given := os.environ.get(VARIABLE):
        path = Path(given).expanduser()
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"{VARIABLE} is {given!r}, and there is no such library; {_MEND}")
        return path
    passed: list[str] = []
    for package, path, why in installed(FILE):
        if not why:
            return path
        passed.append(f"{package} is passed over: {why}")
        tell(passed[-1])
    made = sorted(builds().glob(f"*/lib/{FILE}"), key=lambda each: each.stat().st_mtime)
    folders = (*_SYSTEM, f"/usr/lib/{platform.machine()}-linux-gnu")
    for path in (*made[-1:], *(Path(each) / FILE for each in folders)):
        if path.is_file() and _headers(path):
            return path
    lacks = f"there is no library of llama.cpp ({FILE} with its llama.h): {_MEND}, or set {VARIABLE} to the file"
    raise ConfigError("; ".join([lacks, *passed]))


@cache
def load(path: Path | None = None) -> LlamaLibrary:
    """Return the library, loaded once. Raises `ConfigError`."""
    return LlamaLibrary((path or find()).resolve())


def missing() -> str | None:
    """Return why there is no library to load, None where there is one."""
    try:
        load()
    except ConfigError as error:
        return str(error)
    return None


def _headers(path: Path) -> list[Path]:
    near = (path.parent, path.parent.parent / "include", path.parent.parent.parent / "include")
    places = (*(each / "llama.h" for each in near), path.parent / DECLARATIONS)
    return [each for each in places if each.is_file()]


def _header_of(path: Path) -> str:
    found = _headers(path)
    if not found:
        raise ConfigError(
            f"{path} has no llama.h beside it or in ../include, which says how it is called; put that of its "
            f"version there, or have another one: {_MEND}"
        )
    return found[0].read_text(encoding="utf-8", errors="replace")


def _loaded(path: Path) -> Any:
    """Load the libraries that lie beside it first: its own path to them may be of another machine."""
    beside = sorted(
        path.parent.glob(f"*ggml*{SUFFIX}"),
        key=lambda each: ("base" not in each.name, each.stem == "libggml"),
    )
    try:
        for each in beside:
            ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be loaded: {error}; {_MEND} for this machine") from None


def _attention_beside(path: Path) -> tuple[Any, str]:
    """Return quire's attention, None and why where it is not there or cannot be loaded."""
    place = path.parent / ATTENTION
    if not place.is_file():
        return None, f"{path} has no {ATTENTION} beside it"
    try:
        loaded = ctypes.CDLL(str(place))
    except OSError as error:
        return None, f"{place} cannot be loaded: {error}"
    loaded.quire_attention_use.argtypes, loaded.quire_attention_use.restype = (_B,), None
    return loaded, ""
