"""`quire gguf build`: a library of its own for each set of flags, or a refusal that leaves nothing."""

import shutil
import tarfile

import pytest

pytest.importorskip("torch")
from small_llama import HEADER, source

from quire.engines.gguf import building, library
from quire.engines.gguf.building import build
from quire.errors import ConfigError

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(
        not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and c++"
    ),
]

PROJECT = """
cmake_minimum_required(VERSION 3.14)
project(small C)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(llama SHARED llama.c)
target_include_directories(llama PRIVATE include)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a source package of a library that answers nothing, but fits; with further lines of C."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(library.VARIABLE, raising=False)

    root = tmp_path / "small" / "llama.cpp"

    def made(more=""):
        (root / "include").mkdir(parents=True, exist_ok=True)
        (root / "include" / "llama.h").write_text(HEADER)
        (root / "llama.c").write_text(source(more))
        (root / "CMakeLists.txt").write_text(PROJECT)
        with tarfile.open(tmp_path / "small.tar.gz", "w:gz") as packed:
            packed.add(tmp_path / "small", "small")
        return tmp_path / "small.tar.gz"

    made.root = root
    return made


def test_a_library_is_built_once_for_its_source_and_flags_and_found(package):
    told = []
    source = package()
    path = build(source=source, tell=told.append)
    assert "unpacking" in told
    assert any(line.startswith("building [") for line in told)
    assert library.find() == path
    assert library.LlamaLibrary(path).version == "a small one"
    told.clear()
    assert build(source=source, tell=told.append) == path
    assert told == []
    other = build(source=package("int more;"))
    assert other != path
    assert library.find() == other  # the newest one


def test_a_build_that_fails_shows_its_error_and_leaves_nothing(package):
    with pytest.raises(
        ConfigError, match=r"cmake failed with code \d+:\n(.*\n)*.*error.*no_such_type"
    ):
        build(source=package("no_such_type x;"))
    assert not [*library.builds().iterdir()]


def test_a_library_that_does_not_fit_is_not_kept(package, monkeypatch):
    monkeypatch.setattr(library, "STATE_VERSIONS", range(9, 10))
    with pytest.raises(ConfigError, match="writes states of version 4, and quire reads 9 to 9"):
        build(source=package())
    assert not [*library.builds().iterdir()]


def test_a_library_without_attention_is_built_where_the_compiler_fails_at_it(package):
    internal = package.root / "ggml" / "src" / "ggml-backend-impl.h"
    internal.parent.mkdir(parents=True)
    internal.write_text("")
    told = []
    made = library.LlamaLibrary(build(source=package(), tell=told.append))
    assert not made.has_attention
    assert made.why_no_attention == f"{made.path} has no {library.ATTENTION} beside it"
    assert "without quire's attention, which is left to llama.cpp: c++ failed" in told[-1]
    assert "ggml.h" in told[-1]


def test_attention_that_cannot_be_loaded_is_left_out_with_the_reason(package):
    path = build(source=package())
    (path.parent / library.ATTENTION).write_text("of another machine")
    made = library.LlamaLibrary(path)
    assert not made.has_attention
    assert f"{library.ATTENTION} cannot be loaded: " in made.why_no_attention


def test_another_processor_has_a_build_of_its_own(package, monkeypatch):
    source = package()
    path = build(source=source)
    monkeypatch.setattr(building, "_processor", lambda: "another")
    assert build(source=source) != path


@pytest.mark.parametrize("tool", ["cmake", "c++"])
def test_a_missing_tool_is_named(package, monkeypatch, tool):
    which = shutil.which
    monkeypatch.setattr(
        building.shutil, "which", lambda name: None if name == tool else which(name)
    )
    with pytest.raises(ConfigError, match=f"building llama.cpp needs {tool.replace('+', '.')}"):
        build(source=package())
