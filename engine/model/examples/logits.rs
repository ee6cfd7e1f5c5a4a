//! Writes the logits of a model at every position of a prompt, for comparisons with other programs:
//! `cargo run --release -p larder-model --example logits -- FOLDER TOKENS OUT [bf16|f16|f32] [q8]
//! [narrow]`.
//!
//! `TOKENS` is a file of token numbers, separated by spaces. `OUT` becomes `[positions][vocab]` in
//! little-endian `f32`.

use larder_format::KvDtype;
use larder_model::{Activations, Chunk, KvPool, LoadOptions, LogitRows, Model, PageSlot, WeightFormat};
use std::path::Path;

const PAGE_TOKENS: u32 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, tokens, out, choices @ ..] = &arguments[..] else {
        return Err("usage: logits FOLDER TOKENS OUT [bf16|f16|f32] [q8] [narrow]".into());
    };
    let mut options = LoadOptions::default();
    for choice in choices {
        match choice.as_str() {
            "bf16" => options.kv_dtype = Some(KvDtype::Bf16),
            "f16" => options.kv_dtype = Some(KvDtype::F16),
            "f32" => options.kv_dtype = Some(KvDtype::F32),
            "q8" => options.weights = WeightFormat::Q8,
            "narrow" => options.activations = Activations::Narrow,
            _ => return Err(format!("{choice} is unknown; known are bf16, f16, f32, q8 and narrow").into()),
        }
    }
    let model = Model::load_with(Path::new(folder), &options, &|_, _| ())?;
    let text = std::fs::read_to_string(tokens)?;
    let tokens = text.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    let pool = KvPool::new(model.geometry(PAGE_TOKENS), tokens.len().div_ceil(PAGE_TOKENS as usize));
    let mut pages: Vec<PageSlot> = std::iter::from_fn(|| pool.allocate()).map(PageSlot::Open).collect();
    let chunk = Chunk { tokens: &tokens, position: 0, pages: &mut pages, logits: LogitRows::All };
    let logits = model.forward(&mut [chunk], &mut ())?.remove(0);
    let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
    std::fs::write(out, bytes)?;
    Ok(())
}
