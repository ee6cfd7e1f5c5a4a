//! Input of a forward pass: chunks of sequences, and their validation.
//!
//! Invariants:
//! - The whole batch is validated before any computation. A [`ForwardError`] leaves every page
//!   unchanged.
//! - The forward pass writes only to open pages, and there only to the slots of the chunk's own
//!   tokens.

use crate::kv::PageSlot;
use crate::model::Model;
use larder_format::PageGeometry;
use larder_kernels::device::DeviceError;
use thiserror::Error;

#[derive(Debug)]
pub struct Chunk<'a> {
    pub tokens: &'a [u32],
    /// Position of `tokens[0]` in its sequence. `pages` already holds the keys and values of all
    /// earlier positions.
    pub position: usize,
    /// The sequence's pages from position 0. They cover at least `position + tokens.len()` tokens.
    pub pages: &'a mut [PageSlot],
    pub logits: LogitRows,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// No row: the caller needs only the keys and values.
    None,
    Last,
    All,
}

/// Observer of a forward pass. The engine uses it to publish a layer's pages while later layers are
/// computed.
pub trait LayerHooks: Send {
    /// Called when the keys and values of `layer` are in their pages, for all tokens of the batch.
    fn layer_done(&mut self, layer: usize, batch: &[Chunk<'_>]);
}

impl LayerHooks for () {
    fn layer_done(&mut self, _layer: usize, _batch: &[Chunk<'_>]) {}
}

/// Reasons for which a pass fails. `chunk` is an index into the batch. No page has changed, except
/// after [`Device`](Self::Device) and [`Damaged`](Self::Damaged).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ForwardError {
    #[error("chunk {chunk} has no tokens")]
    Empty { chunk: usize },
    #[error("chunk {chunk}: token {token} is outside the vocabulary of {vocab} tokens")]
    Token { chunk: usize, token: u32, vocab: usize },
    #[error("chunk {chunk} ends at position {end}, beyond the model's context of {max_context} tokens")]
    Context { chunk: usize, end: usize, max_context: usize },
    #[error("chunk {chunk} needs {needed} pages, but has {found}")]
    Pages { chunk: usize, needed: usize, found: usize },
    #[error("chunk {chunk} would write into page {page}, which is sealed")]
    Sealed { chunk: usize, page: usize },
    /// A page has another shape than the model requires, or than the earlier pages of its sequence.
    /// On a device, all pages of a batch have one shape.
    #[error("chunk {chunk}: page {page} has another shape than the model requires, or than the pages before it")]
    Geometry { chunk: usize, page: usize },
    /// The device has read other bytes of a page than its checksums say. The page is not to be used
    /// again. Pages to write may have keys and values of some layers, and hooks may have seen them;
    /// these are those that a repeated pass computes.
    #[error("chunk {chunk}: the bytes of page {page} do not match their checksums on the device")]
    Damaged { chunk: usize, page: usize },
    /// The device has failed, or its memory has no room. The pages to write are partly written.
    #[error("the device of the model failed: {0}")]
    Device(#[from] DeviceError),
}

impl Chunk<'_> {
    /// Position after the last token. Saturates, so that a hostile position fails the context check
    /// instead of wrapping.
    pub fn end(&self) -> usize {
        self.position.saturating_add(self.tokens.len())
    }

    /// Shape of the chunk's pages. Call it only on a validated chunk, which has at least one page.
    pub(crate) fn geometry(&self) -> &PageGeometry {
        self.pages[0].page().geometry()
    }

    pub(crate) fn logit_rows(&self) -> std::ops::Range<usize> {
        let len = self.tokens.len();
        match self.logits {
            LogitRows::None => len..len,
            LogitRows::Last => len - 1..len,
            LogitRows::All => 0..len,
        }
    }

    fn check(&self, chunk: usize, model: &Model) -> Result<(), ForwardError> {
        let config = &model.config;
        if self.tokens.is_empty() {
            return Err(ForwardError::Empty { chunk });
        }
        if let Some(&token) = self.tokens.iter().find(|&&t| t as usize >= config.vocab) {
            return Err(ForwardError::Token { chunk, token, vocab: config.vocab });
        }
        let end = self.end();
        if end > config.max_context {
            return Err(ForwardError::Context { chunk, end, max_context: config.max_context });
        }
        let found = self.pages.len();
        let Some(first) = self.pages.first() else {
            return Err(ForwardError::Pages { chunk, needed: 1, found });
        };
        let geometry = *first.page().geometry();
        if geometry.validate().is_err() || geometry != model.geometry(geometry.page_tokens) {
            return Err(ForwardError::Geometry { chunk, page: 0 });
        }
        let page_tokens = geometry.page_tokens as usize;
        let needed = end.div_ceil(page_tokens);
        if needed > found {
            return Err(ForwardError::Pages { chunk, needed, found });
        }
        if let Some(page) = self.pages[..needed].iter().position(|slot| *slot.page().geometry() != geometry) {
            return Err(ForwardError::Geometry { chunk, page });
        }
        let first_written = self.position / page_tokens;
        match self.pages[first_written..needed].iter().position(|slot| matches!(slot, PageSlot::Sealed(_))) {
            Some(index) => Err(ForwardError::Sealed { chunk, page: first_written + index }),
            None => Ok(()),
        }
    }
}

/// Validates the whole batch before anything is computed, so that an error leaves every page
/// unchanged. Returns the error of the first invalid chunk.
pub(crate) fn check(batch: &[Chunk<'_>], model: &Model) -> Result<(), ForwardError> {
    batch.iter().enumerate().try_for_each(|(index, chunk)| chunk.check(index, model))
}
