"""The supported models, as docs/models.md: from the verdicts that `make test-families` keeps.

python tools/support_matrix.py --write
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
KEPT = json.loads((ROOT / "docs" / "families.json").read_text(encoding="utf-8"))
REQUESTS = (
    "turns past every window, branches, the same prompt again,\nragged batches with one row cached "
    "in either order, a padded row, return sequences, beams"
)


def page() -> str:
    """Return docs/models.md: every class, with the reason where it is refused."""
    parts = [
        "# Which models",
        (
            "This page lists the models that reuse prefixes exactly, and those that quire refuses. "
            "It is about `PrefixCache`.\n"
            "`Engine` and `quire serve` take fewer models, and text alone ([the engine's](engine.md#which-models)). "
            "For vLLM, see\n[its limits](vllm.md#limits).\n\n"
            "`make test-families` writes the verdicts to `docs/families.json`; "
            "`tools/support_matrix.py` makes the page.\n\n"
            f"The tests build every causal LM that transformers {KEPT['transformers']} registers, "
            "tiny, with random weights, in float32.\n"
            f"Requests: {REQUESTS}.\n"
            "Tokens and logits must equal those of `model.generate`, "
            "stored blocks those of a fresh forward;\n"
            "the tests must notice a corrupted cache.\n\n"
            "Mamba and other recurrent layers need attention beside them: a state does not say where a prefix ends, so\n"
            "`mamba`, `mamba2` and `falcon_mamba` are refused. With attention layers, a model is identical if transformers\n"
            "continues the state of its recurrent layers (`bamba`, `falcon_h1`, `nemotron_h`, `zamba2`), and refused if it\n"
            "does not (`jamba`, `zamba`)."
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
            "Not compared: `model.generate` does not take these requests, "
            "or quire refuses padded batches beyond the\n"
            "threshold from which on the model counts padding as tokens."
        ),
        _rows(["request", "refused by", "names"], _without()),
        f"## Refused, with the reason: {len(_of('refused'))}",
        "`PrefixCache` refuses these models when it is made, before it computes.",
        _rows(["name", "message of quire"], [(f"`{v['name']}`", _told(v)) for v in _of("refused")]),
        f"## Cannot be built: {len(_of('unbuildable'))}",
        "transformers cannot make or run these models from a config alone, so the tests have no reference.",
        _rows(
            ["name", "message of transformers"],
            [(f"`{v['name']}`", _told(v)) for v in _of("unbuildable")],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the page, or print it."""
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())


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
