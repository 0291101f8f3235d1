"""The verdict on a model and one tenant's texts: the cheapest policy that keeps its answers, or none.

A policy is a selector. A sample compares it on one prompt with the full forward, token by token of an answer. Samples
are prompts of traffic, computed in shadow, or prompts that an operator gives.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from quire.scope import Scope
from quire_passages.bounds import agreement_bounds, mean_bounds
from quire_passages.selectors import Epic, KVDeviation, NoRows, QuestionRows, Selector

SLACK = 0.01
"""The lower bound of agreement may be so much below the target."""

LEAST_PROMPTS = 32
"""Prompts before anything is served."""

EACH_PROMPTS = 8
"""Policies are chosen anew after so many prompts: at each one, chance would choose sooner or later."""

MOST_PROMPTS = 400
"""The latest prompts of each policy that count."""

_MOST_SCOPES = 1024

_SHARE = 0.15
"""Of moved rows, the share that is computed again."""


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """One policy on one prompt, beside the full forward.

    tokens   of the answer
    agreed   of these, the ones at which both have the same next token
    kl       nats from the full forward's distributions, summed over the tokens
    work     rows' worth of computing up to the prompt's last token, over those of a full forward
    seconds  CPU seconds of that
    """

    tokens: int
    agreed: int
    kl: float
    work: float
    seconds: float = 0.0


Samples: TypeAlias = "Mapping[str, Sequence[PolicyOutcome]]"
"""Outcomes by the name of a policy, the oldest first."""


class KeptSamples(Protocol):
    """Samples of verdicts that outlive the process."""

    def recall(self, owner: Scope, name: str = "") -> tuple[int, Samples] | None:
        """Return the prompts that were compared for an owner, and the samples; None: nothing that holds."""
        ...

    def keep(self, owner: Scope, verdict: "Verdict", name: str = "") -> None:
        """Keep the samples of an owner."""
        ...

    def forget(self, owner: Scope) -> None:
        """Remove all that is kept of an owner's tenant."""
        ...


class PolicyEstimate(msgspec.Struct, frozen=True):
    """The figures of a policy, with bounds of 95 % confidence.

    agreement  share of next tokens that are those of the full forward
    kl         nats per token from the full forward's distributions
    work       computing, over that of a full forward
    """

    policy: str
    prompts: int
    tokens: int
    agreement: float
    agreement_low: float
    agreement_high: float
    kl: float
    kl_low: float
    kl_high: float
    work: float

    def __str__(self) -> str:
        return (
            f"{self.policy} agrees in {self.agreement:.1%} ({self.agreement_low:.1%} to {self.agreement_high:.1%}) "
            f"of {self.tokens:,} tokens, KL {self.kl:.4f} (to {self.kl_high:.4f})"
        )


def candidates(num_layers: int, *, drops_rows: bool, shows: bool, worth: float) -> list[Selector]:
    """Return the policies that are tried on a model: no rows, the first ones, the question's, and KV deviation by depth.

    drops_rows  whether rows can be left out behind a layer
    shows       whether layers show their attention
    worth       check layers behind which more than this share of the work is done are not tried
    """
    checks = dict.fromkeys(max(round(num_layers * share), 1) for share in (0.25, 0.5, 0.75))
    deep = [KVDeviation(_SHARE, at) for at in checks if at < num_layers and drops_rows]
    asked = [QuestionRows(share) for share in (_SHARE, 0.33) if shows]
    return [
        NoRows(),
        Epic(16),
        *asked,
        *(each for each in deep if _least(each, num_layers) <= worth),
    ]


def _least(policy: KVDeviation, num_layers: int) -> float:
    """Return the work of a policy on a prompt of moved passages alone, of a full forward's."""
    depth = (policy.check or 0) / num_layers
    return depth + (1 - depth) * policy.ratio


class Verdict:
    """The choice among policies by samples; counts alone are kept, no text.

    target  agreement that the chosen policy has to have, its lower bound at least `target - SLACK`
    worth   the most work that it may take, of a full forward's

    A policy whose upper bound is below that, or that takes more, is ruled out while others are left.
    """

    def __init__(self, policies: Sequence[Selector], target: float, worth: float = 1.0) -> None:
        self.policies = list(policies)
        self.target = target
        self.worth = worth
        self.chosen: Selector | None = None
        self.num_prompts = 0
        self._samples: list[deque[PolicyOutcome]] = [deque(maxlen=MOST_PROMPTS) for _ in policies]
        self._found: list[PolicyEstimate | None] = [None] * len(self.policies)
        self._order = list(range(len(self.policies)))

    def add(self, outcomes: Mapping[str, PolicyOutcome]) -> None:
        """Take the outcomes of one prompt, by the names of policies."""
        for at, policy in enumerate(self.policies):
            found = outcomes.get(policy.name)
            if found is not None and found.tokens:
                self._samples[at].append(found)
        self.num_prompts += 1
        if self.num_prompts % EACH_PROMPTS == 0:
            self._decide()

    def go_on(self, num_prompts: int, samples: Samples) -> None:
        """Take up the samples of an earlier process, as far as they are of these policies."""
        for at, policy in enumerate(self.policies):
            self._samples[at].extend(samples.get(policy.name, ()))
        self.num_prompts += num_prompts
        self._decide()

    @property
    def samples(self) -> Samples:
        """The outcomes that count, by policy."""
        pairs = zip(self.policies, self._samples, strict=True)
        return {policy.name: list(each) for policy, each in pairs if each}

    @property
    def is_decided(self) -> bool:
        """Whether a policy is chosen, or all are ruled out: then a few samples are enough."""
        return self.chosen is not None or not any(map(self._may_do, self._order))

    @property
    def wanted(self) -> list[Selector]:
        """The policies that the next sample tries: those left, up to the chosen one; or the best."""
        left = [self.policies[at] for at in self._order if self._may_do(at)]
        if self.chosen is not None:
            return [*takewhile(lambda each: each is not self.chosen, left), self.chosen]
        return left or [self.policies[self._best()]]

    @property
    def reason(self) -> str:
        """Why no policy is chosen."""
        if self.num_prompts < LEAST_PROMPTS or not self.is_decided:
            return (
                f"passages are measured first: {self.num_prompts} prompts so far, {LEAST_PROMPTS} at least; no policy "
                f"is known to agree in {self.target:.3g} of next tokens, with a bound of {self.target - SLACK:.3g}"
            )
        within = f" within {self.worth:.0%} of the work" if self.worth < 1 else ""
        return f"no policy agrees in {self.target:.3g} of next tokens{within}: {self._found[self._best()]}"

    def estimates(self) -> list[PolicyEstimate]:
        """Return the estimates of policies that have samples, as they are now, the cheapest first."""
        found = map(self._estimate, self._order)
        return [each for each in found if each is not None]

    @property
    def chosen_estimate(self) -> PolicyEstimate | None:
        """The last estimate of the chosen policy; of none, that of the one that agrees most."""
        at = self._best() if self.chosen is None else self.policies.index(self.chosen)
        return self._found[at]

    def _decide(self) -> None:
        self._found = [self._estimate(at) for at in range(len(self.policies))]
        self._order.sort(key=lambda at: found.work if (found := self._found[at]) else 1.0)
        good = (at for at in self._order if self._is_good(at))
        at = next(good, None)
        self.chosen = None if at is None else self.policies[at]

    def _is_good(self, at: int) -> bool:
        found = self._found[at]
        return (
            found is not None
            and found.prompts >= LEAST_PROMPTS
            and found.agreement_low >= self.target - SLACK
            and found.work <= self.worth
        )

    def _may_do(self, at: int) -> bool:
        found = self._found[at]
        return (
            found is None
            or found.prompts < LEAST_PROMPTS
            or (found.agreement_high >= self.target - SLACK and found.work <= self.worth)
        )

    def _best(self) -> int:
        def agreement(at: int) -> tuple[bool, float]:
            found = self._found[at]
            return (False, -1.0) if found is None else (found.work <= self.worth, found.agreement)

        return max(self._order, key=agreement)

    def _estimate(self, at: int) -> PolicyEstimate | None:
        samples = self._samples[at]
        return estimate(self.policies[at].name, samples) if samples else None


def estimate(policy: str, samples: Sequence[PolicyOutcome]) -> PolicyEstimate:
    """Return the estimate of a policy from its samples, one at least."""
    tokens = np.array([each.tokens for each in samples], np.float64)
    agreement = agreement_bounds(tokens, np.array([each.agreed for each in samples], np.float64))
    kl = mean_bounds(tokens, np.array([each.kl for each in samples], np.float64))
    work = float(np.mean([each.work for each in samples]))
    return PolicyEstimate(policy, len(samples), int(tokens.sum()), *agreement, *kl, work)


class Verdicts:
    """The verdict of each tenant, so that none is served by the texts of another.

    A scope without a tenant is one by itself. An operator's prompts make a verdict of their own, which rules for each
    tenant whose own is still open.

    audit  one of so many prompts is compared once a verdict is decided
    kept   samples of earlier processes; None: there are none
    worth  as of `Verdict`

    Beyond 1,024 verdicts, those that were asked longest ago are forgotten.
    """

    def __init__(
        self, target: float, audit: int, kept: KeptSamples | None = None, *, worth: float = 1.0
    ) -> None:
        self._target = target
        self._worth = worth
        self._audit = audit
        self._kept = kept
        self._verdicts: OrderedDict[Scope, Verdict] = OrderedDict()
        self._given: dict[Scope, Verdict] = {}
        self._since: dict[Scope, int] = {}
        self._latest: deque[PolicyOutcome] = deque(maxlen=MOST_PROMPTS)

    def of(self, scope: Scope, policies: Callable[[], Sequence[Selector]]) -> Verdict:
        """Return the verdict of a scope; `policies` of a new one."""
        scope = _owner(scope)
        if scope not in self._verdicts:
            self._verdicts[scope] = self._begun(scope, policies, "")
            if len(self._verdicts) > _MOST_SCOPES:
                gone, _ = self._verdicts.popitem(last=False)
                self._since.pop(gone, None)
        self._verdicts.move_to_end(scope)
        return self._verdicts[scope]

    def of_operator(
        self, scope: Scope, policies: Callable[[], Sequence[Selector]], name: str
    ) -> Verdict:
        """Return the verdict on an operator's prompts, which `name` stands for, for the model of a scope."""
        model = _model_of(scope)
        if model not in self._given:
            self._given[model] = self._begun(model, policies, name)
        return self._given[model]

    def ruling(self, scope: Scope, policies: Callable[[], Sequence[Selector]]) -> Verdict:
        """Return the verdict that a scope is served by: the operator's while its own is open, if that allows reuse."""
        own, given = self.of(scope, policies), self._given.get(_model_of(scope))
        is_open = not own.is_decided and given is not None and given.chosen is not None
        return given if is_open and given is not None else own

    def is_due(self, scope: Scope) -> bool:
        """Whether the next prompt of a scope that has a verdict is to be compared; it counts as one prompt."""
        scope = _owner(scope)
        verdict = self._verdicts.get(scope)
        if verdict is None or not verdict.is_decided:
            return verdict is not None
        self._since[scope] = self._since.get(scope, 0) + 1
        if self._since[scope] < self._audit:
            return False
        self._since[scope] = 0
        return True

    def purge(self, scope: Scope, is_own: Callable[[Scope], bool]) -> None:
        """Forget the verdicts of some scopes, those that are kept of a scope's tenant too."""
        for each in [each for each in self._verdicts if is_own(each)]:
            del self._verdicts[each]
            self._since.pop(each, None)
        if self._kept is not None:
            self._kept.forget(scope)

    def add(self, scope: Scope, outcomes: Mapping[str, PolicyOutcome], given: str = "") -> None:
        """Have the verdict of a scope, which it has, take the outcomes of a prompt.

        given  what stands for an operator's prompts, one of which it was
        """
        owner = _model_of(scope) if given else _owner(scope)
        verdict = (self._given if given else self._verdicts).get(owner)
        if verdict is None:
            return  # it was purged meanwhile
        verdict.add(outcomes)
        if self._kept is not None and verdict.num_prompts % EACH_PROMPTS == 0:
            self._kept.keep(owner, verdict, given)
        told = verdict.chosen_estimate
        if told is not None and told.policy in outcomes:
            self._latest.append(outcomes[told.policy])

    @property
    def estimate(self) -> PolicyEstimate | None:
        """The estimate over the latest prompts of all tenants, each by its chosen policy, or the best."""
        return estimate("all", self._latest) if self._latest else None

    def counts(self) -> dict[str, int]:
        """Return how many tenants have which kind of verdict, and how many prompts were compared, an operator's too."""
        found = {"served": 0, "declined": 0, "open": 0}
        for each in self._verdicts.values():
            kind = "served" if each.chosen else "declined" if each.is_decided else "open"
            found[kind] += 1
        every = [*self._verdicts.values(), *self._given.values()]
        return {**found, "prompts": sum(each.num_prompts for each in every)}

    def _begun(
        self, owner: Scope, policies: Callable[[], Sequence[Selector]], name: str
    ) -> Verdict:
        verdict = Verdict(policies(), self._target, self._worth)
        if self._kept is not None and (found := self._kept.recall(owner, name)) is not None:
            verdict.go_on(*found)
        return verdict


def _owner(scope: Scope) -> Scope:
    return scope if scope.tenant is None else msgspec.structs.replace(scope, salt=None)


def _model_of(scope: Scope) -> Scope:
    return Scope(lora=scope.lora, model=scope.model)
