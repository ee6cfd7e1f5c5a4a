//! Fingerprint of the rounding of this build on this machine.
//!
//! Two engines may share pages only if they compute the same bits. The weights do not ensure that:
//! another build, instruction set or device may add in another order. So each engine computes a
//! fixed input with its own forward pass and hashes the keys and values.
//!
//! Invariant: the fingerprint depends on nothing but the model, the page size and the rounding. The
//! forward pass is batch-invariant, so thread count and load do not change it.

use crate::batch::{Chunk, ForwardError, LogitRows};
use crate::kv::{KvPool, PageSlot};
use crate::model::Model;
use sha2::{Digest, Sha256};

/// Revision of the kernels' arithmetic. Raise it with each change that alters the bits of keys or
/// values on some machine. The test of the fingerprint sees such changes.
const KERNEL_REVISION: u32 = 1;
/// Number of tokens that the probe computes. Few, because their cost is that of reading all weights
/// once.
const PROBE_TOKENS: usize = 8;
/// Maximum context of the probe in tokens. The tokens before the computed ones have synthetic keys
/// and values, so that the attention over a long context counts too.
const PROBE_CONTEXT: usize = 300;

/// Computes the fingerprint: 16 hexadecimal digits. Costs a forward pass over 8 tokens, and memory
/// for the pages of 300 tokens meanwhile.
///
/// # Errors
/// If the model cannot compute on pages of `page_tokens` tokens.
pub fn measure(model: &Model, page_tokens: u32) -> Result<String, ForwardError> {
    let config = model.config();
    let context = config.max_context.min(PROBE_CONTEXT);
    let count = PROBE_TOKENS.min(context);
    let tokens: Vec<u32> = (1..=count).map(|i| (i * 7919 % config.vocab) as u32).collect();
    let page_count = context.div_ceil(page_tokens.max(1) as usize);
    let pool = KvPool::new(model.geometry(page_tokens), page_count);
    let mut pages: Vec<PageSlot> = std::iter::from_fn(|| pool.allocate()).map(PageSlot::Open).collect();
    let mut state = 1u64;
    for slot in &mut pages {
        let PageSlot::Open(page) = slot else { continue };
        page.fill_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // 24 bits are exact in f32, so the input is the same everywhere: −1 to 1.
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        });
    }
    let chunk = Chunk { tokens: &tokens, position: context - count, pages: &mut pages, logits: LogitRows::None };
    model.forward(&mut [chunk], &mut ())?;
    let mut hash = Sha256::new();
    hash.update(b"larder-numerics-probe-1");
    pages.iter().for_each(|slot| hash.update(slot.page()));
    let digest: [u8; 32] = hash.finalize().into();
    Ok(digest[..8].iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Combines the fingerprint of the weights with the name of the numerics and the revision of the
/// kernels. Namespaces contain the result, so engines with other numerics share no pages.
///
/// A declared name states that engines of one revision compute the same bits. It states nothing
/// about later versions: who declared it could not know their kernels.
pub fn bind(weights: [u8; 32], numerics: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"larder-numerics");
    hash.update(KERNEL_REVISION.to_le_bytes());
    hash.update(weights);
    hash.update(numerics);
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn fingerprint_is_reproducible_and_sees_other_results() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
        let mut model = Model::load(&folder).unwrap();
        let first = measure(&model, 16).unwrap();
        assert_eq!((measure(&model, 16).unwrap(), first.len()), (first.clone(), 16));
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(one_thread.install(|| measure(&model, 16)).unwrap(), first);
        // The least change of the arithmetic: one bit of one rotation frequency.
        model.frequencies[0] = model.frequencies[0].next_down();
        assert_ne!(measure(&model, 16).unwrap(), first);
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn revision_stands_for_the_bits_of_the_kernels() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
        let measured = measure(&Model::load(&folder).unwrap(), 16).unwrap();
        // All instruction sets give the same bits. If these are others, raise the revision.
        assert_eq!((KERNEL_REVISION, &*measured), (1, "db5d44d283212084"));
    }

    #[test]
    fn bound_fingerprints_differ_by_weights_and_by_numerics() {
        let base = bind([1; 32], "a");
        assert_eq!(bind([1; 32], "a"), base);
        assert_ne!(bind([1; 32], "b"), base);
        assert_ne!(bind([2; 32], "a"), base);
    }
}
