"""The README's table of supported model families, from the tables that the tests run over.

python tools/support_matrix.py          the table
python tools/support_matrix.py --write  the table, written into README.md
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- support:begin -->\n", "<!-- support:end -->"
sys.path.insert(0, str(ROOT / "tests" / "differential"))

import hf_help  # noqa: E402

from quire.tensors.kinds import MEDIA_MODELS, LayerKind, layer_kinds  # noqa: E402

CONVERSATIONS = "conversations¹"
PRESSURE = "conversations¹, small pools²"
BATCHES = "turns of ragged batches"
BRANCHES = "turns of ragged batches, branches"
TESTED = (
    (hf_help.FAMILIES, CONVERSATIONS),
    (hf_help.MORE_FAMILIES, BATCHES),
    (hf_help.HYBRID_FAMILIES, PRESSURE),
    (hf_help.MORE_HYBRID_FAMILIES, BRANCHES),
)
NOTES = (
    "¹ random turns, branches, edits and truncations, return sequences, beams, ragged batches, sessions, "
    "and drafts where transformers drafts, at four block sizes, token by token and logit by logit against "
    "`model.generate`; then all that is cached against a fresh forward. "
    "² the same while every layer group evicts."
)


def table() -> str:
    """Return the families as Markdown, those with the same layers and tests in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for families, tested in TESTED:
        for family in families:
            kinds = layer_kinds(hf_help.tiny_config(family))
            rows.setdefault((_words(kinds, family), tested), []).append(_title(family))
    lines = ["| families (names in transformers) | layers | tested with |", "|---|---|---|"]
    lines += [
        f"| {', '.join(f'`{family}`' for family in sorted(families))} | {words} | {tested} |"
        for (words, tested), families in rows.items()
    ]
    media = ", ".join(f"`{family}`" for family in sorted(MEDIA_MODELS))
    lines.append(f"| {media} | full, with images, video or audio | turns over media |")
    return "\n".join([*lines, "", NOTES, ""])


def section(readme: str) -> str:
    """Return what stands between the markers of a README."""
    return readme[readme.index(BEGIN) + len(BEGIN) : readme.index(END)]


def main() -> None:
    """Print the table, or write it into the README."""
    path = ROOT / "README.md"
    if "--write" in sys.argv[1:]:
        readme = path.read_text(encoding="utf-8")
        path.write_text(readme.replace(BEGIN + section(readme), BEGIN + table()), encoding="utf-8")
    sys.stdout.write(table())


def _words(kinds: list[LayerKind], family: str) -> str:
    """Return the kinds of layers of a model, each named once, in the order of their first layer."""
    names = dict.fromkeys(_name(kind) for kind in kinds)
    latent = " (latent: MLA)" if "kv_lora_rank" in hf_help.ALL_FAMILIES[family] else ""
    return " + ".join(names) + latent


def _name(kind: LayerKind) -> str:
    if kind.tokens and kind.states:
        return f"hybrid ({kind.tokens} and recurrent in one layer)"
    if kind.states:
        return "convolution" if kind.word == "conv" else "recurrent"
    return kind.tokens or "none of its own"


def _title(family: str) -> str:
    return family.replace("+", " with a ")


if __name__ == "__main__":
    main()
