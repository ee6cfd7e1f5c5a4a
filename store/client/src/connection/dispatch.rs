//! Dispatch of one response without payload: updates the request's handler. `receive` has the
//! responses with payload.
//!
//! Invariants:
//! - A page that the node holds for a response is released, even if the request was cancelled in
//!   the meantime.
//! - Nothing here waits, so it can run between two fragments of another response.

use super::handlers::{PagesHandler, PartsHandler, ResponseHandler};
use super::multiplex::Connection;
use super::rdma_reads::read_page;
use larder_format::PageMeta;
use larder_wire::{ArenaPage, Entry, GrantedRange, PayloadLocation, Request, Response, TierCode};
use std::ops::Range;
use std::sync::Arc;

/// Page, or range of one, in a response.
pub(super) struct ReceivedPage {
    pub(super) index: u32,
    pub(super) tier: TierCode,
    pub(super) meta: PageMeta,
    pub(super) range: Range<u32>,
    pub(super) location: PayloadLocation,
}

impl ReceivedPage {
    /// Extracts the page of a Page or Range response. Returns other responses unchanged.
    #[expect(clippy::result_large_err, reason = "both variants are large, and a box would cost every page")]
    pub(super) fn of(response: Response) -> Result<ReceivedPage, Response> {
        match response {
            Response::Page { index, tier, meta, location } => {
                let range = 0..meta.payload_bytes() as u32;
                Ok(ReceivedPage { index, tier, meta, range, location })
            }
            Response::Range { index, tier, meta, bytes, location } => {
                Ok(ReceivedPage { index, tier, meta, range: bytes, location })
            }
            response => Err(response),
        }
    }
}

/// Dispatches one response to the handler of its request, if that still waits.
pub(super) fn dispatch(connection: &Arc<Connection>, request: u64, response: Response) {
    let handler = connection.pending().lock().begin_response(request);
    let handler = apply(connection, request, response, handler);
    let cancelled = connection.pending().lock().end_response(request, handler);
    // The cancellation could not take the handler, so the node has not heard of it.
    if cancelled.is_some() {
        connection.send_detached(&Request::Cancel(request));
    }
}

/// Applies one response to a handler. Returns the handler if it expects further responses.
pub(super) fn apply(
    connection: &Arc<Connection>,
    request: u64,
    response: Response,
    handler: Option<ResponseHandler>,
) -> Option<ResponseHandler> {
    let response = match ReceivedPage::of(response) {
        Ok(page) => return apply_page(connection, request, page, handler),
        Err(response) => response,
    };
    match (response, handler) {
        (Response::ArenaPages(placed), handler) => apply_locations(connection, request, placed, handler),
        (Response::Part { part, .. }, Some(ResponseHandler::Parts(mut parts))) => {
            // A part has bytes, and they are the payload.
            parts.finish_part(part, None);
            report_corrupt_part(connection, &parts, part);
            Some(ResponseHandler::Parts(parts))
        }
        (response, handler) => handler.and_then(|handler| finish(handler, response)),
    }
}

fn apply_locations(
    connection: &Arc<Connection>,
    request: u64,
    placed: Vec<ArenaPage>,
    handler: Option<ResponseHandler>,
) -> Option<ResponseHandler> {
    // Before any early return: dropping the result releases the pages.
    let hold = |ArenaPage { index, tier, meta, bytes, offset }: ArenaPage| {
        let entry = Entry { request, index };
        (index, connection.hold_page(entry, offset, meta, tier, bytes))
    };
    let held: Vec<_> = placed.into_iter().map(hold).collect();
    // Cancelled, or not a request for pages: the request ends.
    let Some(ResponseHandler::Pages(mut pages)) = handler else { return None };
    pages.record_response();
    held.into_iter().for_each(|(index, uncopied)| pages.set_uncopied(index, uncopied));
    Some(ResponseHandler::Pages(pages))
}

/// Applies one page by the way in which the node delivers it.
pub(super) fn apply_page(
    connection: &Arc<Connection>,
    request: u64,
    page: ReceivedPage,
    handler: Option<ResponseHandler>,
) -> Option<ResponseHandler> {
    let entry = Entry { request, index: page.index };
    let Some(ResponseHandler::Pages(mut pages)) = handler else {
        // Cancelled, or not a request for pages. The node holds the page all the same.
        match page.location {
            PayloadLocation::Arena(offset) => {
                drop(connection.hold(entry.request, entry.index, offset, page.range.len()))
            }
            PayloadLocation::Rdma(_) => drop(connection.release_on_drop(entry)),
            PayloadLocation::Inline => {}
        }
        return None;
    };
    // A response has begun, so hedging must not abandon the request.
    pages.record_response();
    match page.location {
        PayloadLocation::Arena(offset) => {
            let uncopied = connection.hold_page(entry, offset, page.meta, page.tier, page.range);
            pages.set_uncopied(page.index, uncopied);
        }
        PayloadLocation::Rdma(grant) => begin_read(connection, entry, page, grant, &mut pages),
        PayloadLocation::Inline => {
            // A page has bytes, and they are the payload.
            pages.begin_payload(page.index, &page.meta, &page.range, 0);
            pages.finish_payload(page.index, page.tier, page.meta.generation, false);
            report_corrupt_page(connection, &pages, page.index);
        }
    }
    Some(ResponseHandler::Pages(pages))
}

/// Begins the RDMA read of a page that the node has granted.
fn begin_read(
    connection: &Arc<Connection>,
    entry: Entry,
    page: ReceivedPage,
    grant: GrantedRange,
    pages: &mut PagesHandler,
) {
    connection.rdma().record_answer(true);
    let release = connection.release_on_drop(entry);
    let ReceivedPage { index, tier, meta, range, .. } = page;
    pages.begin_read(index, meta, tier, range, |block| read_page(connection, grant, block, release));
}

pub(super) fn report_corrupt_page(connection: &Connection, pages: &PagesHandler, index: u32) {
    if let Some(id) = pages.id(index) {
        connection.report_corrupt(&id);
    }
}

pub(super) fn report_corrupt_part(connection: &Connection, parts: &PartsHandler, part: u32) {
    let node = &connection.node().node_id;
    tracing::error!(key = ?parts.key(), part, %node, "part failed verification; the followed page is a miss");
    connection.outbox().try_send(&Request::Suspect(parts.key()));
}

/// Handles a response that is neither a page nor a part. Returns the handler if it expects further
/// responses.
fn finish(mut handler: ResponseHandler, response: Response) -> Option<ResponseHandler> {
    match (&mut handler, response) {
        (ResponseHandler::Pages(pages), Response::Miss { .. }) => {
            pages.record_response();
            return Some(handler);
        }
        (ResponseHandler::Pages(pages), Response::Busy { index, retry_after_ms }) => {
            pages.record_response();
            pages.set_busy(index.unwrap_or(0), retry_after_ms);
            return index.is_some().then_some(handler);
        }
        (ResponseHandler::Parts(parts), Response::FollowEnd { state, meta }) => parts.finish(state, meta),
        (ResponseHandler::Parts(parts), Response::Busy { .. }) => parts.set_busy(),
        (ResponseHandler::Reply(_), response) => {
            if let ResponseHandler::Reply(reply) = handler {
                // The caller may have stopped waiting.
                let _ = reply.send(response);
            }
        }
        // The end of the responses, an error, or a response of another kind. Dropping the handler
        // returns the buffers.
        _ => {}
    }
    None
}
