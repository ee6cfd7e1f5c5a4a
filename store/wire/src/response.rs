//! Messages of nodes.

use crate::codes::{CommitOutcome, ErrorCode, FollowState, ReserveOutcome, TierCode};
use crate::fields::{LineEnd, LineWindow, Place, crcs, optional, put_range, range};
use crate::frame::{Frame, Payload};
use crate::limits::{
    MAX_INFO_BYTES, MAX_KEYS, MAX_LINES, MAX_MEMBERS, MAX_NAME_BYTES, MAX_PLACES, MAX_PUTS, MAX_TEXT_BYTES, MAX_WINDOWS,
};
use larder_format::codec::{DecodeError, Put, Reader, Result};
use larder_format::{NamespaceId, PageMeta};
use std::ops::Range;

/// A way to a node's memory for processes of its machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalDoor {
    /// The machine and its present run.
    pub machine: String,
    /// Name of an abstract UNIX socket.
    pub name: String,
}

/// A registered process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberEntry {
    /// Unique name.
    pub name: String,
    /// JSON.
    pub info: String,
}

/// A part of a put, open for writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartWindow {
    /// Index of the page in the Reserve.
    pub index: u32,
    /// Part index.
    pub part: u32,
    /// Where it is written to.
    pub window: LineWindow,
}

/// A page, or bytes of one, in the arena of a node on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Index in the request.
    pub index: u32,
    /// Where it was.
    pub tier: TierCode,
    /// Identity and checksums of the page.
    pub meta: PageMeta,
    /// Which bytes of it.
    pub bytes: Range<u32>,
    /// Where they begin in the arena.
    pub offset: u64,
}

/// From node to client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Response {
    /// Answer to Hello.
    Hello {
        /// Version spoken from here on.
        version: u16,
        /// The node's name, kept in its data directory.
        node_id: String,
        /// Grows at each start of the node.
        epoch: u64,
        /// The namespace this connection works in.
        namespace: Option<NamespaceId>,
        /// How processes of the node's machine come to its memory, if they can.
        door: Option<LocalDoor>,
    },
    /// Tiers, in the order of the keys.
    Located(Vec<TierCode>),
    /// What there is of a chain of pages.
    Looked {
        /// Tier of each page of the longest servable prefix.
        tiers: Vec<TierCode>,
        /// How many of them, from the first on, are held; each is an [`Entry`] of this request.
        held: u32,
        /// Microseconds that a page on [`TierCode::L3`] is expected to take.
        l3_expected_us: u32,
    },
    /// A page, with a payload if its bytes are sent.
    Page {
        /// Index in the request.
        index: u32,
        /// Where it was.
        tier: TierCode,
        /// Identity and checksums.
        meta: PageMeta,
        /// Where its bytes are.
        place: Place,
    },
    /// Bytes of a page, with a payload if they are sent.
    Range {
        /// Index in the request.
        index: u32,
        /// Where it was.
        tier: TierCode,
        /// Identity and checksums of the page.
        meta: PageMeta,
        /// Which bytes.
        bytes: Range<u32>,
        /// Where they are.
        place: Place,
    },
    /// Pages, or bytes of pages, that are read in place.
    Places(Vec<Placed>),
    /// A page that cannot be served.
    Miss {
        /// Index in the request.
        index: u32,
    },
    /// The last pages of a Get, or a whole request, that the node does not take on now: it has too much under way. Nothing is
    /// said about whether they are there.
    Busy {
        /// From this index in the request on; `None`: all of the request, and no other answer follows.
        index: Option<u32>,
        /// Milliseconds after which it is worth trying again, at least 1.
        retry_after_ms: u32,
    },
    /// All answers to a Get were sent.
    End,
    /// A part of a followed page, as payload.
    Part {
        /// Part index.
        part: u32,
        /// CRC of each chunk.
        crcs: Vec<u32>,
    },
    /// The end of a followed page, with its identity and checksums if it was sealed.
    FollowEnd {
        /// How it ended.
        state: FollowState,
        /// Present if sealed.
        meta: Option<PageMeta>,
    },
    /// Answer to Reserve.
    Reserved {
        /// Granted or why not, in the order of the pages.
        outcomes: Vec<ReserveOutcome>,
        /// Milliseconds after which it is worth trying again those that are busy; 0 if none is.
        retry_after_ms: u32,
    },
    /// Answer to Commit, in the order of the puts, and to Compare.
    Committed(Vec<CommitOutcome>),
    /// A number.
    Count(u32),
    /// All members.
    Members(Vec<MemberEntry>),
    /// The node's state, JSON.
    Status(String),
    /// The node's ends of the lines that it has connected to the client's.
    Lines(Vec<LineEnd>),
    /// Parts that are open for writing.
    Windows(Vec<PartWindow>),
    /// The request failed.
    Error {
        /// What to do about it.
        code: ErrorCode,
        /// For people.
        message: String,
    },
}

fn outcomes(r: &mut Reader<'_>) -> Result<Vec<ReserveOutcome>> {
    r.list(MAX_PUTS, "outcomes", |r| ReserveOutcome::from_code(r.u8("outcome")?))
}

impl Response {
    fn encode(&self) -> (u8, Vec<u8>) {
        let mut out = Vec::new();
        let kind = match self {
            Response::Hello { version, node_id, epoch, namespace, door } => {
                out.put_u16(*version);
                out.put_string(node_id);
                out.put_u64(*epoch);
                out.put_u8(u8::from(namespace.is_some()));
                if let Some(namespace) = namespace {
                    out.put(&namespace.0);
                }
                out.put_u8(u8::from(door.is_some()));
                if let Some(LocalDoor { machine, name }) = door {
                    out.put_string(machine);
                    out.put_string(name);
                }
                128
            }
            Response::Located(tiers) => {
                out.put_list(tiers, |out, tier| out.put_u8(tier.code()));
                129
            }
            Response::Page { index, tier, meta, place } => {
                out.put_u32(*index);
                out.put_u8(tier.code());
                meta.encode(&mut out);
                place.put(&mut out);
                130
            }
            Response::Range { index, tier, meta, bytes, place } => {
                out.put_u32(*index);
                out.put_u8(tier.code());
                meta.encode(&mut out);
                put_range(&mut out, bytes);
                place.put(&mut out);
                145
            }
            Response::Places(places) => {
                out.put_list(places, |out, Placed { index, tier, meta, bytes, offset }| {
                    out.put_u32(*index);
                    out.put_u8(tier.code());
                    meta.encode(out);
                    put_range(out, bytes);
                    out.put_u64(*offset);
                });
                148
            }
            Response::Miss { index } => {
                out.put_u32(*index);
                131
            }
            Response::End => 132,
            Response::Part { part, crcs } => {
                out.put_u32(*part);
                out.put_list(crcs, |out, &c| out.put_u32(c));
                133
            }
            Response::FollowEnd { state, meta } => {
                out.put_u8(state.code());
                out.put_u8(u8::from(meta.is_some()));
                if let Some(meta) = meta {
                    meta.encode(&mut out);
                }
                134
            }
            Response::Reserved { outcomes, retry_after_ms } => {
                out.put_list(outcomes, |out, outcome| out.put_u8(outcome.code()));
                if *retry_after_ms > 0 {
                    out.put_u32(*retry_after_ms);
                }
                if *retry_after_ms > 0 { 147 } else { 135 }
            }
            Response::Busy { index, retry_after_ms } => {
                out.put_u8(u8::from(index.is_some()));
                if let Some(index) = index {
                    out.put_u32(*index);
                }
                out.put_u32(*retry_after_ms);
                146
            }
            Response::Committed(outcomes) => {
                out.put_list(outcomes, |out, outcome| out.put_u8(outcome.code()));
                136
            }
            Response::Looked { tiers, held, l3_expected_us } => {
                out.put_list(tiers, |out, tier| out.put_u8(tier.code()));
                out.put_u32(*held);
                out.put_u32(*l3_expected_us);
                141
            }
            Response::Lines(ends) => {
                out.put_list(ends, |out, end| end.put(out));
                142
            }
            Response::Windows(windows) => {
                out.put_list(windows, |out, open| {
                    out.put_u32(open.index);
                    out.put_u32(open.part);
                    open.window.put(out);
                });
                143
            }
            Response::Count(count) => {
                out.put_u32(*count);
                137
            }
            Response::Members(members) => {
                out.put_list(members, |out, member| {
                    out.put_string(&member.name);
                    out.put_string(&member.info);
                });
                138
            }
            Response::Status(json) => {
                out.put_string(json);
                139
            }
            Response::Error { code, message } => {
                out.put_u8(code.code());
                out.put_string(message);
                140
            }
        };
        (kind, out)
    }

    /// A frame of this answer to `request`, as version `version` has it, in which there are such messages.
    pub fn frame(&self, version: u16, request: u64, payload: Option<Payload>) -> Frame {
        let (kind, body) = self.encode();
        debug_assert!(Self::since(kind) <= version, "no version says what it has no word for");
        Frame::new(kind, request, 0, &body, payload)
    }

    /// The first version that has messages of this kind.
    fn since(kind: u8) -> u16 {
        if kind <= 141 { 1 } else { 2 }
    }

    /// Reads a body of kind `kind`, as version `version` of the protocol has it.
    pub fn decode(version: u16, kind: u8, body: &[u8]) -> Result<Self> {
        if version < Self::since(kind) {
            return Err(DecodeError::Invalid("response kind in this version"));
        }
        let mut r = Reader::new(body);
        let message = match kind {
            128 => Response::Hello {
                version: r.u16("version")?,
                node_id: r.string(MAX_NAME_BYTES, "node id")?,
                epoch: r.u64("epoch")?,
                namespace: optional(&mut r, |r| Ok(NamespaceId(r.array("namespace")?)))?,
                door: optional(&mut r, |r| {
                    let machine = r.string(MAX_NAME_BYTES, "machine")?;
                    Ok(LocalDoor { machine, name: r.string(MAX_NAME_BYTES, "door")? })
                })?,
            },
            129 => Response::Located(r.list(MAX_KEYS, "tiers", |r| TierCode::from_code(r.u8("tier")?))?),
            130 => Response::Page {
                index: r.u32("index")?,
                tier: TierCode::from_code(r.u8("tier")?)?,
                meta: PageMeta::decode(&mut r)?,
                place: Place::read(&mut r)?,
            },
            131 => Response::Miss { index: r.u32("index")? },
            132 => Response::End,
            133 => Response::Part { part: r.u32("part")?, crcs: crcs(&mut r)? },
            134 => Response::FollowEnd {
                state: FollowState::from_code(r.u8("state")?)?,
                meta: optional(&mut r, PageMeta::decode)?,
            },
            135 => Response::Reserved { outcomes: outcomes(&mut r)?, retry_after_ms: 0 },
            147 => match (outcomes(&mut r)?, r.u32("retry after")?) {
                (_, 0) => return Err(DecodeError::Invalid("retry after")),
                (outcomes, retry_after_ms) => Response::Reserved { outcomes, retry_after_ms },
            },
            136 => Response::Committed(r.list(MAX_PUTS, "outcomes", |r| CommitOutcome::from_code(r.u8("outcome")?))?),
            137 => Response::Count(r.u32("count")?),
            138 => Response::Members(r.list(MAX_MEMBERS, "members", |r| {
                Ok(MemberEntry {
                    name: r.string(MAX_NAME_BYTES, "member name")?,
                    info: r.string(MAX_INFO_BYTES, "member info")?,
                })
            })?),
            139 => Response::Status(r.string(MAX_TEXT_BYTES, "status")?),
            140 => Response::Error {
                code: ErrorCode::from_code(r.u8("error code")?)?,
                message: r.string(MAX_TEXT_BYTES, "message")?,
            },
            141 => Response::Looked {
                tiers: r.list(MAX_KEYS, "tiers", |r| TierCode::from_code(r.u8("tier")?))?,
                held: r.u32("held")?,
                l3_expected_us: r.u32("expected time")?,
            },
            142 => Response::Lines(r.list(MAX_LINES, "ends of lines", LineEnd::read)?),
            143 => Response::Windows(r.list(MAX_WINDOWS, "windows", |r| {
                Ok(PartWindow { index: r.u32("index")?, part: r.u32("part")?, window: LineWindow::read(r)? })
            })?),
            145 => Response::Range {
                index: r.u32("index")?,
                tier: TierCode::from_code(r.u8("tier")?)?,
                meta: PageMeta::decode(&mut r)?,
                bytes: range(&mut r)?,
                place: Place::read(&mut r)?,
            },
            146 => {
                Response::Busy { index: optional(&mut r, |r| r.u32("index"))?, retry_after_ms: r.u32("retry after")? }
            }
            148 => Response::Places(r.list(MAX_PLACES, "places", |r| {
                Ok(Placed {
                    index: r.u32("index")?,
                    tier: TierCode::from_code(r.u8("tier")?)?,
                    meta: PageMeta::decode(r)?,
                    bytes: range(r)?,
                    offset: r.u64("offset in the arena")?,
                })
            })?),
            _ => return Err(DecodeError::Invalid("response kind")),
        };
        r.finish()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PROTOCOL_VERSION;
    use larder_format::{PageId, PageKey};
    use proptest::prelude::*;

    fn meta() -> PageMeta {
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        PageMeta::describe(id, PageKey::NONE, 1, vec![3, 2], b"abcde")
    }

    #[test]
    fn responses_round_trip() {
        let window = LineWindow { line: 1, address: 1 << 40, len: 5, key: 9 };
        for message in [
            Response::Hello {
                version: 1,
                node_id: "n".into(),
                epoch: 3,
                namespace: Some(NamespaceId([5; 32])),
                door: Some(LocalDoor { machine: "m".into(), name: "d".into() }),
            },
            Response::Located(vec![TierCode::L2, TierCode::Nowhere, TierCode::L3]),
            Response::Page { index: 1, tier: TierCode::L3, meta: meta(), place: Place::Payload },
            Response::Page { index: 1, tier: TierCode::L2, meta: meta(), place: Place::Arena(4096) },
            Response::Places(vec![
                Placed { index: 1, tier: TierCode::L2, meta: meta(), bytes: 0..3, offset: 4096 },
                Placed { index: 0, tier: TierCode::L2, meta: meta(), bytes: 1..2, offset: 1 << 40 },
            ]),
            Response::Lines(vec![LineEnd { line: 2, address: [7; 32] }]),
            Response::Windows(vec![PartWindow { index: 1, part: 2, window }]),
            Response::Range { index: 1, tier: TierCode::L2, meta: meta(), bytes: 0..3, place: Place::Window(window) },
            Response::Looked { tiers: vec![TierCode::L2, TierCode::L3], held: 1, l3_expected_us: 500 },
            Response::Miss { index: 2 },
            Response::End,
            Response::Part { part: 1, crcs: vec![7] },
            Response::FollowEnd { state: FollowState::Sealed, meta: Some(meta()) },
            Response::Reserved { outcomes: vec![ReserveOutcome::Granted, ReserveOutcome::Busy], retry_after_ms: 7 },
            Response::Reserved { outcomes: vec![ReserveOutcome::Exists], retry_after_ms: 0 },
            Response::Busy { index: Some(3), retry_after_ms: 1 },
            Response::Busy { index: None, retry_after_ms: 1000 },
            Response::Committed(vec![CommitOutcome::Refused]),
            Response::Count(5),
            Response::Members(vec![MemberEntry { name: "a".into(), info: "{}".into() }]),
            Response::Status("{}".into()),
            Response::Error { code: ErrorCode::Busy, message: "later".into() },
        ] {
            let (kind, body) = message.encode();
            assert_eq!(Response::decode(PROTOCOL_VERSION, kind, &body).unwrap(), message);
            assert_eq!(Response::decode(1, kind, &body).is_ok(), kind <= 141, "{message:?} in version 1");
        }
    }

    proptest! {
        #[test]
        fn noise_never_panics(kind: u8, body in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Response::decode(PROTOCOL_VERSION, kind, &body);
        }
    }
}
