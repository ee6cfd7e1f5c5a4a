//! Dispatch of one response: receives its payload and updates the request's handler.
//!
//! Invariant: a page that the node holds for a response is released, even if the request was
//! cancelled in the meantime.

use super::handlers::{PagesHandler, PartsHandler, PayloadTarget, ResponseHandler};
use super::multiplex::Connection;
use larder_format::{PageMeta, PayloadVerifier};
use larder_runtime::fail_point;
use larder_wire::{
    ArenaPage, ByteSource, Entry, FrameHeader, FrameReader, GrantedRange, PayloadLocation, Request, Response, TierCode,
};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Dispatches one response. Returns the handler if it expects further responses.
pub(super) async fn dispatch<S: ByteSource>(
    connection: &Arc<Connection>,
    reader: &mut FrameReader<S>,
    header: &FrameHeader,
    response: Response,
    handler: Option<ResponseHandler>,
) -> io::Result<Option<ResponseHandler>> {
    match response {
        Response::ArenaPages(placed) => dispatch_locations(connection, reader, header, placed, handler).await,
        Response::Page { index, tier, meta, location } => {
            let range = 0..meta.payload_bytes() as u32;
            let page = ReceivedPage { index, tier, meta, range };
            dispatch_page(connection, reader, header, page, location, handler).await
        }
        Response::Range { index, tier, meta, bytes, location } => {
            let page = ReceivedPage { index, tier, meta, range: bytes };
            dispatch_page(connection, reader, header, page, location, handler).await
        }
        Response::Part { part, crcs } => match handler {
            Some(ResponseHandler::Parts(mut parts)) => {
                receive_part(connection, reader, header, part, crcs, &mut parts).await?;
                Ok(Some(ResponseHandler::Parts(parts)))
            }
            // Not the response to this request, which therefore ends.
            _ => discard(reader, header).await.map(|()| None),
        },
        response => {
            discard(reader, header).await?;
            Ok(handler.and_then(|handler| finish(handler, response)))
        }
    }
}

struct ReceivedPage {
    index: u32,
    tier: TierCode,
    meta: PageMeta,
    range: Range<u32>,
}

async fn discard<S: ByteSource>(reader: &mut FrameReader<S>, header: &FrameHeader) -> io::Result<()> {
    reader.discard(header.payload_bytes as usize).await
}

async fn dispatch_locations<S: ByteSource>(
    connection: &Arc<Connection>,
    reader: &mut FrameReader<S>,
    header: &FrameHeader,
    placed: Vec<ArenaPage>,
    handler: Option<ResponseHandler>,
) -> io::Result<Option<ResponseHandler>> {
    // Before any early return: dropping the result releases the pages.
    let hold = |ArenaPage { index, tier, meta, bytes, offset }: ArenaPage| {
        let entry = Entry { request: header.request, index };
        (index, connection.hold_page(entry, offset, meta, tier, bytes))
    };
    let held: Vec<_> = placed.into_iter().map(hold).collect();
    discard(reader, header).await?;
    // Cancelled, or not a request for pages: the request ends.
    let Some(ResponseHandler::Pages(mut pages)) = handler else { return Ok(None) };
    pages.record_response();
    held.into_iter().for_each(|(index, uncopied)| pages.set_uncopied(index, uncopied));
    Ok(Some(ResponseHandler::Pages(pages)))
}

/// Dispatches one page by the way in which the node delivers it.
async fn dispatch_page<S: ByteSource>(
    connection: &Arc<Connection>,
    reader: &mut FrameReader<S>,
    header: &FrameHeader,
    page: ReceivedPage,
    location: PayloadLocation,
    handler: Option<ResponseHandler>,
) -> io::Result<Option<ResponseHandler>> {
    let entry = Entry { request: header.request, index: page.index };
    let mut pages = match handler {
        Some(ResponseHandler::Pages(pages)) => pages,
        other => {
            // Cancelled, or not a request for pages. The node holds the page all the same.
            match location {
                PayloadLocation::Arena(offset) => {
                    drop(connection.hold(entry.request, entry.index, offset, page.range.len()))
                }
                PayloadLocation::Rdma(_) => drop(connection.release_on_drop(entry)),
                PayloadLocation::Inline => {}
            }
            discard(reader, header).await?;
            drop(other);
            return Ok(None);
        }
    };
    // A response has begun, so hedging must not abandon the request.
    pages.record_response();
    match location {
        PayloadLocation::Arena(offset) => {
            let uncopied = connection.hold_page(entry, offset, page.meta, page.tier, page.range);
            pages.set_uncopied(page.index, uncopied);
            discard(reader, header).await?;
        }
        PayloadLocation::Rdma(grant) => {
            begin_read(connection, entry, page, grant, &mut pages);
            discard(reader, header).await?;
        }
        PayloadLocation::Inline => receive_page(connection, reader, header, page, &mut pages).await?,
    }
    Ok(Some(ResponseHandler::Pages(pages)))
}

/// Begins the RDMA read of a page that the node has granted.
fn begin_read(
    connection: &Arc<Connection>,
    entry: Entry,
    page: ReceivedPage,
    grant: GrantedRange,
    pages: &mut PagesHandler,
) {
    let rdma = connection.rdma();
    rdma.record_answer(true);
    let release = connection.release_on_drop(entry);
    let ReceivedPage { index, tier, meta, range } = page;
    pages.begin_read(index, meta, tier, range, |block| rdma.read(grant, block, release));
}

/// Receives a page's bytes into the caller's buffer, and checks them on the way.
async fn receive_page<S: ByteSource>(
    connection: &Arc<Connection>,
    reader: &mut FrameReader<S>,
    header: &FrameHeader,
    page: ReceivedPage,
    pages: &mut PagesHandler,
) -> io::Result<()> {
    let ReceivedPage { index, tier, meta, range } = page;
    if pages.expects_grant(index) {
        connection.rdma().record_answer(false);
    }
    let is_valid = match pages.begin_payload(index, &meta, &range, header.payload_bytes as usize) {
        Some(target) => {
            let is_valid = receive_payload(reader, target).await?;
            let is_valid = pages.finish_payload(index, tier, meta.generation, is_valid);
            if is_valid {
                pages.keep_meta(index, meta);
            }
            is_valid
        }
        None => {
            discard(reader, header).await?;
            false
        }
    };
    if !is_valid && let Some(id) = pages.id(index) {
        connection.report_corrupt(&id);
    }
    Ok(())
}

/// Receives a payload. Returns `true` if all checksums match.
async fn receive_payload<S: ByteSource>(reader: &mut FrameReader<S>, target: PayloadTarget<'_>) -> io::Result<bool> {
    let PayloadTarget { before, memory, after, mut arriving, is_range } = target;
    reader.pass(before, |piece| arriving.take(piece)).await?;
    reader.payload(memory, |piece| arriving.take(piece)).await?;
    reader.pass(after, |piece| arriving.take(piece)).await?;
    let skips_check =
        if is_range { fail_point!("client.range-skips-checksum") } else { fail_point!("client.get-skips-checksum") };
    Ok(arriving.finish().is_ok() || skips_check)
}

async fn receive_part<S: ByteSource>(
    connection: &Arc<Connection>,
    reader: &mut FrameReader<S>,
    header: &FrameHeader,
    part: u32,
    crcs: Vec<u32>,
    parts: &mut PartsHandler,
) -> io::Result<()> {
    let is_valid = match parts.begin_part(part, header.payload_bytes as usize) {
        Some(memory) => {
            let lengths = [header.payload_bytes];
            let mut arriving = PayloadVerifier::new(&lengths, &crcs);
            reader.payload(memory, |piece| arriving.take(piece)).await?;
            let is_valid = arriving.finish().is_ok();
            parts.finish_part(part, is_valid.then_some(crcs))
        }
        None => {
            discard(reader, header).await?;
            false
        }
    };
    if !is_valid {
        let node = &connection.node().node_id;
        tracing::error!(key = ?parts.key(), part, %node, "part failed verification; the followed page is a miss");
        connection.outbox().try_send(&Request::Suspect(parts.key()));
    }
    Ok(())
}

/// Handles a response without payload. Returns the handler if it expects further responses.
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
