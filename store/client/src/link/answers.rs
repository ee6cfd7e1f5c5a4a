//! What a node's answers become: bytes where they belong, pages that lie in the node's memory or are read by RDMA, replies.

use super::Live;
use crate::rdma::Promise;
use crate::sink::{Found, Landing, Lying, Sink};
use larder_format::planted::{Bug, has};
use larder_format::{Arriving, PageMeta};
use larder_share::Held;
use larder_wire::{Entry, FrameHeader, FrameReader, Place, Placed, Request, Response, Source, TierCode};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Puts one answer where it belongs; returns the sink if more answers will come.
pub(super) async fn place<S: Source>(
    live: &Arc<Live>,
    reader: &mut FrameReader<S>,
    header: &FrameHeader,
    response: Response,
    sink: Option<Sink>,
) -> io::Result<Option<Sink>> {
    let bytes = header.payload_bytes as usize;
    if let Response::Places(places) = response {
        // Whatever becomes of them, what is held is released.
        let found: Vec<_> = places.into_iter().map(|placed| live.find(header.request, placed)).collect();
        reader.discard(bytes).await?;
        // Nobody asked for pages, or waits for them any more: the request ends.
        let Some(Sink::Pages(mut pages)) = sink else { return Ok(None) };
        pages.heard();
        found.into_iter().for_each(|(index, found)| pages.found(index, found));
        return Ok(Some(Sink::Pages(pages)));
    }
    let heard = Heard::of(response);
    // Whatever becomes of the answer, what is held for it is released.
    let (held, promise) = match &heard {
        Heard::Pages(Answer { index, bytes, place: Place::Arena(place), .. }) => {
            (live.hold(header.request, *index, *place, bytes.len()), None)
        }
        Heard::Pages(Answer { index, place: Place::Window(_), .. }) => {
            (None, Some(live.promise(header.request, *index)))
        }
        _ => (None, None),
    };
    let Some(mut sink) = sink else {
        // Nobody waits for it any more.
        reader.discard(bytes).await?;
        return Ok(None);
    };
    if let Sink::Pages(pages) = &mut sink {
        pages.heard();
    }
    match (&mut sink, heard) {
        (Sink::Pages(pages), Heard::Pages(Answer { index, tier, meta, bytes: there, place: Place::Arena(_) })) => {
            pages.found(index, held.map(|held| Found { lying: Lying::Held(held), meta, tier, bytes: there }));
            reader.discard(bytes).await?;
            Ok(Some(sink))
        }
        (Sink::Pages(pages), Heard::Pages(Answer { index, tier, meta, bytes: open, place: Place::Window(window) })) => {
            live.lines.answered(true);
            if let Some(promise) = promise {
                pages.open(index, (meta, tier, open), |block| live.lines.read(window, block, promise));
            }
            reader.discard(bytes).await?;
            Ok(Some(sink))
        }
        (Sink::Pages(pages), Heard::Pages(Answer { index, tier, meta, bytes: come, place: Place::Payload })) => {
            if pages.is_to_be_read(index) {
                live.lines.answered(false);
            }
            let good = match pages.expect(index, &meta, &come, bytes) {
                Some(landing) => {
                    let good = land(reader, landing).await?;
                    pages.landed(index, (tier, meta.generation), good)
                }
                None => {
                    reader.discard(bytes).await?;
                    false
                }
            };
            if !good && let Some(id) = pages.id(index) {
                live.suspect(&id);
            }
            Ok(Some(sink))
        }
        (Sink::Parts(parts), Heard::Other(Response::Part { part, crcs })) => {
            let good = match parts.expect(part, bytes) {
                Some(memory) => {
                    let lengths = [header.payload_bytes];
                    let mut arriving = Arriving::new(&lengths, &crcs);
                    reader.payload(memory, |piece| arriving.take(piece)).await?;
                    let good = arriving.finish().is_ok();
                    parts.landed(part, good.then_some(crcs))
                }
                None => {
                    reader.discard(bytes).await?;
                    false
                }
            };
            if !good {
                tracing::error!(key = ?parts.key(), part, node = %live.node_id, "part damaged on its way: a miss");
                live.tell(&Request::Suspect(parts.key()));
            }
            Ok(Some(sink))
        }
        (_, Heard::Other(response)) => {
            reader.discard(bytes).await?;
            Ok(finish(sink, response))
        }
        // Nobody asked for pages: the request ends.
        (_, Heard::Pages(_)) => reader.discard(bytes).await.map(|()| None),
    }
}

/// A page, or bytes of one, in an answer.
struct Answer {
    index: u32,
    tier: TierCode,
    meta: PageMeta,
    bytes: Range<u32>,
    place: Place,
}

/// What came.
enum Heard {
    Pages(Answer),
    Other(Response),
}

impl Heard {
    fn of(response: Response) -> Heard {
        match response {
            Response::Page { index, tier, meta, place } => {
                let bytes = 0..meta.payload_bytes() as u32;
                Heard::Pages(Answer { index, tier, meta, bytes, place })
            }
            Response::Range { index, tier, meta, bytes, place } => {
                Heard::Pages(Answer { index, tier, meta, bytes, place })
            }
            other => Heard::Other(other),
        }
    }
}

/// Receives bytes of a page where they belong; whether they are what was put.
async fn land<S: Source>(reader: &mut FrameReader<S>, landing: Landing<'_>) -> io::Result<bool> {
    let Landing { before, memory, behind, mut arriving, is_range } = landing;
    reader.pass(before, |piece| arriving.take(piece)).await?;
    reader.payload(memory, |piece| arriving.take(piece)).await?;
    reader.pass(behind, |piece| arriving.take(piece)).await?;
    let unchecked = has(if is_range { Bug::RangeUnchecked } else { Bug::ReaderSkipsCrc });
    Ok(arriving.finish().is_ok() || unchecked)
}

/// Answers without payload.
fn finish(mut sink: Sink, response: Response) -> Option<Sink> {
    match (&mut sink, response) {
        (Sink::Pages(_), Response::Miss { .. }) => return Some(sink),
        (Sink::Pages(pages), Response::Busy { index, retry_after_ms }) => {
            pages.busy(index.unwrap_or(0), retry_after_ms);
            return index.is_some().then_some(sink);
        }
        (Sink::Parts(parts), Response::FollowEnd { state, meta }) => parts.end(state, meta),
        (Sink::Reply(_), response) => {
            if let Sink::Reply(reply) = sink {
                let _ = reply.send(response);
            }
        }
        // End, an error, or nonsense: the sink is dropped and hands back what it has.
        _ => {}
    }
    None
}

impl Live {
    /// The bytes of a page that the node holds for a request; `None` if it has no such bytes, or we none of its memory.
    fn hold(&self, request: u64, index: u32, place: u64, bytes: usize) -> Option<Held> {
        let releases = self.releases.clone();
        if has(Bug::ReleasedEarly) {
            releases.add(Entry { request, index });
            return self.window.as_ref()?.hold(place, bytes, || {});
        }
        let release = move || releases.add(Entry { request, index });
        self.window.as_ref()?.hold(place, bytes, release)
    }

    /// Bytes of a page in the node's memory, and which of the request; as [`Live::hold`].
    fn find(&self, request: u64, Placed { index, tier, meta, bytes, offset }: Placed) -> (u32, Option<Found>) {
        let held = self.hold(request, index, offset, bytes.len());
        (index, held.map(|held| Found { lying: Lying::Held(held), meta, tier, bytes }))
    }

    /// The node hears that a page need not be open any more when this is dropped.
    fn promise(&self, request: u64, index: u32) -> Promise {
        Promise { entry: Entry { request, index }, releases: self.releases.clone() }
    }
}
