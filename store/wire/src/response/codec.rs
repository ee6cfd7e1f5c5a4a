//! Encoding and decoding of responses.

use super::{ArenaListenerInfo, ArenaPage, MemberEntry, PartGrant, PutEnd, Response};
use crate::codes::{CommitOutcome, ErrorCode, FollowState, ReserveOutcome, TierCode};
use crate::fields::{
    Explanation, Extent, GrantedRange, PagePin, PayloadLocation, RdmaEndpoint, crcs, optional, put_crcs, put_optional,
    put_range, range,
};
use crate::frame::{BODY_ROOM_BYTES, Frame, Payload};
use crate::limits::{
    MAX_ARENA_PAGES, MAX_EXPLAINED, MAX_EXTENT_FILES, MAX_EXTENTS, MAX_INFO_BYTES, MAX_KEYS, MAX_MEMBERS,
    MAX_NAME_BYTES, MAX_PART_GRANTS, MAX_PUTS, MAX_RDMA_CHANNELS, MAX_TEXT_BYTES,
};
use crate::messages::ResponseKind;
use crate::{VERSION_COPIES, VERSION_EXPLAIN};
use larder_format::codec::{DecodeError, Put, Reader, Result};
use larder_format::{NamespaceId, PageMeta};
use std::sync::Arc;

/// Encoded response without payload, whose bytes several frames share. Clones share them, too.
#[derive(Debug, Clone)]
pub struct SharedResponse {
    kind: u8,
    body: Arc<[u8]>,
}

impl SharedResponse {
    /// A frame that answers `request`. Dropping the frame, sent or unsent, drops `guard`.
    pub fn frame(&self, request: u64, guard: impl Send + Sync + 'static) -> Frame {
        Frame::with_shared_body(self.kind, request, self.body.clone(), guard)
    }

    /// Length of the shared bytes.
    pub fn body_bytes(&self) -> usize {
        self.body.len()
    }

    /// Number of frames and other owners that share the bytes.
    pub fn owners(&self) -> usize {
        Arc::strong_count(&self.body)
    }
}

impl Response {
    /// A frame of this response to `request`, for a protocol version that has this kind of message.
    pub fn frame(&self, version: u16, request: u64, payload: Option<Payload>) -> Frame {
        let kind = self.kind();
        debug_assert!(kind.since_version() <= version, "version {version} has no {kind:?}");
        Frame::new(kind as u8, request, 0, &self.encode(version), payload).for_version(version)
    }

    /// Encodes this response once, for several frames. Each frame then costs its header only.
    pub fn shared(&self, version: u16) -> SharedResponse {
        SharedResponse { kind: self.kind() as u8, body: self.encode(version).into() }
    }

    fn encode(&self, version: u16) -> Vec<u8> {
        let mut out = Vec::with_capacity(BODY_ROOM_BYTES);
        match self {
            Response::Hello { version, node_id, epoch, namespace, arena_listener } => {
                out.put_u16(*version);
                out.put_string(node_id);
                out.put_u64(*epoch);
                put_optional(&mut out, namespace.as_ref(), |out, namespace| out.put(&namespace.0));
                put_optional(&mut out, arena_listener.as_ref(), |out, listener| {
                    out.put_string(&listener.machine);
                    out.put_string(&listener.name);
                });
            }
            Response::Located(tiers) => put_tiers(&mut out, tiers),
            Response::LookedUp { tiers, held, l3_expected_us } => {
                put_tiers(&mut out, tiers);
                out.put_u32(*held);
                out.put_u32(*l3_expected_us);
            }
            Response::Page { index, tier, meta, location } => {
                put_page(&mut out, *index, *tier, meta);
                location.put(&mut out);
            }
            Response::Range { index, tier, meta, bytes, location } => {
                put_page(&mut out, *index, *tier, meta);
                put_range(&mut out, bytes);
                location.put(&mut out);
            }
            Response::ArenaPages(pages) => out.put_list(pages, |out, page| {
                put_page(out, page.index, page.tier, &page.meta);
                put_range(out, &page.bytes);
                out.put_u64(page.offset);
            }),
            Response::Miss { index } => out.put_u32(*index),
            Response::Busy { index, retry_after_ms } => {
                put_optional(&mut out, index.as_ref(), |out, &index| out.put_u32(index));
                out.put_u32(*retry_after_ms);
            }
            Response::End | Response::Pong => {}
            Response::Part { part, crcs } => {
                out.put_u32(*part);
                put_crcs(&mut out, crcs);
            }
            Response::FollowEnd { state, meta } => {
                out.put_u8(state.code());
                put_optional(&mut out, meta.as_ref(), |out, meta| meta.encode(out));
            }
            Response::Reserved { outcomes, retry_after_ms } => {
                out.put_list(outcomes, |out, outcome| out.put_u8(reserve_code(version, *outcome)));
                // With a retry time this is `ResponseKind::ReservedBusy`, without it
                // `ResponseKind::Reserved`.
                if *retry_after_ms > 0 {
                    out.put_u32(*retry_after_ms);
                }
            }
            Response::Committed(ends) => out.put_list(ends, |out, end| end.encode(version, out)),
            Response::Count(count) => out.put_u32(*count),
            Response::Members(members) => out.put_list(members, |out, member| {
                out.put_string(&member.name);
                out.put_string(&member.info);
            }),
            Response::Status(json) => out.put_string(json),
            Response::Pins(pins) => out.put_list(pins, PagePin::put),
            Response::Explained(explanations) => out.put_list(explanations, Explanation::put),
            Response::Extents { files, extents } => {
                out.put_u32(*files);
                out.put_list(extents, Extent::put);
            }
            Response::RdmaChannels(endpoints) => out.put_list(endpoints, |out, endpoint| endpoint.put(out)),
            Response::PartGrants(grants) => out.put_list(grants, |out, grant| {
                out.put_u32(grant.index);
                out.put_u32(grant.part);
                grant.range.put(out);
            }),
            Response::Error { code, message } => {
                out.put_u8(code.code());
                out.put_string(message);
            }
        }
        out
    }

    /// Decodes the body of a message of kind `kind` in protocol version `version`.
    ///
    /// # Errors
    /// The version lacks this kind, a field is invalid or above its limit, or bytes are missing or
    /// left over.
    pub fn decode(version: u16, kind: u8, body: &[u8]) -> Result<Self> {
        let mut r = Reader::new(body);
        let message = match ResponseKind::decode(version, kind)? {
            ResponseKind::Hello => Response::Hello {
                version: r.u16("version")?,
                node_id: r.string(MAX_NAME_BYTES, "node name")?,
                epoch: r.u64("epoch")?,
                namespace: optional(&mut r, |r| Ok(NamespaceId(r.array("namespace")?)))?,
                arena_listener: optional(&mut r, ArenaListenerInfo::decode)?,
            },
            ResponseKind::Located => Response::Located(tiers(&mut r)?),
            ResponseKind::LookedUp => Response::LookedUp {
                tiers: tiers(&mut r)?,
                held: r.u32("held pages")?,
                l3_expected_us: r.u32("expected load time")?,
            },
            ResponseKind::Page => Response::Page {
                index: r.u32("index")?,
                tier: tier(&mut r)?,
                meta: PageMeta::decode(&mut r)?,
                location: PayloadLocation::read(&mut r)?,
            },
            ResponseKind::Range => Response::Range {
                index: r.u32("index")?,
                tier: tier(&mut r)?,
                meta: PageMeta::decode(&mut r)?,
                bytes: range(&mut r)?,
                location: PayloadLocation::read(&mut r)?,
            },
            ResponseKind::ArenaPages => {
                Response::ArenaPages(r.list(MAX_ARENA_PAGES, "arena pages", ArenaPage::decode)?)
            }
            ResponseKind::Miss => Response::Miss { index: r.u32("index")? },
            ResponseKind::Busy => {
                Response::Busy { index: optional(&mut r, |r| r.u32("index"))?, retry_after_ms: r.u32("retry time")? }
            }
            ResponseKind::End => Response::End,
            ResponseKind::Pong => Response::Pong,
            ResponseKind::Part => Response::Part { part: r.u32("part")?, crcs: crcs(&mut r)? },
            ResponseKind::FollowEnd => Response::FollowEnd {
                state: FollowState::from_code(r.u8("follow state")?)?,
                meta: optional(&mut r, PageMeta::decode)?,
            },
            ResponseKind::Reserved => {
                Response::Reserved { outcomes: reserve_outcomes(&mut r, version)?, retry_after_ms: 0 }
            }
            ResponseKind::ReservedBusy => match (reserve_outcomes(&mut r, version)?, r.u32("retry time")?) {
                // One encoding per message: without a retry time the kind is `Reserved`.
                (_, 0) => return Err(DecodeError::Invalid("retry time")),
                (outcomes, retry_after_ms) => Response::Reserved { outcomes, retry_after_ms },
            },
            ResponseKind::Committed => {
                Response::Committed(r.list(MAX_PUTS, "commit outcomes", |r| PutEnd::decode(version, r))?)
            }
            ResponseKind::Count => Response::Count(r.u32("count")?),
            ResponseKind::Members => Response::Members(r.list(MAX_MEMBERS, "members", MemberEntry::decode)?),
            ResponseKind::Status => Response::Status(r.string(MAX_TEXT_BYTES, "status")?),
            ResponseKind::Pins => Response::Pins(r.list(MAX_KEYS, "pins", PagePin::read)?),
            ResponseKind::Explained => Response::Explained(r.list(MAX_EXPLAINED, "explanations", Explanation::read)?),
            ResponseKind::Extents => {
                let files = r.u32("files")?;
                if files as usize > MAX_EXTENT_FILES {
                    return Err(DecodeError::Invalid("files"));
                }
                Response::Extents { files, extents: r.list(MAX_EXTENTS, "extents", |r| Extent::read(r, files))? }
            }
            ResponseKind::RdmaChannels => {
                Response::RdmaChannels(r.list(MAX_RDMA_CHANNELS, "RDMA endpoints", RdmaEndpoint::read)?)
            }
            ResponseKind::PartGrants => {
                Response::PartGrants(r.list(MAX_PART_GRANTS, "part grants", PartGrant::decode)?)
            }
            ResponseKind::Error => Response::Error {
                code: ErrorCode::from_code(r.u8("error code")?)?,
                message: r.string(MAX_TEXT_BYTES, "error message")?,
            },
        };
        r.finish()?;
        Ok(message)
    }
}

impl ArenaListenerInfo {
    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            machine: reader.string(MAX_NAME_BYTES, "machine")?,
            name: reader.string(MAX_NAME_BYTES, "socket name")?,
        })
    }
}

impl MemberEntry {
    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            name: reader.string(MAX_NAME_BYTES, "member name")?,
            info: reader.string(MAX_INFO_BYTES, "member info")?,
        })
    }
}

impl PutEnd {
    fn encode(&self, version: u16, out: &mut Vec<u8>) {
        out.put_u8(self.outcome.code());
        if version >= VERSION_COPIES {
            out.put_u64(self.generation);
        }
    }

    fn decode(version: u16, reader: &mut Reader<'_>) -> Result<Self> {
        let outcome = CommitOutcome::from_code(reader.u8("commit outcome")?)?;
        let generation = if version >= VERSION_COPIES { reader.u64("generation")? } else { 0 };
        // A writer must not learn a generation of bytes that are not its own.
        match outcome {
            CommitOutcome::Refused | CommitOutcome::Incomplete if generation > 0 => {
                Err(DecodeError::Invalid("generation"))
            }
            outcome => Ok(Self { outcome, generation }),
        }
    }
}

impl PartGrant {
    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { index: reader.u32("index")?, part: reader.u32("part")?, range: GrantedRange::read(reader)? })
    }
}

impl ArenaPage {
    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            index: reader.u32("index")?,
            tier: tier(reader)?,
            meta: PageMeta::decode(reader)?,
            bytes: range(reader)?,
            offset: reader.u64("arena offset")?,
        })
    }
}

fn put_page(out: &mut Vec<u8>, index: u32, tier: TierCode, meta: &PageMeta) {
    out.put_u32(index);
    out.put_u8(tier.code());
    meta.encode(out);
}

fn tier(reader: &mut Reader<'_>) -> Result<TierCode> {
    TierCode::from_code(reader.u8("tier")?)
}

fn put_tiers(out: &mut Vec<u8>, tiers: &[TierCode]) {
    out.put_list(tiers, |out, tier| out.put_u8(tier.code()));
}

fn tiers(reader: &mut Reader<'_>) -> Result<Vec<TierCode>> {
    reader.list(MAX_KEYS, "tiers", tier)
}

/// Code of an outcome in a version. Both codes tell the client that a retry fails again.
fn reserve_code(version: u16, outcome: ReserveOutcome) -> u8 {
    match outcome {
        ReserveOutcome::Retired if version < VERSION_EXPLAIN => ReserveOutcome::Malformed.code(),
        outcome => outcome.code(),
    }
}

fn reserve_outcomes(reader: &mut Reader<'_>, version: u16) -> Result<Vec<ReserveOutcome>> {
    reader.list(MAX_PUTS, "reserve outcomes", |r| match ReserveOutcome::from_code(r.u8("reserve outcome")?)? {
        // Versions before do not have the code.
        ReserveOutcome::Retired if version < VERSION_EXPLAIN => Err(DecodeError::Invalid("reserve outcome")),
        outcome => Ok(outcome),
    })
}

#[cfg(test)]
mod tests;
