"""The identity of a vLLM engine's model has everything that changes the bytes of its KV."""

import os
import sys
import types

import pytest
import vllm_contract as contract
from vllm_contract import HfConfig

contract.install()

from larder_kv._vllm_model import engine_config, model_of  # noqa: E402

COMMIT = "0123456789abcdef" * 2 + "01234567"


def names(weights="", load_format="auto", **model):
    return model_of(contract.engine_config(load_format, **model), weights)


def override(config):
    return config


def test_engines_with_other_settings_differ():
    found = [
        names(weights="3"),
        names(weights="4"),
        names(),
        names(hf_config=HfConfig(COMMIT)),
        names(hf_config=HfConfig("0" * 40, rope_theta=1e6)),
        names(hf_config=HfConfig("0" * 40, rope_parameters={"rope_type": "longrope"})),
        names(hf_config=HfConfig("0" * 40, rope_parameters={"rope_type": "longrope"}), max_model_len=8192),
        names(dtype="torch.float16"),
        names(quantization="awq"),
        names(quantization="fp8", quantization_config={"ignore": ["lm_head"]}),
        names(hf_overrides={"num_experts": 4}),
        names(hf_overrides=override),
        names(model_impl="transformers"),
        names(model_class_overrides={"A": "b:C"}),
        names(code_revision="x"),
        names(disable_sliding_window=True),
        names(load_format="dummy"),
    ]
    assert all(first != second for at, first in enumerate(found) for second in found[:at])


def test_settings_count_also_with_weights_of_the_operator():
    assert names("3") == names("3", revision="other") == names("3", hf_config=HfConfig(None))
    assert names("3") != names("3", quantization="awq")
    # The bytes of a model without longrope do not depend on the length of the context.
    assert names() == names(max_model_len=8192)


def test_commit_tells_the_weights_of_a_repository():
    assert names(hf_config=HfConfig(COMMIT))["weights"] == ["commit", COMMIT]
    assert names(hf_config=HfConfig(None), revision=COMMIT)["weights"] == ["commit", COMMIT]
    # The commit of the configuration's repository is not that of the weights.
    elsewhere = {"hf_config": HfConfig("1" * 40), "hf_config_path": "other/model"}
    assert names(revision=COMMIT, **elsewhere)["weights"] == ["commit", COMMIT]
    for unknown in (
        {"hf_config": HfConfig(None)},
        {"hf_config": HfConfig(None), "revision": "main"},
        elsewhere,
        {"model_weights": "s3://bucket/model"},
    ):
        with pytest.raises(ValueError, match="set weights"):
            names(**unknown)
        assert names("3", **unknown)["weights"] == "3"


def test_commit_is_found_in_the_cache_of_hugging_face(monkeypatch):
    def load(repository, name, revision=None):
        return f"/cache/snapshots/{COMMIT}/{name}" if (repository, revision) == ("model", "main") else None

    hub = types.ModuleType("huggingface_hub")
    hub.try_to_load_from_cache = load
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert names(hf_config=HfConfig(None), revision="main")["weights"] == ["commit", COMMIT]
    with pytest.raises(ValueError, match="set weights"):
        names(hf_config=HfConfig(None), revision="other")


def test_files_tell_the_weights_of_a_directory(tmp_path):
    def found():
        return names(model=str(tmp_path), hf_config=HfConfig(None))["weights"]

    empty = found()
    weights = tmp_path / "model-00001-of-00001.safetensors"
    weights.write_bytes(b"first")
    first = found()
    assert first != empty and first == found()
    (tmp_path / "tokenizer.json").write_bytes(b"no weights")
    assert found() == first
    os.utime(weights, ns=(1, 1))
    second = found()
    os.utime(weights, ns=(1, 2))
    assert len({tuple(each) for each in (empty, first, second, found())}) == 4


def test_files_of_a_cache_are_known_by_their_digest(tmp_path):
    def cached(name, digest):
        blob, link = tmp_path / name / "blobs" / digest, tmp_path / name / "snapshots" / COMMIT / "model.safetensors"
        blob.parent.mkdir(parents=True)
        link.parent.mkdir(parents=True)
        blob.write_bytes(b"weights")
        os.utime(blob, ns=(len(name), len(name)))
        link.symlink_to(blob)
        return names(model=str(link.parent), hf_config=HfConfig(None))["weights"]

    assert cached("a", "1" * 64) == cached("other machine", "1" * 64) != cached("other weights", "2" * 64)


def test_tier_finds_the_configuration_of_its_engine():
    def build(vllm_config):
        return engine_config()

    config = contract.engine_config()
    assert build(config) is config
    assert build(None) is None and engine_config() is None
    assert model_of(None, "3") == {"weights": "3"}
    with pytest.raises(ValueError, match="set weights"):
        model_of(None, "")
