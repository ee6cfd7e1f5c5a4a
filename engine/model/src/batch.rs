//! What a forward pass computes together: chunks of sequences, and the rules they must keep.
//!
//! What must always hold: a batch is checked as a whole before anything is computed, so a [`ForwardError`] leaves every
//! page as it was. Only open pages are written, and of them only the slots of the chunk's own tokens.

use crate::config::ModelConfig;
use crate::kv::{self, PageSlot};
use larder_format::PageGeometry;
use thiserror::Error;

/// Some consecutive tokens of one sequence.
#[derive(Debug)]
pub struct Chunk<'a> {
    /// The tokens to compute; at least one.
    pub tokens: &'a [u32],
    /// Position of `tokens[0]` in its sequence. Keys and values of all earlier positions are in `pages` already.
    pub position: usize,
    /// The sequence's pages from its start; they cover at least `position + tokens.len()` tokens.
    pub pages: &'a mut [PageSlot],
    /// Which rows of logits are wanted.
    pub logits: LogitRows,
}

/// Which rows of logits are wanted of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None: the keys and values are what matters.
    None,
    /// That of the last token.
    Last,
    /// One for every token.
    All,
}

/// Told as the forward pass goes on.
pub trait LayerHooks {
    /// Keys and values of `layer` for all tokens of the batch are in their pages now.
    fn layer_done(&mut self, layer: usize, batch: &[Chunk<'_>]);
}

impl LayerHooks for () {
    fn layer_done(&mut self, _layer: usize, _batch: &[Chunk<'_>]) {}
}

/// Why a batch cannot be computed. The pages are unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ForwardError {
    /// A chunk without tokens.
    #[error("chunk {chunk} has no tokens")]
    Empty {
        /// Index in the batch.
        chunk: usize,
    },
    /// A token id that the model does not have.
    #[error("chunk {chunk}: token {token} is not in the vocabulary of {vocab}")]
    Token {
        /// Index in the batch.
        chunk: usize,
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// The sequence would be longer than the model's context.
    #[error("chunk {chunk} ends at position {end}, the context is {max_context} tokens")]
    Context {
        /// Index in the batch.
        chunk: usize,
        /// Position behind the last token.
        end: usize,
        /// The model's context.
        max_context: usize,
    },
    /// Too few pages for the tokens.
    #[error("chunk {chunk} needs {needed} pages, it has {found}")]
    Pages {
        /// Index in the batch.
        chunk: usize,
        /// Pages that cover the chunk.
        needed: usize,
        /// Pages given.
        found: usize,
    },
    /// A token would be written into a sealed page.
    #[error("chunk {chunk} would write into page {page}, which is sealed")]
    Sealed {
        /// Index in the batch.
        chunk: usize,
        /// Index of the page in its sequence.
        page: usize,
    },
    /// A page that is not of this model's shape, or not of its neighbours'.
    #[error("chunk {chunk}: page {page} does not have the model's shape, or differs from the pages before it")]
    Geometry {
        /// Index in the batch.
        chunk: usize,
        /// Index of the page in its sequence.
        page: usize,
    },
}

impl Chunk<'_> {
    /// Position behind the last token.
    pub fn end(&self) -> usize {
        self.position.saturating_add(self.tokens.len())
    }

    /// Shape of the chunk's pages. A checked chunk has at least one.
    pub(crate) fn geometry(&self) -> &PageGeometry {
        self.pages[0].page().geometry()
    }

    /// Rows of logits wanted.
    pub(crate) fn logit_rows(&self) -> std::ops::Range<usize> {
        let len = self.tokens.len();
        match self.logits {
            LogitRows::None => len..len,
            LogitRows::Last => len - 1..len,
            LogitRows::All => 0..len,
        }
    }

    fn check(&self, chunk: usize, config: &ModelConfig) -> Result<(), ForwardError> {
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
        if !fits(&geometry, config) {
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

fn fits(geometry: &PageGeometry, config: &ModelConfig) -> bool {
    geometry.validate().is_ok()
        && kv::is_computable(geometry)
        && geometry.layers as usize == config.layers
        && geometry.kv_heads as usize == config.kv_heads
        && geometry.head_dim as usize == config.head_dim
}

/// Checks the whole batch.
pub(crate) fn check(batch: &[Chunk<'_>], config: &ModelConfig) -> Result<(), ForwardError> {
    batch.iter().enumerate().try_for_each(|(index, chunk)| chunk.check(index, config))
}
