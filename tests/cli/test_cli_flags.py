"""A flag means one thing: the same name has the same value and the same text in every command."""

import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import flag_table

from parts import skip_without
from quire.extras import COMMANDS


def test_the_same_flag_means_the_same_everywhere():
    meant = defaultdict(set)
    for flag in flag_table.flags():
        meant[flag.name].add((flag.value, flag.meaning))
    assert {name: said for name, said in meant.items() if len(said) > 1} == {}
    assert all(meaning for said in meant.values() for _, meaning in said)


def test_no_two_flags_mean_the_same():
    names = defaultdict(set)
    for flag in flag_table.flags():
        names[flag.meaning].add(flag.name)
    assert {meaning: said for meaning, said in names.items() if len(said) > 1} == {}


def test_no_flag_is_the_plural_of_another():
    names = {flag.name for flag in flag_table.flags()}
    assert not {name for name in names if f"{name}s" in names}


def test_no_flag_has_an_alias():
    for path, command in flag_table.commands():
        for parameter in command.params:
            assert len(parameter.opts) == 1 or "--help" in parameter.opts, path


def test_every_command_can_answer_in_json():
    with_json = {flag.command for flag in flag_table.flags() if flag.name == "--json"}
    assert with_json == {path for path, _ in flag_table.commands()}


def test_the_page_has_the_table():
    for command in COMMANDS:
        skip_without(*command.split())
    page = flag_table.PAGE.read_text("utf-8")
    assert flag_table.section(page) == flag_table.table(), "run: python tools/flag_table.py --write"
