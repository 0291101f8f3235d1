"""The settings of passages that `quire serve` is given."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.config import parse_bytes, read_bytes
from quire.errors import ConfigError
from quire.extras import lacking_package
from quire.plugins import load_offered


def made_passages(
    capacity: str | None,
    rows: str | None,
    warm: dict[str, Any],
    measured: dict[str, Any],
    texts: Sequence[Path],
) -> Any:
    """Return the settings of passages that flags give, None without `--passages`. Raises `ConfigError`.

    texts  files that have to be there; they are read with the model's tokenizer (`Passages.on_texts`)
    """
    for each in texts:
        read_bytes(each)
    if capacity is None:
        if warm["warm"] is not None:
            raise ConfigError("--passage-tier is given without --passages, which switches reuse on")
        if texts:
            raise ConfigError(
                "--passage-texts is given without --passages, which switches reuse on"
            )
        return None
    from quire.engines.models.weights import default_kept_at

    make = load_offered("quire.passages", "server")
    if make is None:
        raise ConfigError(lacking_package("--passages", "quire-passages"))
    kept = {name: default_kept_at().with_name(name) for name in ("gates", "verdicts")}
    return make(parse_bytes(capacity), rows, **warm, **measured, **kept)
