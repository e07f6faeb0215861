"""Measures a link with plain TCP: run as a program, once on either end.

python -m sparse2d.testbed.probe serve ADDRESS
python -m sparse2d.testbed.probe measure ADDRESS SECONDS
"""

import json
import socket
import statistics
import sys
import time

PORT = 29_400
ROUND_TRIPS = 50
CHUNK = bytes(1 << 16)
WARMUP_CHUNKS = 10
# Answers of the receiver, and connecting, take so long at most.
PATIENCE_S = 30


def serve(address: str) -> None:
    """Return bytes one by one, then take all that comes and tell how much that was, and in what time."""
    with socket.create_server((address, PORT)) as server:
        server.settimeout(PATIENCE_S)
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUND_TRIPS):
                connection.sendall(connection.recv(1))
            # The bucket is full at first.
            for _ in range(WARMUP_CHUNKS):
                connection.recv(len(CHUNK))
            start, received = time.perf_counter(), 0
            while part := connection.recv(len(CHUNK)):
                received += len(part)
            seconds = time.perf_counter() - start
            connection.sendall(json.dumps([received, seconds]).encode())


def measure(address: str, seconds: float) -> dict[str, float]:
    """Throughput of one stream and the median round trip of one byte, as ``Link``'s fields."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = socket.create_connection((address, PORT), timeout=PATIENCE_S)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            trips.append(time.perf_counter() - start)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(CHUNK)
        connection.shutdown(socket.SHUT_WR)
        received, taken = json.loads(connection.recv(1 << 10))
    return {"mbit": received * 8 / taken / 1e6, "rtt_ms": statistics.median(trips) * 1e3}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        print(json.dumps(measure(sys.argv[2], float(sys.argv[3]))))
