"""What one call reused and computed."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallReport:
    """The account of one call of `PrefixCache.generate` or one session.

    prompt_tokens == cached_tokens + computed_tokens, summed over the rows of the call, padding
    not counted. Rows of a batch advance together: a row's cached head is reused up to the
    column that all rows have cached, so `cached_tokens` may be below what the manager found.

    stored_tokens: tokens written to the pool by this call, those included that another call
    turned out to have written already.
    ttft_s: seconds from the call to the first new token, the lookup included; None when no
    forward finished.
    tier_tokens: tokens that came back from tiers for this call, by the tier's name; they are
    among `cached_tokens` where all rows could start behind them.
    tier_misses: records that were found in a tier and did not come, by cause: `quire.tiers.Outcome`.
    unknown_tokens: tokens that cannot be stored, as what the model computed for them, or for one before
    them, is not what their ids alone give: a mask, positions or embeddings of the caller's.
    unknown_reason: what came first among these; None where all tokens are known.
    """

    prompt_tokens: int
    cached_tokens: int
    stored_tokens: int
    ttft_s: float | None
    tier_tokens: dict[str, int] = field(default_factory=dict[str, int])
    tier_misses: dict[str, int] = field(default_factory=dict[str, int])
    unknown_tokens: int = 0
    unknown_reason: str | None = None

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the model had to compute."""
        return self.prompt_tokens - self.cached_tokens


NO_REPORT = CallReport(prompt_tokens=0, cached_tokens=0, stored_tokens=0, ttft_s=None)
