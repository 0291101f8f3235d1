"""Each extra is enough for what it is for: nothing asks for another one afterwards."""

import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import quire
from quire.extras import DISTRIBUTION, DISTRIBUTIONS, EXTRAS, extra_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PARTS = {"quire-sim": "sim", "quire-router": "router"}
MODULES = {package: module for module, package in DISTRIBUTIONS.items()}
TRACE = "tests/data/traces/mooncake_conversation.head.jsonl.gz"
WITHOUT = """
import importlib.abc, importlib.util, sys
blocked = set()
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in blocked else real(name, *rest)
"""
EACH = """
import contextlib, io, json, traceback
def run(code):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = exec(code, {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
            status = 1
    return status or 0, out.getvalue(), err.getvalue()
ran = []
for names, code in json.load(sys.stdin):
    blocked.clear()
    blocked.update(names)
    ran.append(run(code))
print(json.dumps(ran))
"""
MODEL = "model = AutoModelForCausalLM.from_pretrained(quire.demo_model())"
HF = f"import quire; from transformers import AutoModelForCausalLM; {MODEL}"
COMMAND = "import sys; sys.argv = {words!r}; from quire.cli import main; main()"
CHAT = ("generate", "--max-new-tokens", "2", "hi")

THINGS = {
    ("", "CacheManager"): "from quire import CacheManager; CacheManager(8, 4).open([1, 2, 3])",
    ("hf", "KVPool"): "from quire import KVPool, SlotPool",
    ("hf", "PrefixCache with tiers"): f"{HF}; from quire import PrefixCache\n"
    "with PrefixCache(model, '8MiB', tiers=['host:8MiB', 'disk:{tmp}?capacity=8MiB']) as cache:\n"
    "    cache.generate(input_ids=quire_ids(), max_new_tokens=2)\n"
    "    cache.save('{tmp}/saved')",
    ("tiers", "TierStack"): "from quire.tiers import Host, TierStack; TierStack([Host('1MiB')]).close()",
    ("serve", "the server"): "from quire.serve.app import make_app; import openai, uvicorn",
    ("observe", "metrics"): "from quire.observe.prometheus import CacheCollector",
    ("observe", "events"): "from quire.observe.zmq import Publisher, Subscriber",
    ("redis", "Redis"): "from quire.tiers.redis.url import parse_server; parse_server('redis://h')",
    ("objects", "Objects"): "from quire.tiers import open_tier; open_tier('memory:///').close()",
    ("quire-sim", "trace"): ("trace", "info", TRACE),
    ("quire-sim", "curve"): ("curve", TRACE),
    ("quire-sim", "replay"): ("replay", TRACE, "--capacity", "1%", "--policies", "lru", "--jobs", "1"),
    ("quire-sim", "plan"): ("plan", "--model", "llama-3.1-8b", "--gpu", "h100"),
    ("quire-sim", "simulate"): ("simulate", "--trace", TRACE, "--num-requests", "9"),
    ("cli", "inspect"): ("inspect",),
    ("cli", "doctor"): ("doctor",),
    ("cli", "cache"): ("cache", "verify", "{tmp}"),
    ("cli", "bench core"): ("bench", "core", "--rows", "alloc_free_1"),
    ("hf", "generate --tier"): (*CHAT, "--tier", "disk:{tmp}/kv?capacity=9MiB"),
    ("quire-sim", "replay --report"): (
        "replay", TRACE, "--capacity", "1%", "--policies", "lru", "--jobs", "1",
        "--report", "{tmp}/r.html"),
    ("quire-router", "the proxy"): "from quire_router.proxy import Proxy\n"
    "from quire_router.prefixes import SentPrefixes; SentPrefixes(8)",
    ("quire-sim", "a trace in zstd"): "from quire_sim.trace import open_trace, save_trace\n"
    f"save_trace(open_trace({TRACE!r}), '{{tmp}}/t.jsonl.zst')",
}  # fmt: skip

GROWING = ["", "tiers", "cli", "quire-sim"], ["hf", "gguf"]
"""Extras and parts of which each brings all that the one before does: one process does what they are for, in this order."""


def closure(extra):
    """The packages that pip installs for an extra of quire-kv, or for another part."""
    names = set()
    lines = PROJECT["optional-dependencies"].get(extra)
    if lines is None:
        text = (ROOT / PARTS[extra] / "pyproject.toml").read_text("utf-8")
        lines = tomllib.loads(text)["project"]["dependencies"]
    for line in lines:
        of_own = re.match(rf"{DISTRIBUTION}\[(.*)\]", line)
        if of_own:
            names.update(*(closure(each) for each in of_own[1].split(",")))
        else:
            names.add(re.match(r"[\w.-]+", line)[0])
    return names


def test_the_table_of_extras_is_that_of_the_package():
    declared = {name: closure(name) for name in PROJECT["optional-dependencies"] if name != "all"}
    table = {
        name: {DISTRIBUTIONS.get(module, module) for module in extra.modules}
        for name, extra in EXTRAS.items()
    }
    assert table == declared


def brought(extra):
    """The importable modules with an extra, of all that any extra brings."""
    if extra in PARTS:
        mine = {MODULES.get(package, package) for package in closure(extra)}
    else:
        mine = set(EXTRAS[extra].modules) if extra else set()
    if mine & {"torch", "matplotlib"}:
        mine |= {"jinja2", "PIL"}  # which these bring themselves
    return mine


def program_of(thing, folder):
    """The program with which Python does a thing."""
    code = THINGS[thing]
    if isinstance(code, tuple):
        code = COMMAND.format(
            words=["quire", *(word.replace("{tmp}", str(folder)) for word in code)]
        )
    ids = "def quire_ids():\n    import torch\n    return torch.arange(40)[None]\n"
    return ids + code.replace("{tmp}", str(folder))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return the code with which a thing ended, and what it printed and complained of."""
    every = set().union(*map(brought, [*EXTRAS, *PARTS]))
    found = {}

    def of(thing):
        if thing not in found:
            extras = next((each for each in GROWING if thing[0] in each), [thing[0]])
            assert all(brought(a) <= brought(b) for a, b in itertools.pairwise(extras))
            things = [each for extra in extras for each in THINGS if each[0] == extra]
            asked = [
                (sorted(every - brought(each[0])), program_of(each, tmp_path_factory.mktemp("of")))
                for each in things
            ]
            done = subprocess.run(
                [sys.executable, "-c", WITHOUT + EACH],
                input=json.dumps(asked), capture_output=True, text=True, check=True, cwd=ROOT,
            )  # fmt: skip
            *others, ran = done.stdout.splitlines()
            beside = "\n".join([*others, done.stderr])  # what was printed by no Python
            for each, (code, out, err) in zip(things, json.loads(ran), strict=True):
                found[each] = code, out, err + beside
        return found[thing]

    return of


@pytest.mark.cases(1)
@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: f"{thing[1]} with [{thing[0]}]")
def test_an_extra_is_enough_for_what_it_is_for(thing, outcome):
    code, out, err = outcome(thing)
    assert "pip install" not in err + out * (thing[1] != "doctor")
    assert "No module named" not in out + err
    assert "Traceback" not in err, err
    assert thing[1] == "cache" or code == 0, err  # there is no such file


@pytest.mark.parametrize("module", sorted({m for extra in EXTRAS.values() for m in extra.modules}))
def test_the_extra_named_for_a_missing_library_installs_it(module):
    assert module in EXTRAS[extra_of(module)].modules
    assert extra_of(f"{module}.inside") == extra_of(module)


@pytest.mark.parametrize("name", ["PrefixCache", "KVPool"])
def test_the_extra_named_for_a_public_name_is_enough_for_it(name):
    program = WITHOUT + (
        f"blocked |= {{'torch', 'transformers'}}\nimport quire\ntry: quire.{name}\nexcept ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (
        done.stdout.strip() == f"quire.{name} needs torch: pip install '.[hf]' in a clone of quire"
    )


def told(path):
    """The extras that a page or a file of code has pip install, from a clone or from an index."""
    text = path.read_text("utf-8")
    named = re.findall(r"(?<=\.\[)[a-z,]+(?=\]')", text)
    return {extra for each in named for extra in each.split(",")}, re.findall(r"quire-kv\[", text)


def test_pages_install_extras_that_there_are_and_from_a_clone():
    places = [ROOT / "README.md", ROOT / "Makefile", ROOT / "tools" / "test_parts"]
    places += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    places += [
        path
        for part in ("src", "sim", "router", "passages")
        for path in (ROOT / part).rglob("*.py")
    ]
    named = {path: told(path) for path in places}
    unknown = {str(path): extras - {*EXTRAS, "all"} for path, (extras, _) in named.items()}
    assert not {path: extras for path, extras in unknown.items() if extras}
    assert not [str(path) for path, (_, published) in named.items() if published]
    assert set().union(*(extras for extras, _ in named.values())) >= {*EXTRAS, "all"}


def test_the_model_comes_with_its_licence_and_the_package_says_whose_it_is():
    folder = quire.demo_model()
    assert (folder / "config.json").is_file()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (folder / "LICENSE").read_text("utf-8")
    licence = (folder / "LICENSE").relative_to(Path(quire.__file__).parent)
    assert f"src/quire/{licence}" in PROJECT["license-files"]
    assert PROJECT["license"] == "Apache-2.0 AND PSF-2.0"
    assert PROJECT["authors"] == [{"name": "quire contributors"}]


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))]
)
def test_snippets_name_no_path_of_a_clone(page):
    place = ROOT / page if page == "README.md" else ROOT / "docs" / page
    for snippet in re.findall(r"```python\n(.*?)```", place.read_text("utf-8"), re.DOTALL):
        assert "src/quire" not in snippet
