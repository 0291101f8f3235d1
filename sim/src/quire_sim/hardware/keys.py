"""A config's keys, checked when they are read."""

from collections.abc import Sequence
from typing import Any, cast

from quire.errors import ConfigError

LARGEST = 1 << 40
MOST_LAYERS = 10_000


class Config:
    """The values of a model's config, by any of the names that models use for them."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.family = str(values.get("model_type") or "").lower()

    def get(self, *names: str) -> Any:
        """Return the first value that is there and not null, else None."""
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        return None

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a yes or no."""
        value = self.get(name)
        return default if value is None else bool(value)

    def count(self, *names: str, default: int | None = None) -> int:
        """Return a number of things. Raises `ConfigError` where it is missing or no count."""
        value = self.get(*names)
        if value is None:
            if default is None:
                raise ConfigError(
                    f"the config has no {' or '.join(names)}; is it the config.json of a decoder?"
                )
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            key = next(name for name in names if self.get(name) is not None)
            raise ConfigError(f"{key} in the config is {value!r:.80}; it is a count, 0 or more")
        return value

    def listed(self, *names: str, count: int = 0) -> list[Any] | None:
        """Return a list, of at least `count` items, or None where it is missing or empty.

        A text is the list of its characters. Raises `ConfigError` for anything else.
        """
        value = self.get(*names)
        items: list[Any] = []
        if isinstance(value, (list, tuple, str)):
            items = [*cast("Sequence[Any]", value)]
            if not items:
                return None
        elif value is None:
            return None
        if not items or not count <= len(items) <= MOST_LAYERS:
            key = next(name for name in names if self.get(name) is not None)
            raise ConfigError(
                f"{key} in the config is {value!r:.80}; it lists something for each of "
                f"{count or 'its'} layers"
            )
        return items

    def at(self, index: int, *names: str) -> "Config":
        """Return this config with the value of layer `index` where a key lists one for each."""
        own: dict[str, Any] = {}
        for name in names:
            if isinstance(self._values.get(name), list):
                values = self.listed(name, count=index + 1)
                own[name] = values[index] if values else None
        return Config(self._values | own) if own else self

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a count that is at least 1. Raises `ConfigError`."""
        value = self.count(*names, default=default)
        if value < 1:
            raise ConfigError(f"{names[0]} in the config is {value}; it is at least 1")
        return value
