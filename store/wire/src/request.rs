//! Messages of clients.

use crate::codes::PinKind;
use crate::fields::{
    Delivery, Entry, LineEnd, PageRange, PartBytes, crcs, entry, key, keys, lines, optional, part_bytes, put_entry,
    put_keys, put_lines, put_part_bytes, put_range, range,
};
use crate::frame::{Frame, Payload};
use crate::limits::{MAX_INFO_BYTES, MAX_KEYS, MAX_LINES, MAX_NAME_BYTES, MAX_PUTS};
use larder_format::codec::{DecodeError, Put, Reader, Result};
use larder_format::{MAX_PARTS, NamespaceDescriptor, PageKey};

/// The first version in which the bytes of a part may be elsewhere than in the payload.
const PARTS_ELSEWHERE: u16 = 2;

/// A request for room for one page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// Page key.
    pub key: PageKey,
    /// The page before it.
    pub parent: PageKey,
    /// Place in its sequence.
    pub position: u32,
    /// Milliseconds from its sealing after which the page is a miss; 0: never.
    pub ttl_ms: u64,
    /// Bytes of each part.
    pub part_bytes: Vec<u32>,
}

/// From client to node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// First on every connection: versions spoken, who this is, and whose pages.
    Hello {
        /// Oldest version spoken.
        version_min: u16,
        /// Newest version spoken.
        version_max: u16,
        /// For logs.
        name: String,
        /// Absent on administrative connections.
        namespace: Option<NamespaceDescriptor>,
    },
    /// Where each page lies → [`Response::Located`].
    Locate(Vec<PageKey>),
    /// Whole pages → one [`Response::Page`] or [`Response::Miss`] each, in any order, then [`Response::End`].
    Get {
        /// Page keys.
        keys: Vec<PageKey>,
        /// How they come. What the node cannot deliver so, or not now, it sends all the same.
        by: Delivery,
    },
    /// Parts of pages, or any of their chunks → one [`Response::Range`] or [`Response::Miss`] each, in any order, then
    /// [`Response::End`]. What is not whole chunks of a page is a miss.
    GetRanges {
        /// Which bytes of which pages.
        ranges: Vec<PageRange>,
        /// As in [`Request::Get`].
        by: Delivery,
    },
    /// The longest servable prefix of these pages, held for a while so that it can be read → [`Response::Looked`].
    Lookup {
        /// Page keys, from the start of a sequence.
        keys: Vec<PageKey>,
        /// Milliseconds for which pages are held, at most [`MAX_HOLD_MS`]; 0: not at all.
        hold_ms: u32,
    },
    /// Pages that were held for requests are held no longer; no answer.
    Release(Vec<Entry>),
    /// Room for pages → [`Response::Reserved`]. What is granted is named by this request: the client can give up puts whose
    /// grant it never heard of, and send parts before it has; those of pages that were not granted are thrown away.
    Reserve(Vec<Reserved>),
    /// One part of a put; no answer.
    Part {
        /// The put.
        put: Entry,
        /// Part index.
        part: u32,
        /// CRC of each chunk.
        crcs: Vec<u32>,
        /// Where its bytes are.
        bytes: PartBytes,
    },
    /// Seals puts → [`Response::Committed`].
    Commit(Vec<Entry>),
    /// Gives a put up; no answer.
    Abort(Entry),
    /// A page that is there, being written or about to be → [`Response::Part`]s, then [`Response::FollowEnd`].
    Follow(PageKey),
    /// Brings pages into L2 → [`Response::Count`] of those in L2.
    Warm(Vec<PageKey>),
    /// Forgets pages durably → [`Response::Count`] of those that were there.
    Forget(Vec<PageKey>),
    /// The bytes of this page did not check at the reader: look at your copy → [`Response::Count`] of copies dropped.
    Suspect(PageKey),
    /// Registers or renews a member → [`Response::Count`].
    Register {
        /// Unique name.
        name: String,
        /// Forgotten after this many milliseconds without renewal.
        ttl_ms: u32,
        /// JSON.
        info: String,
    },
    /// Withdraws a member → [`Response::Count`].
    Withdraw(String),
    /// All members → [`Response::Members`].
    Members,
    /// The node's state → [`Response::Status`].
    Status,
    /// Stop working on this request, and give up the puts it reserved; no answer.
    Cancel(u64),
    /// Is the page you hold the one with these chunk CRCs? → [`Response::Committed`]: already there, refused, or
    /// incomplete if there is none.
    Compare {
        /// Page key.
        key: PageKey,
        /// CRC of each chunk, part by part.
        crcs: Vec<u32>,
    },
    /// Holds pages in L2 for a while, or lets go of them → [`Response::Count`] of those that are held so now; Busy, and
    /// nothing is held that was not before, if there is no room for hard pins.
    Pin {
        /// Page keys.
        keys: Vec<PageKey>,
        /// How.
        kind: PinKind,
        /// Milliseconds until the pins end: above 0 unless `kind` is [`PinKind::None`], and at most [`MAX_PIN_MS`].
        ttl_ms: u64,
    },
    /// RDMA lines are made, and others have ended → [`Response::Lines`].
    Lines {
        /// Lines that are of no use any more.
        gone: Vec<u32>,
        /// The client's ends of new ones.
        offered: Vec<LineEnd>,
    },
    /// Windows for writing the parts of puts by RDMA → [`Response::Windows`], for those parts of what was granted that nothing has
    /// come for yet, as far as the node can.
    OpenParts {
        /// Number of the Reserve, which came before.
        reserve: u64,
        /// Lines that may be used, in turn.
        lines: Vec<u32>,
    },
}

impl Request {
    /// Whether a node that has too much under way may refuse requests of this kind unread. Those that end something, and
    /// those that keep an installation together, are always heard.
    pub fn may_be_refused(kind: u8) -> bool {
        const LOCATE: u8 = 2;
        const GET: u8 = 3;
        const RESERVE: u8 = 4;
        const FOLLOW: u8 = 8;
        const WARM: u8 = 9;
        const COMPARE: u8 = 17;
        const PIN: u8 = 18;
        const LOOKUP: u8 = 19;
        const GET_RANGES: u8 = 24;
        matches!(kind, LOCATE | GET | RESERVE | FOLLOW | WARM | COMPARE | PIN | LOOKUP | GET_RANGES)
    }

    /// The kind and body of this message.
    fn encode(&self, version: u16) -> (u8, Vec<u8>) {
        let mut out = Vec::new();
        let kind = match self {
            Request::Hello { version_min, version_max, name, namespace } => {
                out.put_u16(*version_min);
                out.put_u16(*version_max);
                out.put_string(name);
                out.put_u8(u8::from(namespace.is_some()));
                if let Some(namespace) = namespace {
                    namespace.encode(&mut out);
                }
                1
            }
            Request::Locate(keys) => {
                put_keys(&mut out, keys);
                2
            }
            Request::Get { keys, by } => {
                put_keys(&mut out, keys);
                by.put(&mut out);
                3
            }
            Request::Reserve(pages) => {
                out.put_list(pages, |out, page| {
                    out.put(&page.key.0);
                    out.put(&page.parent.0);
                    out.put_u32(page.position);
                    out.put_u64(page.ttl_ms);
                    out.put_list(&page.part_bytes, |out, &b| out.put_u32(b));
                });
                4
            }
            Request::Part { put, part, crcs, bytes } => {
                put_entry(&mut out, put);
                out.put_u32(*part);
                out.put_list(crcs, |out, &c| out.put_u32(c));
                if version >= PARTS_ELSEWHERE {
                    put_part_bytes(&mut out, bytes);
                }
                5
            }
            Request::Commit(puts) => {
                out.put_list(puts, put_entry);
                6
            }
            Request::Abort(put) => {
                put_entry(&mut out, put);
                7
            }
            Request::Follow(key) => {
                out.put(&key.0);
                8
            }
            Request::Warm(keys) => {
                put_keys(&mut out, keys);
                9
            }
            Request::Forget(keys) => {
                put_keys(&mut out, keys);
                10
            }
            Request::Suspect(key) => {
                out.put(&key.0);
                11
            }
            Request::Register { name, ttl_ms, info } => {
                out.put_string(name);
                out.put_u32(*ttl_ms);
                out.put_string(info);
                12
            }
            Request::Withdraw(name) => {
                out.put_string(name);
                13
            }
            Request::Members => 14,
            Request::Status => 15,
            Request::Cancel(request) => {
                out.put_u64(*request);
                16
            }
            Request::Compare { key, crcs } => {
                out.put(&key.0);
                out.put_list(crcs, |out, &c| out.put_u32(c));
                17
            }
            Request::Pin { keys, kind, ttl_ms } => {
                put_keys(&mut out, keys);
                out.put_u8(kind.code());
                out.put_u64(*ttl_ms);
                18
            }
            Request::Lookup { keys, hold_ms } => {
                put_keys(&mut out, keys);
                out.put_u32(*hold_ms);
                19
            }
            Request::Release(entries) => {
                out.put_list(entries, put_entry);
                20
            }
            Request::GetRanges { ranges, by } => {
                out.put_list(ranges, |out, range| {
                    out.put(&range.key.0);
                    put_range(out, &range.bytes);
                });
                by.put(&mut out);
                24
            }
            Request::Lines { gone, offered } => {
                put_lines(&mut out, gone);
                out.put_list(offered, |out, end| end.put(out));
                21
            }
            Request::OpenParts { reserve, lines } => {
                out.put_u64(*reserve);
                put_lines(&mut out, lines);
                22
            }
        };
        (kind, out)
    }

    /// A frame of this request, as version `version` has it, in which there are such messages.
    pub fn frame(&self, version: u16, request: u64, deadline_ms: u32, payload: Option<Payload>) -> Frame {
        let (kind, body) = self.encode(version);
        debug_assert!(Self::since(kind) <= version, "no version says what it has no word for");
        Frame::new(kind, request, deadline_ms, &body, payload)
    }

    /// The first version that has messages of this kind.
    fn since(kind: u8) -> u16 {
        if kind <= 20 { 1 } else { 2 }
    }

    /// Reads a body of kind `kind`, as version `version` of the protocol has it.
    pub fn decode(version: u16, kind: u8, body: &[u8]) -> Result<Self> {
        if version < Self::since(kind) {
            return Err(DecodeError::Invalid("request kind in this version"));
        }
        let mut r = Reader::new(body);
        let message = match kind {
            1 => Request::Hello {
                version_min: r.u16("version")?,
                version_max: r.u16("version")?,
                name: r.string(MAX_NAME_BYTES, "client name")?,
                namespace: optional(&mut r, NamespaceDescriptor::decode)?,
            },
            2 => Request::Locate(keys(&mut r)?),
            3 => Request::Get { keys: keys(&mut r)?, by: Delivery::read(&mut r)? },
            4 => Request::Reserve(r.list(MAX_PUTS, "pages to reserve", |r| {
                Ok(Reserved {
                    key: key(r)?,
                    parent: key(r)?,
                    position: r.u32("position")?,
                    ttl_ms: r.u64("ttl")?,
                    part_bytes: r.list(MAX_PARTS, "part table", |r| r.u32("part bytes"))?,
                })
            })?),
            5 => Request::Part {
                put: entry(&mut r)?,
                part: r.u32("part")?,
                crcs: crcs(&mut r)?,
                bytes: match version {
                    PARTS_ELSEWHERE.. => part_bytes(&mut r)?,
                    _ => PartBytes::Payload,
                },
            },
            6 => Request::Commit(r.list(MAX_PUTS, "puts to seal", entry)?),
            7 => Request::Abort(entry(&mut r)?),
            8 => Request::Follow(key(&mut r)?),
            9 => Request::Warm(keys(&mut r)?),
            10 => Request::Forget(keys(&mut r)?),
            11 => Request::Suspect(key(&mut r)?),
            12 => Request::Register {
                name: r.string(MAX_NAME_BYTES, "member name")?,
                ttl_ms: r.u32("ttl")?,
                info: r.string(MAX_INFO_BYTES, "member info")?,
            },
            13 => Request::Withdraw(r.string(MAX_NAME_BYTES, "member name")?),
            14 => Request::Members,
            15 => Request::Status,
            16 => Request::Cancel(r.u64("request")?),
            17 => Request::Compare { key: key(&mut r)?, crcs: crcs(&mut r)? },
            18 => Request::Pin {
                keys: keys(&mut r)?,
                kind: PinKind::from_code(r.u8("pin kind")?)?,
                ttl_ms: r.u64("ttl")?,
            },
            19 => Request::Lookup { keys: keys(&mut r)?, hold_ms: r.u32("hold")? },
            20 => Request::Release(r.list(MAX_KEYS, "pages to release", entry)?),
            21 => Request::Lines { gone: lines(&mut r)?, offered: r.list(MAX_LINES, "ends of lines", LineEnd::read)? },
            22 => Request::OpenParts { reserve: r.u64("reserve")?, lines: lines(&mut r)? },
            24 => Request::GetRanges {
                ranges: r.list(MAX_KEYS, "ranges", |r| Ok(PageRange { key: key(r)?, bytes: range(r)? }))?,
                by: Delivery::read(&mut r)?,
            },
            _ => return Err(DecodeError::Invalid("request kind")),
        };
        r.finish()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PROTOCOL_VERSION;
    use larder_format::chunk_crcs;
    use proptest::prelude::*;

    #[test]
    fn requests_round_trip() {
        let crcs: Vec<u32> = chunk_crcs(b"abc").collect();
        let put = Entry { request: 3, index: 1 };
        for message in [
            Request::Hello { version_min: 1, version_max: 2, name: "x".into(), namespace: None },
            Request::Locate(vec![PageKey([1; 32]); 3]),
            Request::Get { keys: vec![], by: Delivery::Sent },
            Request::Get { keys: vec![], by: Delivery::InPlace },
            Request::Lines { gone: vec![1], offered: vec![LineEnd { line: 2, address: [7; 32] }] },
            Request::OpenParts { reserve: 3, lines: vec![1, 2] },
            Request::GetRanges {
                ranges: vec![PageRange { key: PageKey([1; 32]), bytes: 3..9 }; 2],
                by: Delivery::Read(vec![3, 1]),
            },
            Request::Lookup { keys: vec![PageKey([1; 32])], hold_ms: 5 },
            Request::Release(vec![put; 2]),
            Request::Reserve(vec![Reserved {
                key: PageKey([1; 32]),
                parent: PageKey::NONE,
                position: 7,
                ttl_ms: 1,
                part_bytes: vec![1, 2],
            }]),
            Request::Part { put, part: 2, crcs: crcs.clone(), bytes: PartBytes::Window },
            Request::Part { put, part: 2, crcs, bytes: PartBytes::Lent { offset: 1 << 40, bytes: 7 } },
            Request::Commit(vec![put; 3]),
            Request::Abort(put),
            Request::Follow(PageKey([4; 32])),
            Request::Warm(vec![PageKey([1; 32])]),
            Request::Forget(vec![PageKey([1; 32])]),
            Request::Suspect(PageKey([1; 32])),
            Request::Register { name: "e".into(), ttl_ms: 1000, info: "{}".into() },
            Request::Withdraw("e".into()),
            Request::Members,
            Request::Status,
            Request::Cancel(9),
            Request::Compare { key: PageKey([1; 32]), crcs: vec![1, 2] },
            Request::Pin { keys: vec![PageKey([1; 32])], kind: PinKind::Soft, ttl_ms: 5 },
        ] {
            let (kind, body) = message.encode(PROTOCOL_VERSION);
            assert_eq!(Request::decode(PROTOCOL_VERSION, kind, &body).unwrap(), message);
            let asks_for_work = matches!(
                message,
                Request::Locate(_)
                    | Request::Get { .. }
                    | Request::GetRanges { .. }
                    | Request::Reserve(_)
                    | Request::Follow(_)
                    | Request::Warm(_)
                    | Request::Compare { .. }
                    | Request::Pin { .. }
                    | Request::Lookup { .. }
            );
            assert_eq!(Request::may_be_refused(kind), asks_for_work, "{message:?}");
            let mut longer = body.clone();
            longer.push(0);
            let known = Request::decode(1, kind, &message.encode(1).1).is_ok();
            assert_eq!(known, kind <= 20, "{message:?} in version 1");
            assert!(Request::decode(PROTOCOL_VERSION, kind, &longer).is_err(), "{message:?} with a byte too many");
        }
    }

    proptest! {
        #[test]
        fn noise_never_panics(kind: u8, body in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Request::decode(PROTOCOL_VERSION, kind, &body);
        }
    }
}
