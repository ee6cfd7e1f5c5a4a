//! Pins: pages that stay in L2.

use super::durations::milliseconds;
use crate::client::Client;
use larder_format::PageKey;
use larder_wire::{MAX_KEYS, Request, Response};
use std::time::{Duration, Instant};

pub use larder_wire::PinKind;

/// Result of [`Client::pin`]. The operation may succeed at some nodes and fail at others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pinned {
    /// Pages that are pinned now, or whose pins have ended.
    pub pages: usize,
    /// First reason of a node to refuse, in its words. That node has pinned none of the pages.
    pub refused: Option<String>,
    /// `true` if every node that the operation needs has answered.
    pub complete: bool,
}

impl Pinned {
    fn add(&mut self, answer: Option<Response>) {
        match answer {
            Some(Response::Count(count)) => self.pages += count as usize,
            Some(Response::Error { message, .. }) => {
                self.refused.get_or_insert(message);
            }
            Some(Response::Busy { .. }) => {
                self.refused.get_or_insert_with(|| "the node is busy; try again".into());
            }
            _ => self.complete = false,
        }
    }
}

impl Client {
    /// Pins pages in L2 for `ttl`, from a millisecond to 30 days. Nodes first bring them from L3.
    ///
    /// [`PinKind::None`] ends the pins at every node of the URL, and ignores `ttl`. A node refuses
    /// all pages of a request together if the pins would exceed its limit.
    pub async fn pin(&self, keys: &[PageKey], kind: PinKind, ttl: Duration, deadline: Instant) -> Pinned {
        let ttl_ms = if kind == PinKind::None { 0 } else { milliseconds(ttl) };
        let request = |keys| Request::Pin { keys, kind, ttl_ms };
        let mut pinned = Pinned { complete: true, ..Pinned::default() };
        if kind == PinKind::None {
            // At all nodes: a key may have had another owner when it was pinned.
            for batch in keys.chunks(MAX_KEYS) {
                for answer in self.request_all(&request(batch.to_vec()), deadline).await {
                    pinned.add(answer);
                }
            }
            // Several nodes may have had the same page.
            pinned.pages = pinned.pages.min(keys.len());
            return pinned;
        }
        let mut routed = 0;
        for (indices, answer) in self.request_owners(keys, deadline, request).await {
            routed += indices.len();
            pinned.add(answer);
        }
        pinned.complete &= routed == keys.len();
        pinned
    }
}
