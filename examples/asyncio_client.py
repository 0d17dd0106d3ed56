"""A store in an asyncio program: tickets become futures, and nothing blocks the loop.

python examples/asyncio_client.py /tmp/pool.tutti
"""

from __future__ import annotations

import asyncio
import sys

from tiny import LAYOUT, compute_page, keys_of, prompt

import tutti

PAGES = 8


async def stored(ticket: tutti.PutTicket) -> tutti.PutResult:
    """Waits for a put.  Raises what `PutTicket.wait` raises."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    ticket.on_done(lambda _: loop.call_soon_threadsafe(done.set))
    await asyncio.wait_for(done.wait(), 60)
    return ticket.wait()


async def loaded(ticket: tutti.LoadTicket) -> None:
    """Waits until all layers are in memory.  Raises what `LoadTicket.wait` raises."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    ticket.on_settled(lambda: loop.call_soon_threadsafe(done.set))
    await asyncio.wait_for(done.wait(), 60)
    ticket.wait()


async def request(store: tutti.Store, memory: tutti.HostMemory, number: int) -> str:
    """Stores one prompt and loads it into other pages."""
    keys = keys_of(prompt(number, PAGES))
    first = 2 * PAGES * number
    source, target = range(first, first + PAGES), range(first + PAGES, first + 2 * PAGES)
    for page, key in zip(source, keys, strict=True):
        memory.write(page, compute_page(key))
    await stored(store.put(keys, source))
    await loaded(store.load(keys, target))
    right = sum(memory.read(page) == compute_page(k) for page, k in zip(target, keys, strict=True))
    return f"request {number}: {right} of {PAGES} pages right"


async def main(path: str) -> None:
    """Four requests at once.  `open` and `close` may wait for the disk, so a thread does them."""
    store = await asyncio.to_thread(tutti.open, path, layout=LAYOUT, capacity="64MiB")
    try:
        memory = store.allocate_memory(8 * PAGES)
        for line in await asyncio.gather(*(request(store, memory, n) for n in range(4))):
            print(line)
    finally:
        await asyncio.to_thread(store.close)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
