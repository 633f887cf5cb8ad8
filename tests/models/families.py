"""Configurations of tiny models of the families that mlx-lm knows: four layers, hidden 64, vocabulary 320, window 64.

They are data (families.json, one family a line). A member "base" stands for the model_type and the members that most
families share; what follows it is what differs.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

VOCAB = 320
WINDOW = 64

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "head_dim": 32,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def _whole(config: dict[str, Any]) -> dict[str, Any]:
    inner = {name: _whole(value) if isinstance(value, dict) else value for name, value in config.items()}
    if "base" not in inner:
        return inner
    return {"model_type": inner.pop("base")} | BASE | inner


FAMILIES: dict[str, dict[str, Any]] = {
    name: _whole(config) for name, config in json.loads((Path(__file__).parent / "families.json").read_text()).items()
}

NEEDS_METAL = {"muse_spark"}
RUNNABLE = sorted(FAMILIES.keys() - NEEDS_METAL)


def config(family: str, **changes: Any) -> dict[str, Any]:
    """A family's configuration with members changed where its language model reads them."""
    whole = copy.deepcopy(FAMILIES[family])
    whole.get("text_config", whole).update(changes)
    return whole
