"""The numerics of an engine tell engines apart whose kernels round differently."""

import sys
import types
from types import SimpleNamespace

import pytest
from larder_kv._numerics import numerics


@pytest.fixture
def modules(monkeypatch):
    """A process without an engine. Sets modules of it."""
    for name in ("torch", "sglang", "sglang.srt.runtime_context", "vllm", "vllm.platforms"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def provide(name, **items):
        module = types.ModuleType(name)
        module.__dict__.update(items)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return provide


def torch_on(kind="cuda", name="NVIDIA H100 80GB HBM3", capability=(9, 0)):
    device = SimpleNamespace(get_device_name=lambda: name, get_device_capability=lambda: capability)
    accelerator = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: SimpleNamespace(type=kind))
    return {"__version__": "2.9.0+cu128", "accelerator": accelerator, kind: device}


def sglang(modules, torch, arguments, version="0.5.23"):
    modules("torch", **torch)
    modules("sglang", __version__=version)
    kernel = {name: value for name, value in arguments.items() if name.endswith("backend")}
    deterministic = SimpleNamespace(enable_deterministic_inference=arguments.get("enable_deterministic_inference"))
    places = SimpleNamespace(kernel=SimpleNamespace(**kernel), deterministic=deterministic)
    model = SimpleNamespace(**{name: value for name, value in arguments.items() if name not in kernel})
    modules("sglang.srt.runtime_context", get_exec=lambda: places, get_model=lambda: model)
    return numerics("", "sglang")


def vllm(modules, version="0.33.0", torch="2.9.0", attention=None, **platform):
    modules("torch", __version__=torch)
    modules("vllm", __version__=version)
    modules("vllm.platforms", current_platform=SimpleNamespace(**platform))
    return numerics("", "vllm", attention)


def test_sglang_tells_its_kernels(modules):
    found = sglang(modules, torch_on(), {"attention_backend": "fa3", "dtype": "bfloat16", "port": 1})
    assert found["engine"] == ["sglang", "0.5.23"] and found["torch"] == "2.9.0+cu128"
    assert found["device"] == ["cuda", "NVIDIA H100 80GB HBM3", "[9, 0]"]
    assert (found["attention"]["attention_backend"], found["attention"]["dtype"]) == ("fa3", "bfloat16")
    assert "port" not in found["attention"]


def test_engines_with_other_kernels_differ(modules):
    arguments = {"attention_backend": "fa3"}
    found = [
        sglang(modules, torch_on(), arguments),
        sglang(modules, torch_on(), arguments, version="0.5.24"),
        sglang(modules, torch_on(), {"attention_backend": "triton"}),
        sglang(modules, torch_on(), {"attention_backend": "fa3", "enable_deterministic_inference": True}),
        sglang(modules, torch_on(name="NVIDIA H20"), arguments),
        sglang(modules, torch_on(capability=(10, 0)), arguments),
        sglang(modules, torch_on("xpu"), arguments),
        sglang(modules, dict(torch_on(), __version__="2.9.1+cu128"), arguments),
    ]
    cuda = dict(
        device_type="cuda", get_device_name=lambda: "NVIDIA H100", get_device_capability=lambda: (9, 0)
    )
    found += [
        vllm(modules, **cuda),
        vllm(modules, version="0.34.0", **cuda),
        vllm(modules, torch="2.9.1", **cuda),
        vllm(modules, attention="FLASHINFER", **cuda),
        vllm(modules, **dict(cuda, get_device_name=lambda: "NVIDIA H20")),
        vllm(modules, **dict(cuda, get_device_capability=lambda: (10, 0))),
        vllm(modules, **dict(cuda, device_type="xpu")),
    ]
    assert all(first != second for at, first in enumerate(found) for second in found[:at])
    assert vllm(modules, **cuda) == vllm(modules, **cuda)


def test_processors_differ_by_their_instructions(modules):
    def on(instructions):
        cpu = SimpleNamespace(get_cpu_capability=lambda: instructions)
        modules(
            "torch",
            accelerator=SimpleNamespace(is_available=lambda: False),
            backends=SimpleNamespace(cpu=cpu),
        )
        return numerics("", "sglang")["device"]

    assert on("AVX2")[0] == "cpu" and on("AVX2")[2] == "AVX2"
    assert on("AVX2") != on("AVX512")


def test_declared_numerics_replace_all_others(modules):
    modules("vllm", __version__="0.33.0")
    assert numerics("ours", "vllm") == numerics("ours", "sglang") == {"declared": "ours"}
    assert numerics("others", "vllm") != numerics("ours", "vllm")


def test_engine_of_the_process_is_found(modules):
    assert numerics("", None)["engine"] is None
    modules("vllm", __version__="0.33.0")
    assert numerics("", None)["engine"] == ["vllm", "0.33.0"]
    # SGLang may load vLLM for its kernels.
    modules("sglang", __version__="0.5.23")
    assert numerics("", None)["engine"] == ["sglang", "0.5.23"]


def test_process_that_tells_nothing_is_no_error(modules):
    assert numerics("", "sglang")["attention"] is None

    def fails():
        raise RuntimeError("no driver")

    found = vllm(modules, device_type="cuda", get_device_name=fails, get_device_capability=fails)
    assert found["device"] == ["cuda", None, None]
