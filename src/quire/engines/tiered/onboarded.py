"""What came back from tiers for one prompt."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Onboarded:
    """What came back for one prompt.

    tokens   per tier, by name: those that a request finds now and would not have found before
    causes   why records that were found did not come, by the name of their `quire.tiers.Outcome`
    """

    tokens: dict[str, int] = field(default_factory=dict[str, int])
    causes: dict[str, int] = field(default_factory=dict[str, int])


NOTHING = Onboarded()
