"""Fixtures of several test files."""

import pytest


@pytest.fixture
def files():
    """Return the files of a disk tier, which fail when a test says so."""
    from disk_help import FaultyFiles

    return FaultyFiles()


@pytest.fixture
def disk(tmp_path, files):
    """Return a disk tier for a hundred small records, checked at the end."""
    from quire.tiers.disk import Disk

    with Disk(tmp_path, 1216 * 100, ahead=1, files=files) as disk:
        yield disk
        disk.check()
