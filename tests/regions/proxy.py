"""A TCP proxy between two regions: counts connections and bytes, cuts what it is told to."""

import contextlib
import socket
import threading
import time


class Proxy:
    """Passes bytes on to an address.

    Attributes:
      address: where to connect to.
      connections: how many there were.
      passed: bytes that came back from the other side.
      cut_after: connections end after so many bytes from the other side, as often as `cuts` says.
      bytes_per_s: no more come back on each connection; None = no limit.
    """

    def __init__(
        self, target: str, cut_after: int = 0, cuts: int = 0, bytes_per_s: float | None = None
    ):
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.connections = self.passed = 0
        self.cut_after, self.cuts, self.bytes_per_s = cut_after, cuts, bytes_per_s
        self._goes = threading.Event()
        self._goes.set()
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Cut everything."""
        for one in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def pause(self) -> bool:
        """Pass nothing on until `go_on`; returns True."""
        self._goes.clear()
        return True

    def go_on(self) -> None:
        """Pass bytes on again."""
        self._goes.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self.connections += 1
                self._open += [near, far]
                for pair in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        here = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if back and self.bytes_per_s is not None:
                    time.sleep(len(data) / self.bytes_per_s)
                self._goes.wait()
                sink.sendall(data)
                here += len(data) * back
                with self._lock:
                    self.passed += len(data) * back
                    cut = back and self.cuts > 0 and here >= self.cut_after
                    self.cuts -= cut
                if cut:
                    break
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
