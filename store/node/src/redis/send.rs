//! Long values, from pages to the socket.

use super::manifest::{DATA_PAGE_BYTES, data_page_bytes};
use super::output::Output;
use super::values::{Database, Found};
use crate::budget::Charge;
use crate::page::Page;
use larder_format::PageId;
use larder_redis::{Reply, reply};
use larder_wire::ByteSink;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Times that a reader begins again because a writer replaced the value meanwhile.
const ATTEMPTS: usize = 16;

/// Part of a value that a reply has, from the length of the value.
pub(super) type RangeOf = dyn Fn(u64) -> Range<u64> + Send + Sync;

/// Part of one data page.
struct Piece {
    id: PageId,
    bytes: Range<usize>,
}

impl Database<'_> {
    /// Replies with a part of a value. An absent value is answered by `absent`.
    ///
    /// # Errors
    /// If the client does not read, or if a page of a value beyond the read window is lost after
    /// the header has left: the connection ends then.
    pub(super) async fn send_value<W: ByteSink>(
        &self,
        output: &mut Output<W>,
        key: &[u8],
        part: &RangeOf,
        absent: &Reply,
        deadline: Instant,
    ) -> io::Result<()> {
        let mut before = None;
        for _ in 0..ATTEMPTS {
            let Some(found) = self.find(key, deadline).await else { break };
            let generation = Some(found.page.generation());
            if before == generation {
                // The manifest is current, and a page of the value is gone: a miss.
                break;
            }
            before = generation;
            if self.send_found(output, &found, part, deadline).await? {
                return Ok(());
            }
        }
        output.reply(absent).await
    }

    /// Replies with a part of the value that was found. Returns `false`, without a reply, if a page
    /// of it is gone.
    pub(super) async fn send_found<W: ByteSink>(
        &self,
        output: &mut Output<W>,
        found: &Found,
        part: &RangeOf,
        deadline: Instant,
    ) -> io::Result<bool> {
        let range = part(found.manifest.value_bytes);
        if let Some(value) = found.short() {
            let value = &value[range.start as usize..range.end as usize];
            reply::bulk_header(value.len() as u64, &mut output.buffer);
            output.buffer.extend_from_slice(value);
            output.buffer.extend_from_slice(b"\r\n");
            output.flush_if_long().await?;
            return Ok(true);
        }
        if range.is_empty() {
            output.reply(&Reply::text("")).await?;
            return Ok(true);
        }
        let pieces = self.pieces(found, &range);
        let window = self.server.node.store.options().connection_read_window_bytes(DATA_PAGE_BYTES as u64);
        let pages_bytes = pieces.len() as u64 * DATA_PAGE_BYTES as u64;
        if pages_bytes.min(found.manifest.value_bytes) > window {
            return self.send_piecewise(output, &pieces, range.end - range.start, deadline).await;
        }
        let bytes = pieces.iter().map(|piece| piece.bytes.len() as u64).sum();
        let charge = tokio::time::timeout_at(deadline.into(), self.account.charge_read(bytes)).await;
        let Ok(mut charge) = charge else {
            return busy(output).await;
        };
        let mut pages = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            let Some(page) = self.verified(&piece.id, deadline).await else { return Ok(false) };
            pages.push(page);
        }
        reply::bulk_header(range.end - range.start, &mut output.buffer);
        charge.mark_queued();
        let parts = pages.iter().zip(&pieces).map(|(page, piece)| &page.payload[piece.bytes.clone()]);
        let slices: Vec<&[u8]> = parts.chain([&b"\r\n"[..]]).collect();
        output.send(&slices).await?;
        self.server.node.metrics.bytes_sent.inc_by(range.end - range.start);
        Ok(true)
    }

    /// Sends a value that exceeds the read window, page by page.
    async fn send_piecewise<W: ByteSink>(
        &self,
        output: &mut Output<W>,
        pieces: &[Piece],
        bytes: u64,
        deadline: Instant,
    ) -> io::Result<bool> {
        let is_there = |piece: &Piece| self.tiers().locate(&piece.id) != larder_wire::TierCode::Absent;
        if !pieces.iter().all(is_there) {
            return Ok(false);
        }
        for (index, piece) in pieces.iter().enumerate() {
            // From the second page on, the client's own pace counts.
            let deadline =
                if index == 0 { deadline } else { larder_runtime::now() + super::connection::COMMAND_TIMEOUT };
            let next = async {
                let charge = self.account.charge_read(piece.bytes.len() as u64).await;
                Some((charge, self.verified(&piece.id, deadline).await?))
            };
            let next: Option<(Charge, Arc<Page>)> = tokio::time::timeout_at(deadline.into(), next).await.ok().flatten();
            let Some((mut charge, page)) = next else {
                if index == 0 {
                    return Ok(false);
                }
                tracing::debug!(id = ?piece.id, "a page was lost while its value was sent; connection closed");
                return Err(io::Error::other("a page of the value is gone"));
            };
            if index == 0 {
                reply::bulk_header(bytes, &mut output.buffer);
            }
            charge.mark_queued();
            output.send(&[&page.payload[piece.bytes.clone()]]).await?;
            self.server.node.metrics.bytes_sent.inc_by(piece.bytes.len() as u64);
        }
        output.send(&[b"\r\n"]).await?;
        Ok(true)
    }

    /// Parts of the data pages that cover a range of a value.
    fn pieces(&self, found: &Found, range: &Range<u64>) -> Vec<Piece> {
        let page_bytes = DATA_PAGE_BYTES as u64;
        let first = (range.start / page_bytes) as usize;
        let behind = range.end.div_ceil(page_bytes) as usize;
        let ids = self.data_ids(&found.manifest).into_iter().enumerate();
        let pieces = ids.take(behind).skip(first).map(|(index, id)| {
            let at = index as u64 * page_bytes;
            let length = data_page_bytes(found.manifest.value_bytes, index as u32) as u64;
            let start = range.start.max(at) - at;
            let end = range.end.min(at + length) - at;
            Piece { id, bytes: start as usize..end as usize }
        });
        pieces.collect()
    }
}

async fn busy<W: ByteSink>(output: &mut Output<W>) -> io::Result<bool> {
    let reply = Reply::Error("BUSY the node has no memory for the reply now; try again later".into());
    output.reply(&reply).await.map(|()| true)
}
