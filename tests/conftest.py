"""Lets tests in all folders import the helpers beside this file, and skips what lacks a server here."""

import gc
import signal
from collections import Counter, defaultdict

import pytest
from hypothesis import settings

import parts
import system

# The shipped contract of tiers shows values where an assertion of it fails; folders before tests/tiers import it too.
pytest.register_assert_rewrite(
    "quire.tiers.contract.every",
    "quire.tiers.contract.bounded",
    "quire.tiers.contract.purging",
    "quire.tiers.contract.poisoned",
)
# Where the tests run in the background of a script, Ctrl-C is ignored by them and by all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("quire", deadline=None)  # no test depends on the time it takes
settings.load_profile("quire")
gc.disable()  # nothing that is imported goes again, and there are a million objects of it


def pytest_addoption(parser):
    say = "fail, instead of skipping, where a server or system library is missing"
    parser.addoption("--require-system", action="store_true", help=say)
    say = "run only the files that need this part, such as quire-sim, and no other part but installed ones"
    parser.addoption("--part", choices=sorted(parts.PACKAGES), help=say)


class LacksPart(pytest.Module):
    """A file of tests that needs a part that is not installed."""

    def collect(self):
        pytest.skip(parts.missing(self.path), allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if parts.missing(module_path):
        return LacksPart.from_parent(parent, path=module_path)
    return None


def pytest_ignore_collect(collection_path, config):
    part = config.getoption("--part")
    if part and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return part not in parts.needed(collection_path) or None
    return None


class LeaveToCi:
    """Marks with `ci` all cases of a test but as many as its mark `cases` says: the first, the last, and evenly between."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        tests = defaultdict(list)
        for item in items:
            if item.get_closest_marker("cases") and not item.get_closest_marker("long"):
                tests[item.parent.nodeid, item.originalname].append(item)
        for cases in tests.values():
            number = min(cases[0].get_closest_marker("cases").args[0], len(cases))
            kept = {each * (len(cases) - 1) // max(1, number - 1) for each in range(number)}
            for at, item in enumerate(cases):
                if at not in kept:
                    item.add_marker("ci")


def pytest_configure(config):
    config.pluginmanager.register(LeaveToCi())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Give files with slow tests out first, then those with many tests, so that no worker is left with a long one."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        many = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path not in slow, -many[item.path]))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Leave what was imported out of all collections of garbage, each of which would take 0.3 s otherwise."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _what_is_left_stays():
    """Leave out what files before this one have left, too: models that are kept, and all that was imported since."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test that imports a part on its way, such as a snippet, where that is not installed."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        for part, package in parts.PACKAGES.items():
            if error.name == package and not parts.is_installed(part):
                pytest.skip(f"needs {part}, not installed")
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for name in [name for mark in item.iter_markers("system") for name in mark.args]:
        reason = system.missing(name)
        item.user_properties.append((name, "skipped" if reason else "ran"))
        if reason and item.config.getoption("--require-system"):
            pytest.fail(reason, pytrace=False)
        if reason:
            pytest.skip(reason)


def pytest_terminal_summary(terminalreporter):
    done = [
        each
        for kind in ("passed", "failed", "skipped")
        for each in terminalreporter.getreports(kind)
        if isinstance(each, pytest.TestReport)  # and not a file that is skipped as a whole
    ]
    runs = Counter(pair for report in done for pair in report.user_properties)
    for name in system.NEEDS:
        ran, skipped = runs[name, "ran"], runs[name, "skipped"]
        if ran or skipped:
            why = f": {system.missing(name)}" if skipped else ""
            terminalreporter.write_line(f"need {name}: {ran} ran, {skipped} skipped{why}")
