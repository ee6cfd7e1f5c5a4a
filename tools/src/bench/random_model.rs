//! Model folders with the geometry of a published model and random weights, for measurements.

use crate::bundled;
use crate::output::say;
use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use half::bf16;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

#[derive(Debug, Parser)]
pub struct Args {
    /// Sizes of the model: `qwen3-0.6b`, `llama-3.2-1b`, `llama-3.1-8b`, or `small` for tests
    geometry: Geometry,
    /// Folder to write
    #[arg(value_name = "DIRECTORY")]
    folder: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Geometry {
    /// 150,000 weights, for tests
    #[value(name = "small")]
    Small,
    #[value(name = "qwen3-0.6b")]
    Qwen3Size0_6B,
    #[value(name = "llama-3.2-1b")]
    Llama3_2Size1B,
    #[value(name = "llama-3.1-8b")]
    Llama3_1Size8B,
}

/// Elements that one thread generates and writes at a time.
const BLOCK: usize = 1 << 20;

pub fn run(args: &Args) -> Result<()> {
    let folder = &args.folder;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let config = config(args.geometry);
    // Its tokens have the first ids. The others have no text.
    bundled::copy_tokenizer(folder)?;
    let path = folder.join("config.json");
    std::fs::write(&path, serde_json::to_vec_pretty(&config)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    // A name of its own until it is complete: a stopped run leaves no model that looks whole.
    let [staged, path] = ["model.new", "model.safetensors"].map(|name| folder.join(name));
    let write = || -> Result<u64> {
        let bytes = write_weights(&staged, &tensors(&config))?;
        std::fs::rename(&staged, &path)?;
        Ok(bytes)
    };
    let bytes = write().with_context(|| format!("cannot write {}", path.display()))?;
    say!("{}: {:.2} GB", folder.display(), bytes as f64 / 1e9);
    Ok(())
}

fn config(geometry: Geometry) -> Value {
    match geometry {
        Geometry::Small => json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 4096,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
            "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false, "mlp_bias": false,
            "bos_token_id": 1, "eos_token_id": 2,
        }),
        Geometry::Qwen3Size0_6B => json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
            "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
            "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false,
            "use_sliding_window": false, "sliding_window": null, "bos_token_id": 1, "eos_token_id": 2,
        }),
        Geometry::Llama3_2Size1B => json!({
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
        }),
        Geometry::Llama3_1Size8B => json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": false, "hidden_act": "silu", "attention_bias": false, "mlp_bias": false,
            "bos_token_id": 1, "eos_token_id": 2,
        }),
    }
}

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
    if config["tie_word_embeddings"] == false {
        tensors.push(("lm_head.weight".to_owned(), vec![size("vocab_size"), hidden]));
    }
    tensors
}

/// A run of elements of one tensor.
struct Block {
    /// Position in the file.
    offset: u64,
    len: usize,
    is_norm: bool,
}

/// Writes a safetensors file: the length of the header, the header, the tensors. Returns its size.
fn write_weights(path: &Path, tensors: &[(String, Vec<usize>)]) -> Result<u64> {
    let mut header = Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] }));
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = File::create(path)?;
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0)?;
    file.write_all_at(&header, 8)?;
    let mut offset = 8 + header.len() as u64;
    let mut blocks = Vec::new();
    for (_, shape) in tensors {
        let count: usize = shape.iter().product();
        for first in (0..count).step_by(BLOCK) {
            let len = BLOCK.min(count - first);
            blocks.push(Block { offset, len, is_norm: shape.len() == 1 });
            offset += 2 * len as u64;
        }
    }
    // One thread would take minutes for a model of 16 GB.
    blocks.par_iter().enumerate().try_for_each(|(seed, block)| {
        // Norm weights are 1. Other weights have a standard deviation of 0.02, as those of a fresh
        // model have.
        let values = if block.is_norm { vec![bf16::ONE; block.len] } else { random(block.len, 1 + seed as u64) };
        file.write_all_at(bytemuck::cast_slice(&values), block.offset)
    })?;
    Ok(offset)
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
    (0..len).map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_model::{LoadOptions, Model, Tokenizer};

    #[test]
    fn engine_loads_the_folder_with_its_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("model");
        run(&Args { geometry: Geometry::Small, folder: folder.clone() }).unwrap();
        let model = Model::load_with(&folder, &LoadOptions::default(), &|_, _| {}).unwrap();
        assert_eq!((model.config().layers, model.config().hidden), (2, 32));
        Tokenizer::load(&folder).unwrap();
    }

    #[test]
    fn published_geometries_have_their_numbers_of_weights() {
        let count = |geometry| {
            let tensors = tensors(&config(geometry));
            tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>()
        };
        let geometries = [Geometry::Qwen3Size0_6B, Geometry::Llama3_2Size1B, Geometry::Llama3_1Size8B];
        assert_eq!(geometries.map(count), [596_049_920, 1_235_814_400, 8_030_261_248]);
    }

    #[test]
    fn weights_are_random_and_of_the_stated_deviation() {
        let (first, second) = (random(10_000, 1), random(10_000, 2));
        assert_ne!(first, second);
        let squares: f32 = first.iter().map(|value| value.to_f32().powi(2)).sum();
        assert!(((squares / 10_000.0).sqrt() - 0.02).abs() < 0.001);
    }
}
