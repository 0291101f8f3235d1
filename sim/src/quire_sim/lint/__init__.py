"""Causes of lost prefixes: where each prompt of a log parts from the nearest earlier one, and why."""

from quire_sim.lint.causes import CAUSES, Cause, Parting, cause_of
from quire_sim.lint.linting import lint_log
from quire_sim.lint.reports import LintReport, Loss

__all__ = ["CAUSES", "Cause", "LintReport", "Loss", "Parting", "cause_of", "lint_log"]
