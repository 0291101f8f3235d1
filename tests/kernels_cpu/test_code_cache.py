"""Machine code that outlives its process: found by who needs the same, and by nobody else."""

import ast
import errno
import os
import shutil
import subprocess
import sys
from ctypes import CFUNCTYPE, c_int64
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.kernels import code_cache as kept
from quire.kernels import compiling, norms, product_code, products, vectors
from quire.kernels.attention import kernel
from quire.kernels.code import Code
from quire.kernels.compiling import Cpu, functions

SOURCES = Path(quire.__file__).parent

PROGRAM = """
import sys
from ctypes import CFUNCTYPE, c_int64
import numpy as np
from quire.kernels import compiling
from quire.kernels.vectors import FLOATS
from quire.kernels.code import Code

compiled, now = [], compiling._compiled

def call(*given):
    compiled.append(given)
    return now(*given)

def half(module):
    code = Code(module, "half", 1)
    code.store(code.exp2(code.constant(-1.0, FLOATS)), code.arguments[0])
    return [code]

compiling._compiled = call
exec(sys.argv[1])
found = np.zeros(16, np.float32)
CFUNCTYPE(None, c_int64)(compiling.functions(half)[0])(found.ctypes.data)
print(len(compiled), f"{found[0]:.3f}")
"""


def put(module, number):
    """Write a function that puts a number at an address."""
    code = Code(module, "put", 1)
    code.store(code.constant(number), code.arguments[0])
    return [code]


def put_twice(module, number):
    return put(module, 2 * number)


def found(write, *given):
    """Return what compiled code puts down."""
    place = np.zeros(1, np.int64)
    CFUNCTYPE(None, c_int64)(functions.__wrapped__(write, *given)[0])(place.ctypes.data)
    return place[0]


def start(home, path=SOURCES.parent, before=""):
    env = os.environ | {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(path)}
    command = [sys.executable, "-c", PROGRAM, before]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def result(process):
    """Return how many functions a process compiled, and what they found."""
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return said.split()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quire" / "kernels"


@pytest.fixture
def compiled(monkeypatch):
    """The arguments of each compilation."""
    calls, now = [], compiling._compiled

    def call(*given):
        calls.append(given)
        return now(*given)

    monkeypatch.setattr(compiling, "_compiled", call)
    return calls


def test_a_second_process_compiles_nothing(tmp_path):
    assert result(start(tmp_path)) == ["1", "0.500"]
    assert result(start(tmp_path)) == ["0", "0.500"]


@pytest.mark.ci
def test_processes_that_start_at_once_share_compiled_code(tmp_path):
    assert {tuple(result(each)) for each in [start(tmp_path) for _ in range(4)]} <= {
        ("0", "0.500"),
        ("1", "0.500"),
    }
    assert len(list((tmp_path / "quire" / "kernels").iterdir())) == 1
    assert result(start(tmp_path)) == ["0", "0.500"]


@pytest.mark.ci
def test_a_changed_source_is_compiled_anew(tmp_path):
    shutil.copytree(SOURCES, tmp_path / "src" / "quire")
    source = tmp_path / "src" / "quire" / "kernels" / "code.py"
    assert result(start(tmp_path, tmp_path / "src")) == ["1", "0.500"]
    old = source.read_text()
    source.write_text(old.replace("power = power.max(-126.0)", "power = power.max(-126.0) * 2.0"))
    assert result(start(tmp_path, tmp_path / "src")) == ["1", "0.250"]
    source.write_text(old)
    assert result(start(tmp_path, tmp_path / "src")) == ["0", "0.500"]


def test_code_of_a_source_that_changed_after_import_is_not_stored(tmp_path):
    shutil.copytree(SOURCES, tmp_path / "src" / "quire")
    source = tmp_path / "src" / "quire" / "kernels" / "code.py"
    change = f"from pathlib import Path; Path({str(source)!r}).write_text('nonsense')"
    assert result(start(tmp_path, tmp_path / "src", change)) == ["1", "0.500"]
    assert not (tmp_path / "quire").exists()


@pytest.mark.parametrize("how", ["a file", "no home", "read-only"])
def test_code_without_a_writable_cache_is_compiled_each_time(tmp_path, monkeypatch, compiled, how):
    if how == "a file":
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    elif how == "no home":
        monkeypatch.setattr(kept, "user_cache", lambda: Path("~nobody-of-this-name").expanduser())
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert [found(put, 7), found(put, 7)] == [7, 7]
    assert len(compiled) == 2


def test_a_full_disk_keeps_nothing(home, monkeypatch, compiled):
    def full(*given, **how):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "replace", full)
        assert found(put, 7) == 7
    assert not list(home.iterdir())
    assert [found(put, 7), found(put, 7)] == [7, 7]
    assert len(compiled) == 2


@pytest.mark.parametrize("at", [0, 31, 32, 200, -1])
def test_a_damaged_file_is_made_again(home, compiled, at):
    assert found(put, 7) == 7
    (file,) = home.iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at:][1:]):
        file.write_bytes(damaged)
        compiled.clear()
        assert found(put, 7) == 7
        assert len(compiled) == 1
        assert file.read_bytes() == whole


def test_a_code_file_that_others_may_write_is_not_loaded(home, compiled):
    assert found(put, 7) == 7
    (file,) = home.iterdir()
    file.chmod(0o622)
    assert found(put, 7) == 7
    assert len(compiled) == 2
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_name_of_compiled_code_covers_source_cpu_and_compiler(home, monkeypatch, compiled):
    assert [found(put, 7), found(put, 8), found(put_twice, 7)] == [7, 8, 14]
    monkeypatch.setattr(compiling, "this_cpu", lambda: Cpu("", ""))
    assert found(put, 7) == 7
    monkeypatch.setattr(compiling, "_COMPILER", "another")
    assert found(put, 7) == 7
    assert len(compiled) == len(list(home.iterdir())) == 5


def test_the_oldest_code_files_are_deleted(home, monkeypatch):
    monkeypatch.setattr(kept, "MOST", 3)
    made = []
    for number in range(5):
        found(put, number)
        made += set(home.iterdir()) - set(made)
    assert set(home.iterdir()) == set(made[-3:])


def test_modules_that_generate_code_import_watched_sources_only():
    writers = [norms, product_code, products, vectors, compiling, kernel]
    todo, seen = [Path(each.__file__) for each in writers], set()
    while todo:
        path = todo.pop()
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("quire."):
                names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
                places = [SOURCES.parent / name.replace(".", "/") for name in names]
                files = [p for place in places for p in (place.with_suffix(".py"),) if p.exists()]
                todo += set(files) - seen - {SOURCES / "config.py"}
    assert seen <= set(kept._SOURCES)


WRITTEN = """
from hashlib import sha256
from llvmlite import ir
from quire.kernels import compiling
from quire.kernels import norms
from quire.kernels import products
from quire.kernels.attention import kernel
from quire.kernels.attention.layer import Shape

def text(write, *given):
    module = ir.Module()
    for code in write(module, *given):
        code.end()
    return str(module)

texts = [
    text(kernel.phases, Shape(32, 32, 2, 16, True, False, True, True)),
    text(products._written, "gated", True, True, True),
    text(norms._written, 24, True, False),
    text(compiling._run),
]
digest = sha256("".join(texts).encode()).hexdigest()
"""


@pytest.mark.ci
def test_another_process_writes_the_same_code():
    own = {}
    exec(WRITTEN, own)
    command = [sys.executable, "-c", WRITTEN + "print(digest)"]
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(SOURCES.parent)}
    other = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == own["digest"]
