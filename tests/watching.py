"""Watchers for tests: made by what is wanted of them, and found again in a manager."""

from quire.exchange import Digests, EventLog, Spill
from quire.foresight import LiveCurve, Trail


def watchers(*, events=False, evictions=False, curve=False, trail=True, observer=None):
    """Return the watchers that tests want."""
    wanted = [Digests()] + [Trail()] * trail
    wanted += [EventLog()] * events + [Spill()] * evictions + [LiveCurve()] * curve
    return wanted + ([observer] if observer is not None else [])


def watcher(manager, kind):
    """Return the watcher of a kind that a manager has, or None."""
    return next((each for each in manager.kernel.watchers.all if isinstance(each, kind)), None)


def take_events(manager):
    log = watcher(manager, EventLog)
    return log.take() if log is not None else []


def take_evicted(manager):
    spill = watcher(manager, Spill)
    return spill.take() if spill is not None else []


def what_if(manager):
    return watcher(manager, LiveCurve).what_if()
