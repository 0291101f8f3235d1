"""SET and GET over a plain blocking socket: what a Redis server gives a client that does nothing else.

The baseline of the Redis tier: the same bytes, the same number of commands in flight, no deadline, no
checksum, no check of an answer beyond its shape.
"""

import socket
from collections.abc import Callable, Sequence

from quire.errors import TierError
from quire.tiers.redis.url import RECEIVE_BYTES, SEND_BYTES


def raw_socket(host: str, port: int) -> socket.socket:
    """Return a connected TCP socket whose buffers are as large as the tier's."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.connect((host, port))
    return raw


def raw_put(raw: socket.socket, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
    """SET all values, every command sent before the first answer is read.

    Raises `TierError` where an answer is not `+OK`.
    """
    for key, value in zip(keys, values, strict=True):
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value))
        size = len(head) + len(value) + 2
        # One call for all; what a signal cut off follows.
        sent = raw.sendmsg((head, value, b"\r\n"))
        if sent < size:
            raw.sendall((head + bytes(value) + b"\r\n")[sent:])
    expected = b"+OK\r\n" * len(keys)
    answer = bytearray(len(expected))
    _fill(raw, memoryview(answer))
    if not answer.startswith(expected):
        raise TierError(f"the server answered SET with {bytes(answer[:80])!r}, not with +OK")


def raw_get(raw: socket.socket, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
    """GET values of exactly the buffers' sizes, every command sent before the first answer is read.

    Raises `TierError` where a value has another size or is not there.
    """
    raw.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys))
    end = bytearray(2)
    for buffer in buffers:
        expected = b"$%d\r\n" % len(buffer)
        head = bytearray(len(expected))
        _fill(raw, memoryview(head))
        if not head.startswith(expected):
            raise TierError(f"the server answered GET with {bytes(head)!r}, not with {expected!r}")
        _fill(raw, buffer)
        _fill(raw, memoryview(end))


def _fill(raw: socket.socket, target: memoryview) -> None:
    receive: Callable[[memoryview], int] = raw.recv_into
    while target:
        count = receive(target)
        if not count:
            raise TierError("the server closed the connection")
        target = target[count:]
