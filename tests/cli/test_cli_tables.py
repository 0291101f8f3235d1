"""Tables and pictures in narrow terminals: no number is cut, none is left out."""

import io
import re

import pytest
from hypothesis import strategies as st
from rich.console import Console

import cli_help
from quire.cli.tables import facts_table, plain_table
from traces import CONVERSATION, head_path
from turns import by_turns, drawn

TRACE = str(head_path(CONVERSATION))
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
COMMANDS = (
    ("inspect",),
    ("doctor",),
    ("curve", TRACE),
    ("trace", "info", TRACE),
    ("replay", TRACE, "--jobs", "1", "--capacity", "1%,50%", "--model", "llama-3.1-8b"),
    ("simulate", "--trace", TRACE, "--num-requests", "60", "--slo-ttft", "2"),
    ("plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--below", "host=1TiB@50GB/s,disk=9TB@6GB/s"),
)  # fmt: skip
UNSTEADY = re.compile(r"[\d.]+ s\s+of\s+CPU|[\d.,]+ GiB\s+available")


def numbers(words, columns):
    """The numbers a command prints, each once; those that no two runs share are left out."""
    result = cli_help.run(*words, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= columns or words[0] == "replay"
    return set(NUMBER.findall(UNSTEADY.sub("", result.stdout))), result.stdout


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("words", "columns"),
    by_turns(COMMANDS, [60, 40]),
    ids=lambda each: each[0] if isinstance(each, tuple) else str(each),
)
def test_no_number_of_a_command_is_cut_or_hidden_in_a_narrow_terminal(words, columns):
    if words[0] == "replay":
        words = (*words, "--policies", "lru,optimum")
    wide, _ = numbers(words, 300)
    narrow, shown = numbers(words, columns)
    joined = set(NUMBER.findall(UNSTEADY.sub("", re.sub(r"\n\s*", "", shown))))
    seconds = {number for number in wide if re.fullmatch(r"0\.\d\d", number)}  # CPU time
    assert wide - narrow - joined - seconds == set()
    assert "…" not in re.sub(r"\"[^\"]*…|\[[^\]]*…", "", shown)


cells = st.one_of(
    st.integers(0, 10**9).map(lambda n: f"{n:,}"),
    st.floats(0, 1).map(lambda share: f"{100 * share:.2f} %"),
    st.just(""),
)


@pytest.mark.ci
@drawn(
    30, 300,
    st.lists(st.tuples(st.sampled_from(["tier", "token hit", "of all blocks"]), st.booleans()),
             min_size=2, max_size=9),
    st.integers(1, 4), st.integers(1, 3), st.integers(34, 120), st.data(),
)  # fmt: skip
def test_a_table_of_any_shape_keeps_every_cell_whole(columns, num_rows, num_keys, width, data):
    table = plain_table(num_keys=min(num_keys, len(columns) - 1))
    table.add_column("name")
    for head, whole in columns:
        table.add_column(head, justify="right", no_wrap=whole)
    made = [data.draw(cells) for _ in range(num_rows * len(columns))]
    for row in range(num_rows):
        table.add_row(f"r{row}", *made[row * len(columns) : (row + 1) * len(columns)])
    shown = io.StringIO()
    Console(file=shown, width=width).print(table)
    text = shown.getvalue()
    if num_keys == 1:  # more keys than one can be wider than any terminal
        assert max(map(len, text.splitlines())) <= width
    for cell in filter(None, made):
        assert text.count(cell) >= made.count(cell) or num_keys > 1


def test_facts_without_room_for_both_columns_stand_below_each_other():
    shown = io.StringIO()
    Console(file=shown, width=30).print(facts_table([("a long name of it", "12,345,678 tokens")]))
    assert shown.getvalue().split() == ["a", "long", "name", "of", "it", "12,345,678", "tokens"]
