"""Reads the dimensions of a model's KV from its config.json.

A model is named as for SGLang: a folder with a config.json, or a name such as "Qwen/Qwen3-8B" whose
files are in Hugging Face's local cache. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tutti.errors import ConfigError
from tutti.medium.layout import MODELS, KVLayout

_CONFIG_NBYTES_MAX = 1 << 20


def model_layout(name: str, page_size: int, dtype: str) -> KVLayout | None:
    """The layout of all heads and layers of a model; None if it has no config.json here.

    Raises ConfigError for a config.json that does not describe KV in one shape for all layers.
    """
    alias = name.rsplit("/", 1)[-1].lower()
    if alias in MODELS:
        return MODELS[alias](page_size, dtype)
    path = _config_path(name)
    if path is None:
        return None
    config = _read(path)
    try:
        return _layout(config.get("text_config", config), page_size, dtype)
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"{path} does not describe the KV ({error}); pass --layers, --kv-heads and --head-dim"
        ) from error


def _layout(config: dict[str, Any], page_size: int, dtype: str) -> KVLayout:
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):
        rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        return KVLayout.mla(layers, rank, rope, page_size, dtype)
    heads = int(config["num_attention_heads"])
    head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return KVLayout.mha(layers, int(kv_heads), int(head_dim), page_size, dtype)


def _config_path(name: str) -> Path | None:
    # Without a home folder this leaves "~", and nothing is found; pathlib would raise RuntimeError.
    folder = Path(os.path.expanduser(name))
    if (folder / "config.json").is_file():
        return folder / "config.json"
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = os.path.expanduser(os.environ.get("HF_HUB_CACHE", f"{home}/hub"))
    snapshots = Path(hub, f"models--{name.replace('/', '--')}", "snapshots")
    found = sorted(snapshots.glob("*/config.json"), key=lambda path: path.parent.stat().st_mtime)
    return found[-1] if found else None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()[:_CONFIG_NBYTES_MAX]
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; get the model's files again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object; get the model's files again")
    return config
