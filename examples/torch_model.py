"""A torch model on the CPU whose KV cache is saved, and restored layer by layer.

    python examples/torch_model.py /tmp/pool.tutti

The second half of a prompt is computed twice: after its own prefill, and over a prefix that was
loaded. Both give the same numbers, bit by bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import tutti

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 4, 32, 16, 4
WIDTH = HEADS * DIM
LAYOUT = tutti.KVLayout.mha(LAYERS, HEADS, DIM, PAGE, "float32", model="example", weights="seed 0")

Wait = Callable[[int], None]


class Model:
    """Attention over a paged KV cache: cache[layer][K or V] is (pages, page size, heads, dim)."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(1000, WIDTH)
        self.weights = torch.randn(LAYERS, 3, WIDTH, WIDTH) / WIDTH**0.5
        self.cache = torch.zeros(LAYERS, 2, PAGES, PAGE, HEADS, DIM)

    def prefill(self, tokens: torch.Tensor, first: int, wait: Wait) -> torch.Tensor:
        """Computes tokens ``first`` and later; their prefix is in the cache once a layer's wait
        returned.
        """
        hidden = self.embedding[tokens[first:]]
        for layer in range(LAYERS):
            wait(layer)
            query, key, value = (hidden @ weight for weight in self.weights[layer])
            for kind, fresh in enumerate((key, value)):
                flat = self.cache[layer, kind].view(-1, HEADS, DIM)
                flat[first : len(tokens)] = fresh.view(-1, HEADS, DIM)
            keys, values = (
                self.cache[layer, kind].view(-1, HEADS, DIM)[: len(tokens)] for kind in (0, 1)
            )
            scores = torch.einsum("qhd,khd->hqk", query.view(-1, HEADS, DIM), keys) / DIM**0.5
            seen = torch.arange(len(tokens))[None, :] <= torch.arange(first, len(tokens))[:, None]
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            hidden = hidden + torch.einsum("hqk,khd->qhd", weights, values).reshape(-1, WIDTH)
        return hidden


def main(path: str) -> None:
    """Prefill, save, forget, restore, and compare."""
    model = Model()
    tokens = torch.randint(0, 1000, (PAGES * PAGE,))
    keys = tutti.chain_keys(LAYOUT.fingerprint, tokens.numpy(), PAGE)
    half = PAGES // 2
    with tutti.open(path, layout=LAYOUT, capacity="16MiB") as store:
        store.register(
            tutti.HostMemory.from_layers(LAYOUT, [list(layer) for layer in model.cache], PAGES)
        )
        model.prefill(tokens[: half * PAGE], 0, lambda layer: None)
        store.put(keys[:half], range(half)).wait()
        computed = model.prefill(tokens, half * PAGE, lambda layer: None)
        model.cache.zero_()
        found = store.match(keys)
        ticket = store.load(keys[:found], range(found))
        restored = model.prefill(tokens, found * PAGE, ticket.wait_layer)
        ticket.wait()
    same = bool(torch.equal(computed, restored))
    print(
        f"{found} of {PAGES} pages were loaded; the numbers are {'the same' if same else 'WRONG'}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
