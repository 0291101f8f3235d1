"""The text that quire-tiny learns from: plain English paragraphs that every CPython carries.

The reference manual in `pydoc_data.topics` and the docstrings and block comments of the standard
library, (c) Python Software Foundation, PSF License Version 2. Markup, code, tables and lists are
dropped; what is left is laid out as texts and as conversations under a long system text.
"""

import ast
import io
import re
import sys
import sysconfig
import tokenize
from collections import defaultdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

BOS, EOS, SYSTEM, USER, ASSISTANT = range(257, 262)  # 0 to 255 are the bytes, 256 is padding
ASK = (
    "What is {}?", "What does {} do?", "Tell me about {}.", "How does {} work?",
    "Can you explain {}?", "Please describe {}.", "When do I need {}?", "How do I use {}?",
)  # fmt: skip
MORE = ("Tell me more.", "Please go on.", "What else?", "And then?", "Anything else to know?")
RULES = (
    "You are a helpful assistant. Answer in plain English and keep to the facts.",
    "You are a patient teacher. Explain things step by step.",
    "The following is a conversation between a user and an assistant.",
    "Use the notes below to answer the questions of the user.",
    "You answer questions about Python. Here is some background to read first.",
)


class Entry(NamedTuple):
    """One thing that the text tells about: its name and its paragraphs."""

    name: str
    paragraphs: list[str]


Library = dict[str, list[Entry]]  # module or chapter -> its entries, in reading order


def prose(text: str, seen: set[str]) -> list[str]:
    """Return the paragraphs of `text` that read as English, unwrapped, each only once."""
    text = text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2026: "..."})
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        line = re.sub(r"\s+", " ", block).strip()
        line = re.sub(r":(?:\w+:)?`~?([^`]*)`", r"\1", line).replace("``", '"').replace("`", "'")
        line = re.sub(r"(?<!\w)\*{1,2}([^*]+)\*{1,2}(?!\w)", r"\1", line).replace("::", ":")
        plain = sum(c.isalpha() or c == " " for c in line)
        words = re.findall(r"\b[a-z]{2,}\b", line)
        if (
            len(line) >= 40
            and re.match(r"""["'(]?[A-Z]""", line)
            and line[-1] in ".:?!)"
            and plain >= 0.85 * len(line)
            and len(words) >= 6
            and line.isascii()
            and not re.search(
                r">>>|\.\. |\|| = |-{3}|={3}|_{3}|[{}\\]|https?:|@|[Cc]opyright|[Ll]icen[sc]e", line
            )
            and line not in seen
        ):
            seen.add(line)
            found.append(line)
    return found


def comments(source: str) -> str:
    """Return the runs of whole-line comments of a source file, a blank line between runs."""
    lines: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            text = token.string.lstrip("#").strip()
            lines += [text] if token.start[0] == last + 1 else ["", text]
            last = token.start[0]
    return "\n".join(lines)


def read_library() -> Library:
    """Collect the manual, docstrings and comments that this interpreter carries."""
    seen: set[str] = set()
    library: Library = defaultdict(list)
    for name, text in sorted(topics.items()):
        title = text.strip().split("\n", 1)[0].replace('"', "").strip().rstrip(".")
        library["manual: " + name].append(Entry(title.lower(), prose(text, seen)))
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        skip = {"test", "tests", "idle_test", "pydoc_data", "encodings", "site-packages"}
        if parts[0] not in sys.stdlib_module_names or skip & set(parts):
            continue
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        module = ".".join(p for p in parts if p != "__init__")
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = getattr(node, "name", f"the {module} module")
                entry = Entry(name.strip("_"), prose(ast.get_docstring(node) or "", seen))
                library[module].append(entry)
        library[module].append(Entry(f"the code of {module}", prose(comments(source), seen)))
    full = {k: [e for e in v if e.name and e.paragraphs] for k, v in library.items()}
    return {k: v for k, v in sorted(full.items()) if v}


def render(library: Library, rng: np.random.Generator) -> np.ndarray:
    """Lay the library out as one stream of tokens: texts and conversations, in random order."""
    every = [entry for entries in library.values() for entry in entries]
    out: list[int] = []

    def pick(options: tuple[str, ...]) -> str:
        return options[rng.integers(len(options))]

    def say(role: int, text: str) -> None:
        out.extend((role, *text.encode()))

    for module in rng.permutation(list(library)):
        entries = library[module]
        if rng.random() < 0.4:
            say(BOS, "\n\n".join(p for e in entries for p in e.paragraphs))
            out.append(EOS)
            continue
        start, limit = -1, 0
        for entry in entries:
            if start < 0 or len(out) - start > limit:
                start, limit = len(out), rng.integers(1500, 9000)
                say(BOS, "")
                notes = [pick(RULES)]
                while rng.random() < 0.75 and sum(map(len, notes)) < 3000:
                    notes += every[rng.integers(len(every))].paragraphs[:3]
                say(SYSTEM, "\n\n".join(notes))
            said, question = 0, pick(ASK).format(entry.name)
            while said < len(entry.paragraphs):
                count = int(rng.integers(1, 4))
                say(USER, question)
                say(ASSISTANT, "\n\n".join(entry.paragraphs[said : said + count]))
                out.append(EOS)
                said, question = said + count, pick(MORE)
    return np.array(out, dtype=np.int16)
