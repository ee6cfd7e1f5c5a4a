//! Reading the pins of pages.

use super::routing::request_until;
use crate::client::Client;
use futures::future::join_all;
use larder_format::PageKey;
use larder_wire::{MAX_KEYS, Request, Response, VERSION_PIN_STATUS};
use std::time::Instant;

pub use larder_wire::PagePin;

impl Client {
    /// Pin of each page at its owner. `None` means that the page has no pin, or that the owner did
    /// not answer before `deadline`.
    ///
    /// Nodes that speak a protocol older than version 3 cannot tell pins: their pages are `None`.
    pub async fn pins(&self, keys: &[PageKey], deadline: Instant) -> Vec<Option<PagePin>> {
        let nodes = self.connected_nodes();
        nodes.yield_if_none().await;
        let batches = nodes.batches(keys, MAX_KEYS, 0).into_iter();
        let requests = batches.filter(|(connection, _)| connection.version() >= VERSION_PIN_STATUS).map(
            |(connection, indices)| async move {
                let request = Request::Pins(indices.iter().map(|&index| keys[index]).collect());
                let answer = request_until(&connection, &request, deadline).await;
                (indices, answer)
            },
        );
        let mut pins = vec![None; keys.len()];
        for (indices, answer) in join_all(requests).await {
            if let Some(Response::Pins(answered)) = answer {
                for (index, pin) in indices.into_iter().zip(answered) {
                    pins[index] = pin;
                }
            }
        }
        pins
    }
}
