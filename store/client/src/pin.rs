//! What pinning came to.

use larder_wire::Response;
use std::time::Duration;

pub use larder_wire::PinKind;

/// What pinning pages, or ending their pins, came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pinned {
    /// Pages that are pinned now, or whose pins ended.
    pub pages: usize,
    /// Why a node refused, in its words: nothing that it has is pinned that was not before.
    pub refused: Option<String>,
    /// Whether every node that was to be asked answered.
    pub complete: bool,
}

impl Pinned {
    /// Adds what one node answered.
    pub(crate) fn add(&mut self, answer: Option<Response>) {
        match answer {
            Some(Response::Count(count)) => self.pages += count as usize,
            Some(Response::Error { message, .. }) => {
                self.refused.get_or_insert(message);
            }
            Some(Response::Busy { .. }) => {
                self.refused.get_or_insert_with(|| "the node has too much under way".into());
            }
            _ => self.complete = false,
        }
    }
}

/// Whole milliseconds, rounded up: what is not zero does not become it.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
