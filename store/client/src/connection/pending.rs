//! Requests of one connection that wait for responses.
//!
//! Invariant: while a response is being received, its handler belongs to the receiving task. No
//! other task can then end the handler in the middle of a payload.

use super::handlers::ResponseHandler;
use std::collections::BTreeMap;

#[derive(Default)]
pub(super) struct PendingRequests {
    waiting: BTreeMap<u64, ResponseHandler>,
    receiving: Option<Receiving>,
}

struct Receiving {
    request: u64,
    /// The request was cancelled after its handler had been taken out.
    is_cancelled: bool,
}

impl PendingRequests {
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + usize::from(self.receiving.is_some())
    }

    pub(super) fn insert(&mut self, request: u64, handler: ResponseHandler) {
        self.waiting.insert(request, handler);
    }

    /// Takes the handler out for one response.
    pub(super) fn begin_response(&mut self, request: u64) -> Option<ResponseHandler> {
        let handler = self.waiting.remove(&request);
        self.receiving = handler.is_some().then_some(Receiving { request, is_cancelled: false });
        handler
    }

    /// Ends the receiving of one response. `handler` waits for the next one, if it expects more.
    /// Returns the handler of a request that was cancelled in the meantime.
    pub(super) fn end_response(&mut self, request: u64, handler: Option<ResponseHandler>) -> Option<ResponseHandler> {
        let is_cancelled = self.receiving.take().is_some_and(|receiving| receiving.is_cancelled);
        let handler = handler?;
        if is_cancelled {
            return Some(handler);
        }
        self.waiting.insert(request, handler);
        None
    }

    /// Removes a request. Returns its handler if no response is being received into it. The node
    /// may then still work on the request.
    pub(super) fn cancel(&mut self, request: u64) -> Option<ResponseHandler> {
        if let Some(receiving) = self.receiving.as_mut().filter(|receiving| receiving.request == request) {
            receiving.is_cancelled = true;
        }
        self.waiting.remove(&request)
    }

    /// Returns `true` if a response to this Get has arrived, or is arriving.
    pub(super) fn has_begun(&self, request: u64) -> bool {
        let is_receiving = self.receiving.as_ref().is_some_and(|receiving| receiving.request == request);
        is_receiving || matches!(self.waiting.get(&request), Some(ResponseHandler::Pages(pages)) if pages.has_begun())
    }

    /// Removes all requests that wait. The caller drops them after it has released the lock,
    /// because a handler's destructor wakes its caller.
    pub(super) fn take_all(&mut self) -> BTreeMap<u64, ResponseHandler> {
        std::mem::take(&mut self.waiting)
    }
}
