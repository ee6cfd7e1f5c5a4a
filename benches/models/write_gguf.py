"""Writes a Hugging Face folder of Qwen3 as GGUF for llama.cpp: `write_gguf.py FOLDER OUT bf16|q8`."""

import json
import mmap
import sys
from pathlib import Path

import gguf
import numpy as np

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    parts = name.removesuffix(".weight").removeprefix("model.").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{LAYER_NAMES['.'.join(parts[2:])]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[0]] + ".weight"


def tensors(path):
    """Names, shapes and bf16 bits of all tensors."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        first, end = entry["data_offsets"]
        yield name, np.frombuffer(data, "<u2", (end - first) // 2, start + first).reshape(entry["shape"])


def main():
    folder, out, form = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((folder / "config.json").read_text())
    # Other architectures order the rows of some matrices differently in GGUF.
    assert config["model_type"] == "qwen3", f"{config['model_type']} is not supported"
    writer = gguf.GGUFWriter(out, config["model_type"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, bits in tensors(folder / "model.safetensors"):
        floats = (bits.astype(np.uint32) << 16).view(np.float32)
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), floats)
        elif form == "q8":
            writer.add_tensor(gguf_name(name), gguf.quantize(floats, q8), raw_dtype=q8)
        else:
            writer.add_tensor(gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
