"""Which models are supported, as pages: from the verdicts that `make test-families` keeps.

python tools/support_matrix.py          README's table
python tools/support_matrix.py --write  README's table and docs/models.md, written
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- support:begin -->\n", "<!-- support:end -->"
KEPT = json.loads((ROOT / "docs" / "families.json").read_text(encoding="utf-8"))
EXAMPLES = (
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "gemma", "glm4_moe", "olmo2", "gpt2",
    "deepseek_v3", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1", "lfm2", "llama4_text",
)  # fmt: skip
NUM_EXAMPLES = 6
REQUESTS = (
    "turns past every window, branches, the same prompt again, ragged batches with one row cached "
    "in either order, a padded row, return sequences, beams"
)


def table() -> str:
    """Return README's table: how many classes of each kind of layers, and some of them."""
    lines = ["| layers | model classes | such as |", "|---|---|---|"]
    for layers, verdicts in _by_layers().items():
        names = sorted(_names(verdicts), key=lambda name: (name not in EXAMPLES, name))
        shown = ", ".join(f"`{name}`" for name in sorted(names[:NUM_EXAMPLES]))
        more = ", …" if len(names) > NUM_EXAMPLES else ""
        lines.append(f"| {layers} | {len(names)} | {shown}{more} |")
    counts = {state: len(_of(state)) for state in ("identical", "refused", "unbuildable")}
    return "\n".join([*lines, "", _sums(counts), ""])


def page() -> str:
    """Return docs/models.md: every class, with the reason where it is refused."""
    parts = [
        "# Which models",
        (
            "Made by `tools/support_matrix.py` from `docs/families.json`, which `make test-families` writes: a tiny "
            f"model of random weights of every causal LM that transformers {KEPT['transformers']} registers, in float32. "
            f"Each is asked for {REQUESTS}; tokens and logits are compared with `model.generate`, "
            "what is stored with a fresh forward, and a corrupted cache must be noticed."
        ),
        f"## Identical: {len(_of('identical'))}",
        "\n".join(
            [
                "| layers | names in transformers |",
                "|---|---|",
                *(
                    f"| {layers} | {', '.join(f'`{name}`' for name in sorted(_names(verdicts)))} |"
                    for layers, verdicts in _by_layers().items()
                ),
            ]
        ),
        (
            "Not compared, as `model.generate` does not take such requests, or quire refuses batches with padding "
            "behind a threshold from which on the model counts padding as tokens:"
        ),
        _rows(["request", "refused by", "names"], _without()),
        f"## Refused, with the reason: {len(_of('refused'))}",
        "Refused when a `PrefixCache` is made, before anything is computed.",
        _rows(["name", "what quire says"], [(f"`{v['name']}`", _told(v)) for v in _of("refused")]),
        f"## Not to be built here: {len(_of('unbuildable'))}",
        "There is nothing to compare with: transformers makes or runs no such model from a config alone.",
        _rows(
            ["name", "what transformers says"],
            [(f"`{v['name']}`", _told(v)) for v in _of("unbuildable")],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def section(readme: str) -> str:
    """Return what stands between the markers of a README."""
    return readme[readme.index(BEGIN) + len(BEGIN) : readme.index(END)]


def main() -> None:
    """Print README's table, or write all pages."""
    path = ROOT / "README.md"
    if "--write" in sys.argv[1:]:
        readme = path.read_text(encoding="utf-8")
        path.write_text(readme.replace(BEGIN + section(readme), BEGIN + table()), encoding="utf-8")
        (ROOT / "docs" / "models.md").write_text(page(), encoding="utf-8")
    sys.stdout.write(table())


def _sums(counts: dict[str, int]) -> str:
    return (
        f"Every causal LM that transformers {KEPT['transformers']} registers, tiny and random, and what quire knows "
        f"with images, video or audio: {counts['identical']} give the tokens and logits of `model.generate` "
        f"({REQUESTS}), {counts['refused']} are refused with the reason when the cache is made, and "
        f"{counts['unbuildable']} cannot be built from a config alone. By name: [docs/models.md](docs/models.md); "
        "`make test-families` sorts them again."
    )


def _of(state: str) -> list[dict[str, Any]]:
    return [verdict for verdict in KEPT["classes"] if verdict["state"] == state]


def _by_layers() -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for verdict in _of("identical"):
        rows[verdict["layers"]].append(verdict)
    return dict(sorted(rows.items(), key=lambda row: (-len(row[1]), row[0])))


def _names(verdicts: list[dict[str, Any]]) -> list[str]:
    return [verdict["name"] for verdict in verdicts]


def _without() -> list[tuple[str, ...]]:
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for verdict in _of("identical"):
        for request, reason in verdict["without"].items():
            who = reason.partition(":")[0]
            names[request.replace("_", " "), who].append(f"`{verdict['name']}`")
    return [(*what, ", ".join(of_one)) for what, of_one in sorted(names.items())]


def _told(verdict: dict[str, Any]) -> str:
    return (
        verdict["reason"]
        .removeprefix("UnsupportedModel: ")
        .replace("|", "\\|")
        .replace("<", "&lt;")
    )


def _rows(heads: list[str], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


if __name__ == "__main__":
    main()
