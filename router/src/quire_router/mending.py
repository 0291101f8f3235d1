"""Mends of a router: rules for all of its upstreams, and rules for one of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from quire.errors import ConfigError
from quire.web.mends import Mends

_OF_ONE = re.compile(r"(https?://[^=\s]+?)/?(?:/v1)?/?=(.*)", re.DOTALL)


class UpstreamMends:
    """The rules by which requests are changed, by upstream. Raises `ConfigError`.

    `lines`   rules as the command line has them: `RULE` for all upstreams, `URL=RULE` for one
    `names`   those of upstreams; None where others may come
    `every`   all rules together: prompts are looked up as these leave them, whoever gets them
    `counts`  requests that each rule changed
    """

    def __init__(self, lines: Sequence[str] = (), names: Collection[str] | None = None) -> None:
        found = [(line, _OF_ONE.fullmatch(line)) for line in lines]
        common = [line for line, own in found if own is None]
        own: dict[str, list[str]] = {}
        for url, rule in ((each[1], each[2]) for _, each in found if each is not None):
            if names is not None and url not in names:
                raise ConfigError(
                    f"--mend {url}=...: there is no such upstream; they are {', '.join(names)}"
                )
            own.setdefault(url, []).append(rule)
        self.counts = Counter[str]()
        self._common = Mends(common, self.counts)
        self._own = {url: Mends([*common, *rules], self.counts) for url, rules in own.items()}
        rules = dict.fromkeys([*common, *(rule for each in own.values() for rule in each)])
        self.every = Mends([*rules], Counter())

    def of(self, name: str) -> Mends:
        """Return the rules for an upstream."""
        return self._own.get(name, self._common)
