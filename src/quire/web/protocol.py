"""What a server reads of HTTP: by uvicorn's fastest parser, with an end to what a head may be."""

# pyright: basic

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 1 << 16
"""Bytes of a request line and headers."""


class HttpProtocol(HttpToolsProtocol):
    """A connection of uvicorn, read by httptools; a head that goes on for more than `MOST_HEAD` bytes is refused (400)."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self._is_in_head, self._num_read = True, 0

    def data_received(self, data: bytes) -> None:
        self._num_read += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_read > MOST_HEAD and not self.transport.is_closing():
            self.send_400_response(f"the head of a request has at most {MOST_HEAD} bytes")

    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_read = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head, self._num_read = True, 0
        super().on_message_complete()
