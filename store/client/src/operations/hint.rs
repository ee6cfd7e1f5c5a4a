//! Hints: knowledge of engines about the further use of pages.

use super::durations::milliseconds;
use super::routing::request_until;
use crate::client::Client;
use futures::future::join_all;
use larder_format::PageKey;
use larder_wire::{MAX_KEYS, Request, Response, VERSION_HINTS};
use std::time::{Duration, Instant};

/// Advice about the further use of pages. It changes the order in which a node evicts pages of this
/// namespace. Wrong advice costs its namespace hits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Hint {
    /// No advice.
    #[default]
    None,
    /// The pages return within this time. Nodes keep them like soft-pinned pages, as far as the
    /// share of the namespace allows, from the first page on. They count as soft pins, so a later
    /// soft pin may be refused.
    Retain(Duration),
    /// The pages are not expected to return. Other clients may still read them.
    Demote,
    /// The session has ended. Pages that other resident sequences continue stay as they are. With
    /// pages on several nodes this is no advice: no node sees which pages others continue.
    SessionEnded,
}

impl Client {
    /// Gives advice about the pages of a sequence, in its order. With `generated`, it also reports
    /// that a generation of so many tokens has ended, which used these pages: its session can
    /// return from now on. Report each end once, when the pages are put.
    ///
    /// Returns the number of pages in L2 at the nodes that answered before `deadline`. Nodes that
    /// speak a protocol older than version 7 take no hints.
    pub async fn hint(&self, keys: &[PageKey], generated: Option<u32>, hint: Hint, deadline: Instant) -> usize {
        let (hint, retain_ms) = match hint {
            Hint::None => (larder_wire::Hint::None, 0),
            Hint::Retain(time) => (larder_wire::Hint::Retain, milliseconds(time)),
            Hint::Demote => (larder_wire::Hint::Demote, 0),
            Hint::SessionEnded => (larder_wire::Hint::SessionEnded, 0),
        };
        let nodes = self.connected_nodes();
        nodes.yield_if_none().await;
        let batches = nodes.batches(keys, MAX_KEYS, 0);
        let is_whole = batches.len() == 1 || hint != larder_wire::Hint::SessionEnded;
        let hint = if is_whole { hint } else { larder_wire::Hint::None };
        let requests = batches.into_iter().filter(|(connection, _)| connection.version() >= VERSION_HINTS).map(
            |(connection, indices)| {
                let keys = indices.iter().map(|&index| keys[index]).collect();
                let request = Request::Hint { keys, generated, hint, retain_ms };
                async move { request_until(&connection, &request, deadline).await }
            },
        );
        let count = |answer| if let Some(Response::Count(count)) = answer { count as usize } else { 0 };
        join_all(requests).await.into_iter().map(count).sum()
    }
}
