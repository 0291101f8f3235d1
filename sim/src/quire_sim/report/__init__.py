"""A replay as one HTML file: figures, tables, and the commands that compute them again."""

from quire_sim.report.data import Report, focus_capacity
from quire_sim.report.page import html

__all__ = ["Report", "focus_capacity", "html"]
