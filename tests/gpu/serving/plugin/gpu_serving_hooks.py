"""SGLang's plugin for the servers on a GPU: weights of a real scale, and counts of the stores.

SGLang's own dummy weights are so small that all logits are equal: wrong KV would go unnoticed.
Counts are written several times a second, because those of /metrics are up to ten seconds old.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Names the folder for the counts, a file for each store.
FOLDER = "TUTTI_TEST_COUNTS"
#: Standard deviations by a part of the name, for a hidden size of 4096: attention is so sharp that
#: few tokens of KV decide what comes out.
DEVIATIONS = {"qkv_proj": 0.026, "o_proj": 0.04, "embed_tokens": 1.0}
OTHERS = 0.02
PERIOD_S = 0.4

_log = logging.getLogger(__name__)


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for module in ("weight_utils", "loader"):  # the second has imported it by name
        target = f"sglang.srt.model_loader.{module}.initialize_dummy_weights"
        HookRegistry.register(target, fill, HookType.REPLACE)
    # Asked on every GPU and used on Blackwell alone; its package need not be installed.
    target = "sglang.srt.layers.dual_gemm.DualGemm._select_mode"
    HookRegistry.register(target, lambda *_: None, HookType.REPLACE)
    HookRegistry.register("tutti.store.ObjectStore.__init__", watch, HookType.AROUND)


def fill(model: Any, *_: Any, **__: Any) -> None:
    """Uniform random weights, other ones in every layer and the same ones in every process."""
    import torch

    narrower = (4096 / model.config.hidden_size) ** 0.5
    for number, (name, weights) in enumerate(sorted(model.state_dict().items())):
        if not torch.is_floating_point(weights) or "cos_sin" in name or "inv_freq" in name:
            continue
        if "norm" in name:
            weights.fill_(1.0)
            continue
        deviation = next((d for part, d in DEVIATIONS.items() if part in name), OTHERS)
        bound = 3**0.5 * deviation * (1.0 if "embed_tokens" in name else narrower)
        generator = torch.Generator(device=weights.device).manual_seed(number)
        weights.uniform_(-bound, bound, generator=generator)


def watch(init: Callable[..., None], store: Any, *args: Any, **kwargs: Any) -> None:
    init(store, *args, **kwargs)
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}-{id(store)}.json"
    threading.Thread(target=write_counts, args=(store, path), daemon=True).start()


def write_counts(store: Any, path: Path) -> None:
    """Writes them until the store is closed."""
    fresh = path.with_suffix(".new")
    try:
        while stats := store.stats():
            fresh.write_text(json.dumps(stats, default=str))
            os.replace(fresh, path)
            time.sleep(PERIOD_S)
    except Exception as error:
        _log.warning("no more counts of the store: %r", error)
