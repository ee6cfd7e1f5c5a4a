"""Numerics of an engine, as far as its process tells.

Engines whose kernels round differently compute other bytes for the same tokens. They share no pages, unless their
operators declare them equal. Nothing here raises: an engine whose process tells less has fewer fields.

Processes of one engine must find the same, also those that use no device. So this asks no device for its state. It does
look at the modules of the process: each process of an engine has loaded the engine and PyTorch.
"""

import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Callable
from typing import Any, Optional

logger = logging.getLogger(__name__)

SETTINGS = {
    "attention_backend": "exec.kernel",
    "prefill_attention_backend": "exec.kernel",
    "decode_attention_backend": "exec.kernel",
    "dtype": "model",
    "quantization": "model",
    "enable_deterministic_inference": "exec.deterministic",
}
"""Settings of SGLang that choose kernels, and their places in its configuration."""


def numerics(declared: str, engine: Optional[str], attention: Any = None) -> dict[str, Any]:
    """Fields for the identity of a namespace. `declared` replaces all of them, unless it is empty.

    `engine` is the package of the engine, such as `vllm`. None stands for the engine that this process has loaded.
    """
    if declared:
        return {"declared": declared}
    if engine is None:
        engine = next((name for name in ("sglang", "vllm") if name in sys.modules), None)
    device = {"sglang": device_of_torch, "vllm": device_of_vllm}.get(engine or "", lambda: None)
    if attention is None:
        attention = ask(settings_of_sglang) if engine == "sglang" else os.environ.get("VLLM_ATTENTION_BACKEND")
    found = {
        "engine": None if engine is None else [engine, version(engine)],
        "torch": version("torch"),
        "device": ask(device),
        "attention": attention,
    }
    logger.info("Larder: pages are shared with engines of the same numerics, which are %s", found)
    return found


def ask(question: Callable[[], Any]) -> Any:
    """The answer, or None if the host process has another interface."""
    try:
        return question()
    except Exception:
        return None


def version(package: str) -> Optional[str]:
    """Version of a package. That of PyTorch names its build, such as 2.9.0+cu128."""
    found = getattr(sys.modules.get(package), "__version__", None)
    return str(found) if found else ask(lambda: importlib.metadata.version(package))


def texts(*values: Any) -> list[Optional[str]]:
    return [None if value is None else str(value) for value in values]


def processor() -> list[Optional[str]]:
    """The processor, and the instructions for which PyTorch chooses its kernels."""
    torch: Any = sys.modules.get("torch")
    return texts("cpu", platform.machine(), ask(lambda: torch.backends.cpu.get_cpu_capability()))


def name_and_capability(device: Any) -> list[Optional[str]]:
    return texts(
        ask(lambda: device.get_device_name()), ask(lambda: [int(number) for number in device.get_device_capability()])
    )


def device_of_vllm() -> list[Optional[str]]:
    """Type, name and capability of the device. vLLM asks the driver, so the process needs no context on the device."""
    from vllm.platforms import current_platform

    if current_platform.device_type == "cpu":
        return processor()
    return [str(current_platform.device_type), *name_and_capability(current_platform)]


def device_of_torch() -> Optional[list[Optional[str]]]:
    """The same for an engine whose processes all use the device."""
    torch: Any = sys.modules["torch"]
    if not torch.accelerator.is_available():
        return processor()
    kind = torch.accelerator.current_accelerator().type
    return [str(kind), *name_and_capability(getattr(torch, kind))]


def settings_of_sglang() -> dict[str, Optional[str]]:
    return dict(zip(SETTINGS, texts(*(setting_of_sglang(name, place) for name, place in SETTINGS.items()))))


def setting_of_sglang(name: str, place: str) -> Any:
    """A setting that is in effect, or None. Raises if SGLang 0.5.23 has no configuration in this process."""
    first, *others = place.split(".")
    bag: Any = getattr(sys.modules["sglang.srt.runtime_context"], f"get_{first}")()
    for other in others:
        bag = getattr(bag, other, None)
    return getattr(bag, name, None)
