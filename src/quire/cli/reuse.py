"""The settings of passages that `quire serve` is given."""

from typing import Any

from quire.config import parse_bytes
from quire.errors import ConfigError
from quire.extras import lacking_package
from quire.plugins import load_offered


def made_passages(
    capacity: str | None, rows: str | None, warm: dict[str, Any], measured: dict[str, Any]
) -> Any:
    """Return the settings of passages that flags give, None without `--passages`. Raises `ConfigError`."""
    if capacity is None:
        if warm["warm"] is not None:
            raise ConfigError("--passage-tier is given without --passages, which switches reuse on")
        return None
    from quire.engines.models.weights import default_kept_at

    make = load_offered("quire.passages", "server")
    if make is None:
        raise ConfigError(lacking_package("--passages", "quire-passages"))
    gates = default_kept_at().with_name("gates")
    return make(parse_bytes(capacity), rows, **warm, **measured, gates=gates)
