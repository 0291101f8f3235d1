"""English prose that every CPython carries: what the small models of quire have learned from.

The reference manual in `pydoc_data.topics` and the docstrings and block comments of the standard
library, (c) Python Software Foundation, PSF License Version 2. Markup, code, tables and lists are
dropped.
"""

import ast
import io
import re
import sys
import sysconfig
import tokenize
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple


class Topic(NamedTuple):
    """One thing that the text tells about: its name and its paragraphs."""

    name: str
    paragraphs: list[str]


Library = dict[str, list[Topic]]  # module or chapter -> its entries, in reading order

_NO_PROSE = {"test", "tests", "idle_test", "pydoc_data", "encodings", "site-packages"}


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


def manual(source: str) -> str:
    """Return the prose of a man page in the markup of `man(7)`: paragraphs that read as English."""
    lines: list[str] = []
    for line in source.splitlines():
        macro = re.match(r"[.'](\S*)\s*(.*)", line)
        if macro is None:
            lines.append(line)
        elif macro[1] in ("B", "I", "BR", "BI", "IR", "IB", "RB", "RI"):
            lines.append(macro[2].replace('"', ""))
        else:
            lines.append("")
    plain = re.sub(r"\\f(\[\w*\]|\(..|.)|\\[&/,|^]", "", "\n".join(lines)).replace("\\-", "-")
    return "\n\n".join(prose(plain, set()))


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


def is_held_out(name: str) -> bool:
    """Return whether a module or chapter, one in twenty, is text that no model was trained on."""
    return zlib.crc32(name.encode()) % 20 == 0


def is_sampled(name: str) -> bool:
    """Return whether a module or chapter is of another twentieth: as much text, that all were trained on."""
    return zlib.crc32(name.encode()) % 20 == 1


def read_library(wanted: Callable[[str], bool] = lambda _: True) -> Library:
    """Collect the manual, docstrings and comments that this interpreter carries.

    wanted  by the name of a module or chapter, which it is read for
    """
    seen: set[str] = set()
    library: Library = defaultdict(list)
    for name, text in sorted(topics.items()):
        if not wanted("manual: " + name):
            continue
        title = text.strip().split("\n", 1)[0].replace('"', "").strip().rstrip(".")
        library["manual: " + name].append(Topic(title.lower(), prose(text, seen)))
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if parts[0] not in sys.stdlib_module_names or _NO_PROSE & set(parts) or not wanted(module):
            continue
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = getattr(node, "name", f"the {module} module")
                entry = Topic(name.strip("_"), prose(ast.get_docstring(node) or "", seen))
                library[module].append(entry)
        library[module].append(Topic(f"the code of {module}", prose(comments(source), seen)))
    full = {k: [e for e in v if e.name and e.paragraphs] for k, v in library.items()}
    return {k: v for k, v in sorted(full.items()) if v}


def joined(library: Library) -> list[str]:
    """Return a text of each module or chapter."""
    return [
        "\n\n".join(part for entry in each for part in entry.paragraphs)
        for each in library.values()
    ]
