"""tiny_model.py FOLDER SEED mha|mla [--tokenizer]: 4 layers with random weights of a real model's
scale.

SGLang's own dummy weights are so small that all logits are equal: wrong KV would go unnoticed.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

_COMMON = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.08,
    "torch_dtype": torch.bfloat16,
}


def make(folder: str, seed: int = 0, kind: str = "mha") -> None:
    torch.manual_seed(seed)
    if kind == "mla":
        config = DeepseekV3Config(
            **_COMMON,
            num_attention_heads=8,
            num_key_value_heads=8,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            first_k_dense_replace=4,
            n_routed_experts=8,
            moe_intermediate_size=64,
            moe_layer_freq=1,
            rope_scaling={
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": 8192,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        )
        model = DeepseekV3ForCausalLM(config)
    else:
        config = LlamaConfig(**_COMMON, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def make_tokenizer(folder: str) -> None:
    """Numbers are the words, so that text and tokens are the same either way."""
    words = {str(number): number for number in range(_COMMON["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    folder, seed, kind, *more = sys.argv[1:]
    make(folder, int(seed), kind)
    if more == ["--tokenizer"]:
        make_tokenizer(folder)
