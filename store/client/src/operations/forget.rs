//! Deletion of pages, and their transfer from L3 to L2.

use crate::client::Client;
use larder_format::PageKey;
use larder_runtime::fail_point;
use larder_wire::{MAX_KEYS, Request, Response};
use std::time::Instant;

/// Result of [`Client::forget`]. The deletion is durable on every node that has answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forgotten {
    /// Pages that existed, at most the number of keys.
    pub pages: usize,
    /// `true` if every node of the URL confirmed that it has durably forgotten the pages. If it is
    /// `false`, a page may still be served, and the caller should try again.
    pub complete: bool,
}

impl Client {
    /// Forgets pages durably, at every node of the URL. A key may have had another owner while a
    /// node was absent, so asking the owner alone is not enough.
    ///
    /// A put that was abandoned before this call cannot bring its page back.
    pub async fn forget(&self, keys: &[PageKey], deadline: Instant) -> Forgotten {
        let mut forgotten = Forgotten { pages: 0, complete: true };
        for batch in keys.chunks(MAX_KEYS) {
            let mut answers = self.request_all_connections(&Request::Forget(batch.to_vec()), deadline).await;
            if fail_point!("client.forget-only-owner") {
                answers = self
                    .request_owners(batch, deadline, Request::Forget)
                    .await
                    .into_iter()
                    .map(|a| vec![a.1])
                    .collect();
            }
            let mut pages = 0;
            for connections in answers {
                // Several connections of a node may report the same page.
                let mut pages_of_node = 0;
                for answer in connections {
                    match answer {
                        Some(Response::Count(count)) => pages_of_node = pages_of_node.max(count as usize),
                        _ if fail_point!("client.forget-ignores-absent-node") => {}
                        _ => forgotten.complete = false,
                    }
                }
                pages += pages_of_node;
            }
            // Several nodes may have had the same page.
            forgotten.pages += pages.min(batch.len());
        }
        forgotten
    }

    /// Brings pages from L3 to L2, as far as the nodes' policies allow. Returns the number of pages
    /// that are in L2 afterwards.
    pub async fn warm(&self, keys: &[PageKey], deadline: Instant) -> usize {
        let answers = self.request_owners(keys, deadline, Request::Warm).await;
        let counts = answers.into_iter().map(|(_, answer)| match answer {
            Some(Response::Count(count)) => count as usize,
            _ => 0,
        });
        counts.sum()
    }
}
