"""The lists of fields in docstrings, as lists in the reference.

Docstrings name fields in lines of two columns, the name and what it is, with what goes on indented below. Markdown would run
them together; this extension of griffe turns each into an item.
"""

import re

import griffe

FIELD = re.compile(r"^(`[^`]+`|[a-z_]+)(?:, (`[^`]+`|[a-z_]+))*  +\S")


class Fields(griffe.Extension):
    """Rewrites every docstring once it was read."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Turn an object's fields into items."""
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(text: str) -> str:
    """Return a docstring with each field as an item of a list, and what follows it indented under it."""
    lines: list[str] = []
    in_field = False
    for line in text.splitlines():
        if FIELD.match(line):
            if not in_field and lines and lines[-1]:
                lines.append("")
            lines.append("- " + re.sub("  +", " — ", line, count=1))
            in_field = True
        elif in_field and line.startswith(" "):
            lines.append("    " + line.strip())
        else:
            if in_field and line:
                lines.append("")
            in_field = False
            lines.append(line)
    return "\n".join(lines)
