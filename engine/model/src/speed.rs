//! Measurement of the speed of the forward pass, for estimates before the first prompt.

use crate::batch::{Chunk, ForwardError, LogitRows};
use crate::kv::{KvPool, PageSlot};
use crate::model::Model;
use std::time::Instant;

/// Tokens of the measured pass. A real chunk has more, and costs less per token.
const PROBE_TOKENS: usize = 64;

/// Measures the prompt tokens per second of this machine, with one pass over 64 tokens. The result
/// is a lower bound: longer chunks are faster.
///
/// # Errors
/// If the model cannot compute on pages of `page_tokens` tokens.
pub fn tokens_per_second(model: &Model, page_tokens: u32) -> Result<f64, ForwardError> {
    let count = model.config().max_context.min(PROBE_TOKENS);
    let tokens = vec![1; count];
    let pool = KvPool::new(model.geometry(page_tokens), count.div_ceil(page_tokens.max(1) as usize));
    let mut pages: Vec<PageSlot> = std::iter::from_fn(|| pool.allocate()).map(PageSlot::Open).collect();
    let begin = Instant::now();
    let chunk = Chunk { tokens: &tokens, position: 0, pages: &mut pages, logits: LogitRows::None };
    model.forward(&mut [chunk], &mut ())?;
    Ok(count as f64 / begin.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn speed_is_a_positive_number() {
        let model = Model::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny")).unwrap();
        let speed = tokens_per_second(&model, 16).unwrap();
        assert!(speed > 0.0 && speed.is_finite());
    }
}
