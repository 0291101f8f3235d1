"""A server for the tests of object stores, and what lies in it."""

import atexit
import functools
import os
import tempfile
import time

import obstore
from s3_server import CONFIG, Front, S3Server

from quire.tiers.objects import Objects


@functools.cache
def s3_server():
    """Return the one server of this process; starting it takes two seconds."""
    log = os.path.join(tempfile.mkdtemp(prefix="quire-moto-"), "log")  # noqa: PTH118
    server = S3Server(log)
    atexit.register(server.close)
    return server


def s3_front():
    """Yield a front before the server and close it: the body of a fixture."""
    front = Front(s3_server().port)
    yield front
    front.close()


def s3_tier(url, **settings):
    """Open a folder of the bucket that no other test uses; `url` is the server's or a front's."""
    settings.setdefault("config", {**CONFIG, "endpoint": url})
    folder = settings.pop("folder", os.urandom(8).hex())
    return Objects(f"s3://quire/{folder}", **settings)


def objects_of(tier):
    """Return path -> size of all objects of a tier."""
    found = {}
    listing = functools.partial(tier._client.names, "", None, found.__setitem__)
    tier._client.wait(listing, time.monotonic() + 10)
    return found


def rewrite(tier, key, record):
    """Put bytes in the place of a record, whatever their length."""
    bundle, position = tier._index.find(key)
    store, size = tier._client.store, bundle.record_bytes
    content = bytes(obstore.get(store, bundle.path).bytes())
    start, stop = position * size, (position + 1) * size
    obstore.put(store, bundle.path, content[:start] + record + content[stop:])
