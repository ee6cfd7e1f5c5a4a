//! Writes a model folder with the geometry of a published model and random bf16 weights, for
//! measurements: `cargo run --release -p larder-model --example random_model -- GEOMETRY FOLDER`.
//!
//! The tokenizer is that of the small model in this repository. It has fewer tokens than the
//! vocabulary, so the text of a generated token is usually empty.

use half::bf16;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

const GEOMETRIES: [&str; 2] = ["qwen3-0.6b", "llama-3.2-1b"];
/// Elements that are generated at a time.
const BLOCK: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [geometry, folder] = &arguments[..] else {
        return Err(format!("usage: random_model GEOMETRY FOLDER, where GEOMETRY is one of {GEOMETRIES:?}").into());
    };
    let Some(config) = config(geometry) else {
        return Err(format!("{geometry} is unknown; known are {GEOMETRIES:?}").into());
    };
    let folder = Path::new(folder);
    std::fs::create_dir_all(folder)?;
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(tiny.join(file), folder.join(file))?;
    }
    std::fs::write(folder.join("config.json"), serde_json::to_vec_pretty(&config)?)?;
    write_weights(&folder.join("model.safetensors"), &tensors(&config))?;
    Ok(())
}

fn config(geometry: &str) -> Option<Value> {
    match geometry {
        "qwen3-0.6b" => Some(json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
            "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
            "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false,
            "use_sliding_window": false, "sliding_window": null, "bos_token_id": 1, "eos_token_id": 2,
        })),
        "llama-3.2-1b" => Some(json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256,
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false, "mlp_bias": false,
            "bos_token_id": 1, "eos_token_id": 2,
        })),
        _ => None,
    }
}

/// Names and shapes of all tensors.
fn tensors(config: &Value) -> Vec<(String, Vec<usize>)> {
    let size = |name: &str| config[name].as_u64().unwrap_or(0) as usize;
    let (hidden, intermediate) = (size("hidden_size"), size("intermediate_size"));
    let queries = size("num_attention_heads") * size("head_dim");
    let keys = size("num_key_value_heads") * size("head_dim");
    let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![size("vocab_size"), hidden])];
    for layer in 0..size("num_hidden_layers") {
        let mut add = |name: &str, shape: &[usize]| {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
        add("self_attn.q_proj", &[queries, hidden]);
        add("self_attn.k_proj", &[keys, hidden]);
        add("self_attn.v_proj", &[keys, hidden]);
        add("self_attn.o_proj", &[hidden, queries]);
        add("mlp.gate_proj", &[intermediate, hidden]);
        add("mlp.up_proj", &[intermediate, hidden]);
        add("mlp.down_proj", &[hidden, intermediate]);
        if config["model_type"] == "qwen3" {
            add("self_attn.q_norm", &[size("head_dim")]);
            add("self_attn.k_norm", &[size("head_dim")]);
        }
    }
    tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
    tensors
}

/// Writes a safetensors file: the length of the header, the header, the tensors.
fn write_weights(file: &Path, tensors: &[(String, Vec<usize>)]) -> Result<(), Box<dyn std::error::Error>> {
    let mut header = Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] }));
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut out = BufWriter::new(File::create(file)?);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    let mut seed = 0;
    for (_, shape) in tensors {
        let count: usize = shape.iter().product();
        for first in (0..count).step_by(BLOCK) {
            seed += 1;
            let len = BLOCK.min(count - first);
            // Norm weights are 1. Other weights have a standard deviation of 0.02, as a fresh model
            // has.
            let values = if shape.len() == 1 { vec![bf16::ONE; len] } else { random(len, seed) };
            out.write_all(bytemuck::cast_slice(&values))?;
        }
    }
    Ok(out.flush()?)
}

/// Sums of four uniform numbers, nearly normal, with a standard deviation of 0.02.
fn random(len: usize, seed: u64) -> Vec<bf16> {
    let value = |index: usize| {
        let mut bits = (seed << 32 | index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        bits = (bits ^ bits >> 31).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits ^= bits >> 27;
        let sum: f32 = (0..4).map(|n| (bits >> (16 * n) & 0xFFFF) as f32 / 65_536.0 - 0.5).sum();
        bf16::from_f32(sum * 0.02 * 3f32.sqrt())
    };
    (0..len).into_par_iter().map(value).collect()
}
