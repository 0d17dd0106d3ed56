"""A server with a thread for each request: all of them share one store.

    python examples/threaded_server.py /tmp/pool.tutti

Each request names a prompt; the server loads what is stored, computes the rest and stores it.
"""

from __future__ import annotations

import json
import queue
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tiny import LAYOUT, compute_page, keys_of, prompt

import tutti

PAGES_A_REQUEST = 8
REQUESTS_AT_ONCE = 4


class Server:
    """The store, and page numbers that no request uses now."""

    def __init__(self, path: str) -> None:
        self.store = tutti.open(path, layout=LAYOUT, capacity="64MiB")
        self.memory = self.store.allocate_memory(PAGES_A_REQUEST * REQUESTS_AT_ONCE)
        self.free: queue.Queue[range] = queue.Queue()
        for first in range(0, self.memory.pages, PAGES_A_REQUEST):
            self.free.put(range(first, first + PAGES_A_REQUEST))

    def answer(self, seed: int) -> dict[str, int]:
        """Serves one prompt; how many pages came from the store, and how many were right."""
        keys = keys_of(prompt(seed, PAGES_A_REQUEST))
        pages = self.free.get(timeout=60)  # as many requests at once as there is memory for
        try:
            hits = self.store.match(keys, pin=True)
            if hits:
                self.store.load(keys[:hits], pages[:hits]).wait()
            right = sum(
                self.memory.read(page) == compute_page(key)
                for key, page in zip(keys[:hits], pages[:hits], strict=True)
            )
            for key, page in zip(keys[hits:], pages[hits:], strict=True):
                self.memory.write(page, compute_page(key))
            if hits < len(keys):
                parent = keys[hits - 1].tobytes() if hits else None
                self.store.put(keys[hits:], pages[hits:], parent=parent, depth=hits).wait()
        finally:
            self.free.put(pages)
        return {"hits": hits, "right": right}


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    """GET /SEED answers with the numbers of that prompt."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(server.answer(int(self.path.strip("/")))).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


def main(path: str) -> None:
    """Two rounds of 12 requests, several at once: the second one is loaded."""
    server = Server(path)
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(server))
    Thread(target=http.serve_forever, daemon=True).start()

    def ask(seed: int) -> dict[str, int]:
        url = f"http://127.0.0.1:{http.server_address[1]}/{seed}"
        with urllib.request.urlopen(url, timeout=60) as reply:
            found: dict[str, int] = json.loads(reply.read())
        return found

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as clients:
        for name in ("first", "second"):
            answers = list(clients.map(ask, range(12)))
            hits = sum(answer["hits"] for answer in answers)
            right = sum(answer["right"] for answer in answers)
            print(f"{name} round: {hits} pages loaded, {right} of them right")
    http.shutdown()
    server.store.close()


if __name__ == "__main__":
    main(sys.argv[1])
