"""An SGLang plugin for tests: latent attention (MLA) with the backend `torch_native`.

That backend reads K and V from the pool, where MLA keeps only the latent. The absorbed form of MLA
works on the latent itself, so here it is chosen for prefill too, through SGLang's own registry.
"""

from __future__ import annotations


def activate() -> None:
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda attn, batch: AttnForwardMethod.MLA)
