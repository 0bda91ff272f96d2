"""How fast this host passes bytes from one socket to another: what an exchange over gRPC is held against."""

import socket
import threading
import time

TOTAL_BYTES = 256 * 2**20
PIECE_BYTES = 2**20


def loopback_bytes_per_s(total_bytes: int = TOTAL_BYTES) -> float:
    """The rate of one TCP connection of this host with itself, one way, plain `send` and `recv`. Takes 0.1 s or so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(), total_bytes), daemon=True)
        begin = time.perf_counter()
        sender.start()
        connection, _ = server.accept()
        piece, got = bytearray(PIECE_BYTES), 0
        with connection:
            while got < total_bytes:
                count = connection.recv_into(piece)
                if not count:
                    raise ConnectionError(f"loopback ended after {got} of {total_bytes} bytes")
                got += count
        seconds = time.perf_counter() - begin
        sender.join()
    return total_bytes / seconds


# --- Private helpers ---


def _send(address, total_bytes: int) -> None:
    piece = bytes(PIECE_BYTES)
    with socket.create_connection(address) as connection:
        for start in range(0, total_bytes, PIECE_BYTES):
            connection.sendall(piece[: total_bytes - start])
