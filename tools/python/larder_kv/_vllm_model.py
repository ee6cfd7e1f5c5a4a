"""The model of a vLLM engine, as far as it determines the bytes of its KV.

Two engines may share pages only if both have the same. An operator's text replaces the version of the weights, which
the process cannot always tell. All settings count in any case.
"""

import hashlib
import json
import sys
from typing import Any, Optional

from ._numerics import ask
from ._weights import plain, unknown, version_of_weights

SETTINGS = (
    "dtype",
    "quantization",
    "quantization_config",
    "hf_overrides",
    "model_impl",
    "model_class_overrides",
    "code_revision",
    "disable_sliding_window",
)
"""Fields of vLLM's `ModelConfig` that change the bytes of KV."""

UNNAMED = ("_name_or_path", "_commit_hash", "transformers_version")
"""Keys of a model's configuration that say nothing about its KV."""


def engine_config() -> Optional[Any]:
    """Configuration of the engine that is being built. vLLM gives it to the callers of a tier, but not to the tier."""
    frame = sys._getframe(1)
    while frame is not None:
        config = frame.f_locals.get("vllm_config")
        if hasattr(config, "model_config"):
            return config
        frame = frame.f_back
    return None


def attention_of(vllm_config: Any) -> Optional[str]:
    """Attention backend that the operator has chosen. Otherwise version, device and model determine it."""
    backend = ask(lambda: vllm_config.attention_config.backend)
    return None if backend is None else str(backend)


def model_of(vllm_config: Any, weights: str) -> dict[str, Any]:
    """Fields for the identity of a namespace. Raises if the version of the weights is neither given nor known."""
    if vllm_config is None:
        if not weights:
            raise ValueError(unknown("the model", "vLLM does not tell its configuration"))
        return {"weights": weights}
    model = vllm_config.model_config
    config = plain(model.hf_config.to_dict())
    for name in UNNAMED:
        config.pop(name, None)
    text = json.dumps(config, sort_keys=True)
    names = {name: plain(getattr(model, name, None)) for name in SETTINGS}
    names["config"] = hashlib.sha256(text.encode()).hexdigest()
    # The length of the context chooses between two tables of this embedding.
    names["max_model_len"] = model.max_model_len if '"longrope"' in text else None
    names["is_dummy"] = str(getattr(vllm_config.load_config, "load_format", "")) == "dummy"
    names["weights"] = weights or version_of(model)
    return names


def version_of(model: Any) -> list[str]:
    uri = getattr(model, "model_weights", "")
    if uri:
        raise ValueError(unknown(uri, "an object has no version"))
    # A configuration of another repository has the commit of that one.
    commit = None if getattr(model, "hf_config_path", None) else getattr(model.hf_config, "_commit_hash", None)
    return version_of_weights(model.model, getattr(model, "revision", None), commit)
