"""Libraries of installed bindings: used before others where they fit, passed over with the reason where they do not."""

import shutil
import sys

import pytest
from small_llama import HEADER, compiled

from cli_help import refusal, told
from quire.engines.gguf import library
from quire.errors import ConfigError

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs cc")
PYTHON, SYNC = "llama_cpp", "llama_cpp_py_sync"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages; no library is built or in the system."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_SYSTEM", ())
    monkeypatch.setattr(library.platform, "machine", lambda: "none")
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


@pytest.fixture
def built(site, tmp_path):
    """A library that `quire gguf build` has made."""
    path = compiled(tmp_path / "cache" / "quire" / "llama.cpp" / "made" / "lib" / library.FILE)
    (path.parent / "llama.h").write_text(HEADER)
    return path


@pytest.fixture
def installed(site):
    """Install a binding as its package does; `header` is its text, `more` are further lines of C."""

    def made(module, header=HEADER, more=""):
        package = site / module
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
        if module == SYNC:
            if header:
                text = header.replace("#define LLAMA_STATE_SEQ_VERSION 4", "")
                (package / "_cffi_bindings.py").write_text(f'CDEF = """{text}"""')
            return compiled(package / library.FILE, more)
        if header:
            (site / "include").mkdir(exist_ok=True)
            (site / "include" / "llama.h").write_text(header)
        return compiled(package / "lib" / library.FILE, more)

    return made


def found():
    """The library that is found, and what is told of others."""
    lines = []
    return library.find(lines.append), lines


@pytest.mark.parametrize("module", [PYTHON, SYNC])
def test_a_binding_that_fits_comes_before_a_build_and_is_not_imported(built, installed, module):
    path = installed(module)
    assert found() == (path, [])
    assert library.LlamaLibrary(path).state_version == (4 if module == PYTHON else None)
    assert module not in sys.modules


def test_of_two_bindings_the_first_one_that_fits_is_used(installed):
    installed(PYTHON, header="")
    path, lines = installed(SYNC), found()[1]
    assert found()[0] == path
    assert len(lines) == 1
    assert lines[0].startswith("llama-cpp-python is passed over: ")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"header": ""}, "has no llama.h beside it or in ../include"),
        ({"header": HEADER.replace("bool swa_full;", "")}, "has no swa_full"),
        ({"header": HEADER.replace("VERSION 4", "VERSION 9")}, "writes states of version 9"),
        (
            {"header": HEADER.replace("n_ctx;", "n_ctx; uint32_t n_new;")},
            "does not fit its llama.h",
        ),
        ({"more": "void absent(void); void llama_more(void) { absent(); }"}, "cannot be loaded: "),
        (
            {"more": "#include <stdlib.h>\n__attribute__((constructor)) void x(void) { abort(); }"},
            "ended with code -6",
        ),
    ],
)
def test_a_binding_that_does_not_fit_is_passed_over_with_the_reason(built, installed, made, why):
    installed(PYTHON, **made)
    path, (line,) = found()
    assert path == built
    assert line.startswith("llama-cpp-python is passed over: ")
    assert why in line


def test_a_binding_without_its_library_is_passed_over(built, installed):
    installed(PYTHON).unlink()
    assert found() == (
        built,
        [f"llama-cpp-python is passed over: {sys.path[0]}/llama_cpp has no {library.FILE}"],
    )


def test_where_nothing_fits_the_error_names_each_binding(installed):
    installed(PYTHON, header="")
    installed(SYNC, header="")
    with pytest.raises(
        ConfigError, match=r"there is no library .*; llama-cpp-python is .*; llama-cpp-py-sync is "
    ):
        library.find()


def test_a_named_library_is_used_and_no_binding_is_looked_at(built, installed, monkeypatch):
    installed(
        PYTHON, more="#include <stdlib.h>\n__attribute__((constructor)) void x(void) { abort(); }"
    )
    monkeypatch.setenv(library.VARIABLE, str(built.parent))
    assert found() == (built, [])


def test_the_command_says_which_library_is_used_and_why_others_are_not(built, installed):
    installed(PYTHON, header="")
    said = told("gguf", "which")
    assert said["library"] == str(built)
    assert (said["version"], said["gpu"], said["attention"]) == ("a small one", False, "llama.cpp")
    assert [line.partition(": ")[0] for line in said["passed_over"]] == [
        "llama-cpp-python is passed over"
    ]


def test_the_command_says_that_there_is_none(installed):
    installed(SYNC, header="")
    said = refusal("gguf", "which")
    assert "there is no library of llama.cpp" in said
    assert "llama-cpp-py-sync is passed over" in said
