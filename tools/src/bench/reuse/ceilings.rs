//! Bounds of a measurement: the work that a prompt needs, and the rates of the device that
//! `bench-gpu` has measured.

use anyhow::{Context, Result};
use larder_model::ModelConfig;
use serde_json::Value;
use std::path::Path;

/// Figures of `bench-gpu` (benches/src/gpu) that bound others here.
const TO_DEVICE: &str = "one copy, pinned to device";
const STORAGE: &str = "the same reads into host memory, CRC included";
const MATRICES: [&str; 2] = ["bf16 mma from registers", "product, "];

/// Work per token, from the model's sizes. `token_bytes` counts keys and values of all layers.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    pub token_bytes: f64,
    /// Additions and multiplications of the matrix products.
    products: f64,
    /// The same of attention, per pair of a token and one that it sees.
    attention: f64,
}

impl Work {
    pub fn of(folder: &Path) -> Result<Work> {
        let path = folder.join("config.json");
        let read = || -> Result<(ModelConfig, f64)> {
            let json: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
            let element_bytes = if json["torch_dtype"] == "float32" { 4.0 } else { 2.0 };
            Ok((ModelConfig::from_json(&json, &Value::Null)?, element_bytes))
        };
        let (config, element_bytes) = read().with_context(|| format!("cannot read {}", path.display()))?;
        let (hidden, queries, keys) = (config.hidden, config.query_width(), config.kv_width());
        let layer = hidden * (2 * queries + 2 * keys + 3 * config.intermediate);
        Ok(Work {
            token_bytes: element_bytes * (2 * keys * config.layers) as f64,
            products: 2.0 * (layer * config.layers) as f64,
            attention: 4.0 * (queries * config.layers) as f64,
        })
    }

    /// Additions and multiplications that the tokens from `first` on need, up to `end`. The output
    /// matrix is left out, because only the last token needs it.
    pub fn operations(self, first: usize, end: usize) -> f64 {
        let (first, end) = (first as f64, end as f64);
        let pairs = (end * (end + 1.0) - first * (first + 1.0)) / 2.0;
        self.products * (end - first) + self.attention * pairs
    }
}

/// Measured rates per second. Absent if their figure is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Ceilings {
    /// Bytes of a large copy from pinned memory.
    to_device: Option<f64>,
    /// Bytes of reads from storage.
    storage: Option<f64>,
    /// Operations of the fastest matrix product.
    matrix: Option<f64>,
}

/// Least time that the measured rates allow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    pub seconds: f64,
    pub name: &'static str,
}

impl Ceilings {
    /// Reads the figures that `bench-gpu --json` has written.
    pub fn read(path: &Path) -> Result<Ceilings> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut ceilings = Ceilings::default();
        for line in text.lines() {
            // The last line may be cut if the program was stopped.
            let Ok(figure) = serde_json::from_str::<Value>(line) else { continue };
            ceilings.add(&figure["name"], &figure["rate"]);
            ceilings.add(&figure["ceiling"]["name"], &figure["ceiling"]["rate"]);
        }
        Ok(ceilings)
    }

    fn add(&mut self, name: &Value, rate: &Value) {
        let (Some(name), Some(median)) = (name.as_str(), rate["median"].as_f64()) else { return };
        let (target, scale) = match rate["unit"].as_str() {
            Some("GB/s") if name == TO_DEVICE => (&mut self.to_device, 1e9),
            Some("GB/s") if name == STORAGE => (&mut self.storage, 1e9),
            Some("TFLOP/s") if MATRICES.iter().any(|start| name.starts_with(start)) => (&mut self.matrix, 1e12),
            _ => return,
        };
        *target = Some(target.unwrap_or(0.0).max(median * scale));
    }

    pub fn computed(self, operations: f64) -> Option<Bound> {
        Some(Bound { seconds: operations / self.matrix?, name: "matrix products" })
    }

    pub fn l2_hit(self, bytes: f64) -> Option<Bound> {
        Some(Bound { seconds: bytes / self.to_device?, name: "host to device" })
    }

    /// The slower one of reads and copies, which can overlap.
    pub fn l3_hit(self, bytes: f64) -> Option<Bound> {
        let read = Bound { seconds: bytes / self.storage?, name: "storage" };
        Some(self.l2_hit(bytes).filter(|copied| copied.seconds > read.seconds).unwrap_or(read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn work_follows_from_the_sizes_of_the_model() {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14_336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
            "max_position_embeddings": 131_072, "torch_dtype": "bfloat16",
        });
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let work = Work::of(folder.path()).unwrap();
        assert_eq!(work.token_bytes, 131_072.0);
        // Llama-3.1-8B has 6.98 billion weights in its layers.
        assert_eq!(work.operations(0, 1), 2.0 * 6_979_321_856.0 + 4.0 * 4096.0 * 32.0);
        let whole = work.operations(0, 1000);
        assert!((work.operations(0, 300) + work.operations(300, 1000) - whole).abs() < whole * 1e-9);
    }

    #[test]
    fn bounds_come_from_the_fastest_measured_rates() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("figures.jsonl");
        let rate = |unit: &str, median: f64| json!({"unit": unit, "median": median});
        let lines = [
            json!({"device": "a GPU"}),
            json!({"name": TO_DEVICE, "rate": rate("GB/s", 50.0), "ceiling": null}),
            json!({"name": "bf16 mma from registers", "rate": rate("TFLOP/s", 600.0)}),
            json!({"name": "product, 2048 × 1 × 1", "rate": rate("TFLOP/s", 700.0)}),
            json!({"name": "product, 8 × 1 × 1", "rate": rate("GB/s", 900.0)}),
            json!({"name": "s", "rate": rate("GB/s", 9.0), "ceiling": {"name": STORAGE, "rate": rate("GB/s", 5.0)}}),
        ];
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, text + "{\"name\": \"cut").unwrap();
        let ceilings = Ceilings::read(&path).unwrap();
        assert_eq!(ceilings, Ceilings { to_device: Some(50e9), storage: Some(5e9), matrix: Some(700e12) });
        assert_eq!(ceilings.computed(7e12), Some(Bound { seconds: 0.01, name: "matrix products" }));
        assert_eq!(ceilings.l2_hit(1e9), Some(Bound { seconds: 0.02, name: "host to device" }));
        assert_eq!(ceilings.l3_hit(1e9), Some(Bound { seconds: 0.2, name: "storage" }));
        let slow_copies = Ceilings { to_device: Some(1e9), ..ceilings };
        assert_eq!(slow_copies.l3_hit(1e9), Some(Bound { seconds: 1.0, name: "host to device" }));
        assert_eq!(Ceilings::default().computed(1.0), None);
    }
}
