//! Fingerprint of the rounding of this build on this machine.
//!
//! Two engines may share pages only if they compute the same bits. The weights do not ensure that:
//! another build, instruction set or device may add in another order. So each engine computes a
//! fixed input with its own forward pass. It hashes the keys and values, and the logits. Keys and
//! values are rounded to the type of KV, so a difference in the last bit of an `f32` shows only in
//! the logits.
//!
//! Invariant: the fingerprint depends on nothing but the model, the page size and the rounding. The
//! forward pass is batch-invariant, so thread count and load do not change it.

use crate::batch::{Chunk, ForwardError, LogitRows};
use crate::kv::{KvPool, PageSlot, SealedPage};
use crate::model::Model;
use larder_kernels::cpu::ATTENTION_SPAN;
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Revision of the kernels' arithmetic. Raise it with each change that alters the bits of keys or
/// values on some machine. The test of the fingerprint sees such changes.
const KERNEL_REVISION: u32 = 1;
/// Number of tokens that the probe computes. Few, because their cost is that of reading all weights
/// once.
const PROBE_TOKENS: usize = 8;
/// Maximum context of the probe in tokens: two spans of the attention and the start of a third, so
/// that merging spans counts. The tokens before the computed ones have synthetic keys and values.
const PROBE_CONTEXT: usize = 2 * ATTENTION_SPAN + 60;
/// Synthetic pages, each of which stands for a run of pages. Different runs give the spans
/// different largest scores. Few pages, because a page may take 16 MiB.
const PROBE_PAGES: usize = 8;

/// Computes the fingerprint: 16 hexadecimal digits. Costs a forward pass over 8 tokens with their
/// logits, and memory for 8 pages and those of 8 tokens meanwhile.
///
/// # Errors
/// If the model cannot compute on pages of `page_tokens` tokens.
pub fn measure(model: &Model, page_tokens: u32) -> Result<String, ForwardError> {
    let config = model.config();
    let context = config.max_context.min(PROBE_CONTEXT);
    let count = PROBE_TOKENS.min(context);
    let tokens: Vec<u32> = (1..=count).map(|i| (i * 7919 % config.vocab) as u32).collect();
    let position = context - count;
    let mut pages = probe_pages(model, page_tokens, position, context);
    let chunk = Chunk { tokens: &tokens, position, pages: &mut pages, logits: LogitRows::All };
    let logits = model.forward(&mut [chunk], &mut ())?;
    let mut hash = Sha256::new();
    hash.update(b"larder-numerics-probe-2");
    hash.update(model.kernels());
    pages.iter().filter(|slot| matches!(slot, PageSlot::Open(_))).for_each(|slot| hash.update(slot.page()));
    logits.iter().for_each(|rows| hash.update(bytemuck::cast_slice::<f32, u8>(rows)));
    let digest: [u8; 32] = hash.finalize().into();
    Ok(digest[..8].iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Makes the pages of the probe. Those that it writes, from `position` to `context`, are open. The
/// others are few pages that repeat.
fn probe_pages(model: &Model, page_tokens: u32, position: usize, context: usize) -> Vec<PageSlot> {
    let per_page = page_tokens.max(1) as usize;
    let read_only = position / per_page;
    let open = context.div_ceil(per_page) - read_only;
    let distinct = read_only.min(PROBE_PAGES);
    let pool = KvPool::new(model.geometry(page_tokens), distinct + open);
    let mut state = 1u64;
    let mut filled = std::iter::from_fn(|| {
        let mut page = pool.allocate()?;
        page.fill_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // 24 bits are exact in f32, so the input is the same everywhere: −1 to 1.
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        });
        Some(page)
    });
    let sealed = filled.by_ref().take(distinct).map(|page| Arc::new(SealedPage::compute(page)));
    let sealed: Vec<Arc<SealedPage>> = sealed.collect();
    // Without memory for all of them, the pass refuses the chunk: its pages are too few.
    let shared = (0..read_only).filter_map(|index| sealed.get(index * distinct / read_only).cloned());
    let shared = shared.map(PageSlot::Sealed);
    shared.chain(filled.map(PageSlot::Open)).collect()
}

/// Combines the fingerprint of the weights with the name of the numerics and the revision of the
/// kernels. `kernels` is [`Model::kernels`]. Namespaces contain the result, so engines with other
/// numerics share no pages.
///
/// A declared name states that engines of one revision compute the same bits. It states nothing
/// about later versions: who declared it could not know their kernels.
pub fn bind(weights: [u8; 32], kernels: &str, numerics: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"larder-numerics");
    hash.update(KERNEL_REVISION.to_le_bytes());
    hash.update(weights);
    if !kernels.is_empty() {
        hash.update(kernels);
        // No name of numerics contains it.
        hash.update([0]);
    }
    hash.update(numerics);
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Activations, LoadOptions, WeightFormat};
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
    fn fingerprint_sees_the_last_bit_of_numbers_that_pages_do_not_hold() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
        let mut model = Model::load(&folder).unwrap();
        let first = measure(&model, 16).unwrap();
        model.weights.norm[0] = model.weights.norm[0].next_up();
        assert_ne!(measure(&model, 16).unwrap(), first);
    }

    #[test]
    fn probe_covers_three_spans_with_the_memory_of_few_pages() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
        let model = Model::load(&folder).unwrap();
        for page_tokens in [1, 16, 100, 4096] {
            let pages = probe_pages(&model, page_tokens, PROBE_CONTEXT - PROBE_TOKENS, PROBE_CONTEXT);
            assert_eq!(pages.len(), PROBE_CONTEXT.div_ceil(page_tokens as usize));
            let mut buffers: Vec<_> = pages.iter().map(|slot| slot.page().as_ref().as_ptr()).collect();
            buffers.sort_unstable();
            buffers.dedup();
            assert!(buffers.len() <= PROBE_PAGES + PROBE_TOKENS, "{page_tokens}: {}", buffers.len());
            let first_open = pages.iter().position(|slot| matches!(slot, PageSlot::Open(_))).unwrap();
            assert_eq!(first_open, (PROBE_CONTEXT - PROBE_TOKENS) / page_tokens as usize);
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn revision_stands_for_the_bits_of_the_kernels() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
        let measured = measure(&Model::load(&folder).unwrap(), 16).unwrap();
        // All instruction sets give the same bits. If these are others, raise the revision.
        assert_eq!((KERNEL_REVISION, &*measured), (1, "58d74badd8b900b4"));
    }

    /// The bits of 8-bit activations have a definition, so the revision stands for them, too. Those
    /// of bf16 are the processor's.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn revision_stands_for_the_bits_of_narrow_activations() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/larder-tiny");
        let load = |weights, activations| {
            let options = LoadOptions { weights, activations, ..LoadOptions::default() };
            Model::load_with(&folder, &options, &|_, _| ()).unwrap()
        };
        for weights in [WeightFormat::Stored, WeightFormat::Q8] {
            let [wide, narrow] = [Activations::F32, Activations::Narrow].map(|activations| load(weights, activations));
            assert_eq!(wide.kernels() == narrow.kernels(), narrow.activations() == "f32");
            if narrow.activations() == "int8" {
                assert_eq!((KERNEL_REVISION, &*measure(&narrow, 16).unwrap()), (1, "dce2550442a5a8a5"));
            }
        }
    }

    #[test]
    fn bound_fingerprints_differ_by_weights_kernels_and_numerics() {
        let base = bind([1; 32], "", "a");
        assert_eq!(bind([1; 32], "", "a"), base);
        assert_ne!(bind([1; 32], "", "b"), base);
        assert_ne!(bind([2; 32], "", "a"), base);
        assert_ne!(bind([1; 32], "cuda 1", "a"), base);
        assert_ne!(bind([1; 32], "cuda 1", "a"), bind([1; 32], "cuda 2", "a"));
    }
}
