"""The names that users import, and the cost of importing them."""

import subprocess
import sys

import pytest

import quire
import quire.core
import quire.groups
import quire.tiers


def fresh(code):
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_every_public_name_exists_and_the_list_is_sorted():
    assert quire.__all__ == sorted(quire.__all__)
    for name in quire.__all__:
        assert getattr(quire, name) is not None


@pytest.mark.parametrize("room", [quire.core, quire.groups, quire.tiers])
def test_every_public_name_of_a_room_exists_and_the_list_is_sorted(room):
    assert room.__all__ == sorted(room.__all__)
    for name in room.__all__:
        assert getattr(room, name).__doc__


def test_a_missing_library_of_a_tier_is_named_with_the_command_that_installs_it():
    code = (
        "import sys; sys.modules['xxhash'] = None\n"
        "import quire.tiers\n"
        "try: quire.tiers.Host\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    assert "pip install '.[tiers]'" in fresh(code)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = quire.no_such_thing


@pytest.mark.parametrize("statement", ["import quire", "import quire.core", "import quire.cli"])
def test_importing_the_package_or_its_core_loads_no_torch(statement):
    heavy = "{'torch', 'transformers', 'safetensors'}"
    assert fresh(f"import sys; {statement}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_a_missing_extra_is_named_with_the_command_that_installs_it():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import quire\n"
        "try: quire.KVPool\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    assert "pip install '.[hf]'" in fresh(code)


def test_the_error_tree_has_one_root():
    from quire import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert all(issubclass(kind, errors.QuireError) for kind in kinds)
    drawn = errors.__doc__
    assert all(kind.__name__ in drawn for kind in kinds)
