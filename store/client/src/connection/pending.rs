//! Requests of one connection that wait for responses.
//!
//! Invariants:
//! - While a response is being received, its handler belongs to the receiving task. No other task
//!   can end the handler in the middle of a payload.
//! - The receiving task learns of a request that was given up in the middle of its payload, and
//!   ends the handler itself.

use super::handlers::ResponseHandler;
use std::collections::BTreeMap;

#[derive(Default)]
pub(super) struct PendingRequests {
    waiting: BTreeMap<u64, ResponseHandler>,
    /// At most two: a payload that arrives, and a short response between two of its fragments.
    receiving: Vec<Receiving>,
}

struct Receiving {
    request: u64,
    /// The request was cancelled after its handler had been taken out.
    is_cancelled: bool,
}

/// Result of [`PendingRequests::cancel`].
pub(super) enum Cancelled {
    /// The request waited. The node may still work on it.
    Waiting(ResponseHandler),
    /// A response is being received. The receiving task ends the handler.
    Receiving,
    Ended,
}

impl PendingRequests {
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.receiving.len()
    }

    pub(super) fn insert(&mut self, request: u64, handler: ResponseHandler) {
        self.waiting.insert(request, handler);
    }

    /// Takes the handler out for one response.
    pub(super) fn begin_response(&mut self, request: u64) -> Option<ResponseHandler> {
        let handler = self.waiting.remove(&request)?;
        self.receiving.push(Receiving { request, is_cancelled: false });
        Some(handler)
    }

    /// Ends the receiving of one response. `handler` waits for the next one, if it expects more.
    /// Returns the handler of a request that was cancelled in the meantime.
    pub(super) fn end_response(&mut self, request: u64, handler: Option<ResponseHandler>) -> Option<ResponseHandler> {
        let at = self.receiving.iter().position(|receiving| receiving.request == request)?;
        let is_cancelled = self.receiving.swap_remove(at).is_cancelled;
        let handler = handler?;
        if is_cancelled {
            return Some(handler);
        }
        self.waiting.insert(request, handler);
        None
    }

    /// Removes a request, unless a response is being received into its handler.
    pub(super) fn cancel(&mut self, request: u64) -> Cancelled {
        if let Some(handler) = self.waiting.remove(&request) {
            return Cancelled::Waiting(handler);
        }
        match self.receiving.iter_mut().find(|receiving| receiving.request == request) {
            Some(receiving) => {
                receiving.is_cancelled = true;
                Cancelled::Receiving
            }
            None => Cancelled::Ended,
        }
    }

    /// Returns `true` if a response to this request is being received.
    pub(super) fn is_receiving(&self, request: u64) -> bool {
        self.receiving.iter().any(|receiving| receiving.request == request)
    }

    /// Returns `true` if this request was cancelled while its response is being received.
    pub(super) fn is_given_up(&self, request: u64) -> bool {
        self.receiving.iter().any(|receiving| receiving.request == request && receiving.is_cancelled)
    }

    /// Returns `true` if a response to this Get has arrived, or is arriving.
    pub(super) fn has_begun(&self, request: u64) -> bool {
        let waiting = self.waiting.get(&request);
        self.is_receiving(request) || matches!(waiting, Some(ResponseHandler::Pages(pages)) if pages.has_begun())
    }

    /// Removes all requests that wait. The caller drops them after it has released the lock,
    /// because a handler's destructor wakes its caller.
    pub(super) fn take_all(&mut self) -> BTreeMap<u64, ResponseHandler> {
        std::mem::take(&mut self.waiting)
    }
}
