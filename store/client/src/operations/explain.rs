//! Reasons of misses.

use super::routing::request_until;
use crate::client::Client;
use futures::future::join_all;
use larder_format::PageKey;
use larder_wire::{MAX_EXPLAINED, Request, Response, VERSION_EXPLAIN};
use std::time::Instant;

pub use larder_wire::{Explanation, MissReason};

impl Client {
    /// Reason why the owner of each page cannot serve it, or [`MissReason::Present`]. `None` means
    /// that the owner did not answer before `deadline`, or speaks a protocol older than version 8.
    ///
    /// For operators and tests: a node looks each absent page up in several namespaces. Counts
    /// neither hits nor misses.
    pub async fn explain(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<Explanation>> {
        let nodes = self.connected_nodes();
        nodes.yield_if_none().await;
        let batches = nodes.batches(keys, MAX_EXPLAINED, 0).into_iter();
        let requests = batches.filter(|(connection, _)| connection.version() >= VERSION_EXPLAIN).map(
            |(connection, indices)| async move {
                let request = Request::Explain(indices.iter().map(|&index| keys[index]).collect());
                let answer = request_until(&connection, &request, deadline).await;
                (indices, answer)
            },
        );
        let mut explanations = vec![None; keys.len()];
        for (indices, answer) in join_all(requests).await {
            if let Some(Response::Explained(answered)) = answer {
                for (index, explanation) in indices.into_iter().zip(answered) {
                    explanations[index] = Some(explanation);
                }
            }
        }
        explanations
    }
}
