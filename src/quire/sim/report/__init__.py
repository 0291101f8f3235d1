"""A replay as one HTML file: figures, tables, and the commands that compute them again."""

from quire.sim.report.data import Report, focus_capacity
from quire.sim.report.page import html

__all__ = ["Report", "focus_capacity", "html"]
