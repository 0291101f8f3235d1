"""A server that speaks just enough RESP, and says something else whenever a test wants it to."""

import random
import socket
import struct
import threading
import time


class RubbishServer:
    """Keeps values in `values`. Every answer goes through `mischief(answer, command)`, which returns bytes to send instead,
    or a `Then` of bytes and what happens after them.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.mischief = honest
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._is_open = True
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_open = False
        # Closing alone would leave the other thread in `accept`.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while self._is_open:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as stream:
                while command := read_command(stream):
                    said = self.mischief(self._answer(command), command)
                    then = said if isinstance(said, Then) else Then(said)
                    for piece in then.pieces:
                        connection.sendall(piece)
                    then.after(connection)
        except OSError:
            pass

    def _answer(self, words: list[bytes]) -> bytes:
        name, key = words[0], words[1] if len(words) > 1 else b""
        if name == b"GET":
            value = self.values.get(key)
            return b"$-1\r\n" if value is None else bulk(value)
        if name == b"SET":
            if key in self.values:
                return b"$-1\r\n"
            self.values[key] = words[2]
            return b"+OK\r\n"
        if name == b"EXISTS":
            return b":%d\r\n" % (key in self.values)
        if name == b"UNLINK":
            return b":%d\r\n" % (self.values.pop(key, None) is not None)
        if name == b"STRLEN":
            return b":%d\r\n" % len(self.values.get(key, b""))
        if name == b"SCAN":
            names = [bulk(each) for each in self.values]
            return b"*2\r\n" + bulk(b"0") + b"*%d\r\n" % len(names) + b"".join(names)
        if name == b"INFO":
            return bulk(b"redis_version:7.0\r\nmaxmemory:1000\r\ndb0:keys=3\r\n")
        return b"-ERR unknown command\r\n"


class Then:
    """Bytes in pieces, and what happens to the connection after them."""

    def __init__(self, *pieces: bytes, after=lambda connection: None) -> None:
        self.pieces = pieces
        self.after = after


def honest(answer: bytes, command: list[bytes]) -> bytes:
    return answer


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    raise OSError


def hang_up(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)
    raise OSError


def read_command(stream) -> list[bytes]:
    line = stream.readline()
    if not line.startswith(b"*"):
        return []
    words = []
    for _ in range(int(line[1:])):
        length = int(stream.readline()[1:])
        words.append(stream.read(length))
        stream.read(2)
    return words


def rubbish(seed: int, pause_s: float):
    """A mischief: some answers stay as they are, some do not, as the seed says."""
    numbers = random.Random(seed)
    honest_share = numbers.choice([0.0, 0.5, 0.8])

    def mischief(answer: bytes, command: list[bytes]):
        if numbers.random() < honest_share:
            return answer
        return numbers.choice(KINDS)(answer, numbers, pause_s)

    return mischief


def _cut(answer, numbers):
    return answer[: numbers.randrange(len(answer))]


def _flip(answer, numbers):
    changed = bytearray(answer)
    for _ in range(numbers.choice([1, 1, 1, 8])):
        # The line in front is where the parser reads.
        last = numbers.choice([min(16, len(changed)), len(changed)])
        changed[numbers.randrange(last)] ^= 1 << numbers.randrange(8)
    return bytes(changed)


def _pause(pause_s):
    return lambda connection: time.sleep(pause_s)


KINDS = (
    lambda answer, numbers, _: numbers.randbytes(numbers.choice([1, 5, 40, 5000, 70_000])),
    lambda answer, numbers, _: Then(_cut(answer, numbers), after=hang_up),
    lambda answer, numbers, _: Then(_cut(answer, numbers), after=reset),
    lambda answer, numbers, pause_s: Then(_cut(answer, numbers), after=_pause(pause_s)),
    lambda answer, numbers, pause_s: Then(b"", after=_pause(pause_s)),
    lambda answer, numbers, _: _flip(answer, numbers),
    lambda answer, numbers, _: _flip(answer, numbers),
    lambda answer, numbers, _: answer + answer,
    lambda answer, numbers, _: answer + numbers.randbytes(3),
    lambda answer, numbers, _: Then(*(bytes([byte]) for byte in answer[:300]), answer[300:]),
    lambda answer, numbers, _: numbers.choice(
        [
            b":1\r\n",
            b":-7\r\n",
            b"+OK\r\n",
            b"+QUEUED\r\n",
            b"$-1\r\n",
            b"$0\r\n\r\n",
            b"*0\r\n",
            b"*-1\r\n",
            b"*2\r\n:1\r\n$1\r\na\r\n",
            b"*1\r\n" * 40,
            b"*99999999\r\n",
            b"$99999999999999999999\r\n",
            b"$9999999999\r\n" + bytes(3000),
            b"$-2\r\n",
            b"$+5\r\nhello\r\n",
            b"$1_0\r\n0123456789\r\n",
            b": 1\r\n",
            b"\r\n",
            b"\n",
            b"-\r\n",
            b"-ERR what\r\n",
            b"-OOM command not allowed\r\n",
            b"-WRONGTYPE Operation\r\n",
            b"-MOVED 12 127.0.0.1:1\r\n",
            b"-ASK 12 nowhere\r\n",
            b"%1\r\n+a\r\n:1\r\n",
            b"_\r\n",
            b"+" + b"x" * 5000 + b"\r\n",
        ]
    ),
    lambda answer, numbers, _: bulk(
        numbers.randbytes(numbers.choice([0, 1, 191, 192, 5000, 200_000]))
    ),
)
