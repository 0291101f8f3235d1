"""`quire passages`: passages whose KV is reused wherever they stand."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Column
from rich.text import Text

from quire.cli import models
from quire.cli.files import read_text
from quire.cli.options import AsJson, Dtype
from quire.cli.output import print_json, progress, stdout
from quire.cli.tables import facts_table, plain_table

if TYPE_CHECKING:
    from quire_passages.bench.checking import PassageCheck

app = typer.Typer(no_args_is_help=True)


@app.callback()
def passages() -> None:
    """Passages whose KV is reused wherever they stand: whether a model allows it.

    [bold]Example[/bold]

      quire passages check ./my-model --texts notes.txt
    """


@app.command("check")
def check(
    model: Annotated[str, typer.Argument(help="A local folder, a hub id, or quire-tiny.")],
    *,
    texts: Annotated[
        list[Path] | None,
        typer.Option(help="Text files that passages are cut from.", show_default="Python's manual"),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of six passages.")] = 12,
    passage_tokens: Annotated[int, typer.Option(min=32, help="Tokens of a passage.")] = 64,
    opening: Annotated[
        str,
        typer.Option(help="Text between passages and a question.", show_default="an empty line"),
    ] = "\n\n",
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Put a model through the gate, then compare answers with reused passages to full forwards.

    Says which share of rows has to be computed again: the least at which 98 % of next tokens are
    those of the full forward and the distributions differ by 0.01 nats at most. Exit code 1 where
    the gate refuses the model or no share up to a half will do.

    [bold]Examples[/bold]

      quire passages check quire-quotes --opening '<quote>'
      quire passages check ./my-model --texts faq.txt --texts manual.txt --passage-tokens 256
    """
    read = None if texts is None else [read_text(path) for path in texts]
    with progress("loading the model") as say:
        loaded, tokenizer = models.load(model, dtype)
        from quire_passages.bench.checking import check_passages
        from quire_passages.bench.prose import is_held_out, joined, read_library

        read = joined(read_library(is_held_out)) if read is None else read
        found = check_passages(
            loaded,
            [_ids(tokenizer, text) for text in read],
            () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,),
            _ids(tokenizer, opening),
            num_prompts=prompts,
            passage_tokens=passage_tokens,
            progress=say,
        )
    if as_json:
        print_json(_told(found))
    else:
        stdout().print(picture(model, found))
    if found.budget is None:
        raise typer.Exit(1)


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def picture(model: str, found: "PassageCheck") -> Group:
    """Return a check drawn for people."""
    if found.relocation is None:
        return Group(Text(), Text(f"no: {found.refusal}", "bold red"), Text())
    gate = found.relocation
    facts = [
        ("model", model),
        ("gate", f"passed to position {gate.positions:,}, K and V off by {gate.error:.1e}"),
        ("check layer", str(gate.check_layer)),
    ]
    heads = (Column("computed again", no_wrap=True), "agree", "KL", "border", "inside", "ms")
    table = plain_table(*heads)
    for row in found.rows:
        figures = [f"{float(row['agree_rate']):.1%}", f"{float(row['kl']):.4f}"]
        figures += [f"{float(row[key]):.0%}" for key in ("border_rate", "inside_rate")]
        table.add_row(str(row["name"]), *figures, f"{float(row['ms']):,.1f}")
    return Group(Text(), facts_table(facts), Text(), table, Text(), _advice(found), Text())


def _advice(found: "PassageCheck") -> Text:
    from quire_passages.bench.checking import BUDGETS, LEAST_AGREEMENT, MOST_KL, holds

    bounds = f"{LEAST_AGREEMENT:.0%} of next tokens and {MOST_KL:g} nats"
    if found.budget is None:
        return Text(
            f"no: not even {BUDGETS[-1]:.0%} of rows hold {bounds}; leave passages off", "bold red"
        )
    said = Text.assemble(
        "yes: ", (f"KVDeviation({found.budget:g})", "bold green"), f" holds {bounds}"
    )
    if holds(found.rows, "moved"):
        said.append(
            "\nthese passages hardly ask for each other: moving them alone holds it too; "
            "pass --texts of yours to be sure"
        )
    return said


def _told(found: "PassageCheck") -> dict[str, Any]:
    gate = found.relocation
    return {
        "relocatable": gate is not None,
        "refusal": found.refusal,
        "check_layer": None if gate is None else gate.check_layer,
        "gate_error": None if gate is None else gate.error,
        "rows": found.rows,
        "budget": found.budget,
    }
