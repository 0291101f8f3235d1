"""The form that an answer must have: JSON, a regular expression, a choice, or a grammar."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, force_setattr

from quire.errors import ConfigError

MAX_CHOICES = 10_000

GrammarText: TypeAlias = Annotated[str, Meta(min_length=1)]
Schema: TypeAlias = GrammarText | dict[str, Any]
Choice: TypeAlias = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of an answer, by exactly one of these fields; names as in vLLM's `StructuredOutputsParams`.

    json         a JSON schema, as data or as text
    json_object  whether any JSON object will do
    regex        a regular expression that all of the answer matches, as of Rust's crate regex, without look-around
    choice       texts of which the answer is one
    grammar      a context-free grammar, as Lark writes it (`start: ...`), or as GBNF does (`root ::= ...`)

    Raises `ConfigError` for an invalid value, and unless one of them is given.
    """

    json: Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: GrammarText | None = None

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)
        given = [name for name, value in asdict(self).items() if value not in (None, False)]
        if len(given) != 1:
            names = ", ".join(self.__struct_fields__)
            raise ConfigError(
                f"structured_outputs takes exactly one of {names}; got {' and '.join(given) or 'none'}"
            )

    @property
    def grammar_of(self) -> tuple[str, str]:
        """The kind of grammar, `json`, `regex`, `choice` or `grammar`, and its text."""
        if self.json_object:
            return "json", '{"type": "object"}'
        (name,) = (name for name, value in asdict(self).items() if value not in (None, False))
        value = getattr(self, name)
        return name, value if isinstance(value, str) else json.dumps(value)


def check_fields(made: msgspec.Struct, kinds: Mapping[str, Any]) -> None:
    """Convert each field of a struct that Python code makes to its type. Raises `ConfigError` with name and value."""
    for name, value in asdict(made).items():
        try:
            force_setattr(made, name, msgspec.convert(value, kinds[name]))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name} is {value!r}: {error}") from error


_KINDS = get_type_hints(StructuredOutputs, include_extras=True)
