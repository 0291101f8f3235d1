"""`quire passages`: passages whose KV is reused wherever they stand."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.table import Column
from rich.text import Text

from quire.cli import models
from quire.cli.options import AsJson, Dtype, PassagesTarget
from quire.cli.output import print_json, progress, stdout
from quire.cli.tables import facts_table, plain_table
from quire_passages.cli.options import PassageTokens, Prompts, Texts

if TYPE_CHECKING:
    from quire_passages.bench.checking import PassageCheck
    from quire_passages.verdict import PolicyEstimate

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
    texts: Texts = None,
    prompts: Prompts = 64,
    passage_tokens: PassageTokens = 200,
    passages_target: PassagesTarget = 0.98,
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Put a model through the gate, then compare answers behind reused passages to the full forward's.

    Says which policy is the cheapest that agrees in --passages-target of next tokens, with bounds of 95 %
    confidence. Figures are shown as they come; Ctrl-C ends the check with those so far. Exit code 1 where the
    gate refuses the model or no policy agrees so often.

    [bold]Examples[/bold]

      quire passages check ./my-model --texts faq.txt --texts manual.txt
      quire passages check quire-tiny --prompts 40 --passage-tokens 64
    """
    from quire_passages.bench.texts import read_texts

    read = read_texts(texts)
    with progress("loading the model") as say:
        loaded, tokenizer = models.load(model, dtype)
        from quire_passages.bench.asked_text import TextSizes, text_prompts
        from quire_passages.bench.checking import check_passages

        def told(number: int, estimates: "list[PolicyEstimate]") -> None:
            best = max(estimates, key=lambda each: each.agreement)
            say(f"prompt {number} of {prompts}: {best}")

        sizes = TextSizes(tokens=(passage_tokens // 2, passage_tokens))
        given = text_prompts(tokenizer, sizes, texts=read)
        found = check_passages(loaded, given, count=prompts, target=passages_target, progress=told)
    if as_json:
        print_json(_told(found))
    else:
        stdout().print(picture(model, found))
    if found.chosen is None:
        raise typer.Exit(1)


def picture(model: str, found: "PassageCheck") -> Group:
    """Return a check drawn for people."""
    if found.relocation is None or found.verdict is None:
        return Group(Text(), Text(f"no: {found.refusal}", "bold red"), Text())
    gate = found.relocation
    facts = [
        ("model", model),
        ("gate", f"passed to position {gate.positions:,}, K and V off by {gate.error:.1e}"),
        ("prompts", str(found.verdict.num_prompts)),
    ]
    heads = (Column("policy", no_wrap=True), "prompts", "agree", "95 %", "KL", "95 %", "work")
    table = plain_table(*heads)
    for each in found.verdict.estimates():
        agreement = f"{each.agreement_low:.1%} to {each.agreement_high:.1%}"
        kl = f"{each.kl_low:.4f} to {each.kl_high:.4f}"
        figures = (f"{each.agreement:.1%}", agreement, f"{each.kl:.4f}", kl, f"{each.work:.0%}")
        table.add_row(each.policy, str(each.prompts), *figures)
    said = Text(f"no: {found.verdict.reason}", "bold red")
    if found.chosen is not None:
        said = Text.assemble("yes: ", (found.chosen, "bold green"))
    return Group(Text(), facts_table(facts), Text(), table, Text(), said, Text())


def _told(found: "PassageCheck") -> dict[str, Any]:
    gate, verdict = found.relocation, found.verdict
    return {
        "relocatable": gate is not None,
        "refusal": found.refusal if verdict is None or found.chosen else verdict.reason,
        "gate_error": None if gate is None else gate.error,
        "prompts": 0 if verdict is None else verdict.num_prompts,
        "estimates": [] if verdict is None else msgspec.to_builtins(verdict.estimates()),
        "chosen": found.chosen,
    }
