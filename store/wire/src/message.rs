//! Messages: what the bodies of frames say.

use crate::frame::{Frame, Payload};
use larder_format::codec::{DecodeError, Put, Reader, Result};
use larder_format::page::MAX_CHUNKS;
use larder_format::{MAX_PARTS, NamespaceDescriptor, NamespaceId, PageKey, PageMeta};

/// Most keys in one message.
pub const MAX_KEYS: usize = 8192;
/// Most pages reserved, or sealed, by one message.
pub const MAX_PUTS: usize = 1024;
/// Most members a node keeps.
pub const MAX_MEMBERS: usize = 1024;
/// Most bytes of a member's name.
pub const MAX_NAME_BYTES: usize = 256;
/// Most bytes of what a member says of itself.
pub const MAX_INFO_BYTES: usize = 16 << 10;
/// Longest time for which a lookup holds pages, in milliseconds.
pub const MAX_HOLD_MS: u32 = 60_000;
/// Longest time for which pages are pinned, in milliseconds: 30 days.
pub const MAX_PIN_MS: u64 = 30 * 24 * 3_600_000;
const MAX_TEXT_BYTES: usize = 256 << 10;

/// Declares a small enum with its wire code.
macro_rules! codes {
    ($(#[$meta:meta])* $name:ident, $what:literal { $($(#[$vmeta:meta])* $variant:ident = $code:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$vmeta])* $variant),+ }
        impl $name {
            fn code(self) -> u8 { match self { $(Self::$variant => $code),+ } }
            fn from_code(code: u8) -> Result<Self> {
                match code { $($code => Ok(Self::$variant),)+ _ => Err(DecodeError::Invalid($what)) }
            }
        }
    };
}

codes!(
    /// Where a page lies on a node.
    TierCode, "tier" {
        /// Not on this node.
        Nowhere = 0,
        /// In DRAM.
        L2 = 2,
        /// On NVMe.
        L3 = 3,
    }
);
codes!(
    /// Answer to a reservation.
    ReserveOutcome, "reserve outcome" {
        /// Parts may be sent.
        Granted = 1,
        /// The page is there.
        Exists = 2,
        /// Another writer is at it.
        InProgress = 3,
        /// No room now.
        Busy = 4,
        /// Not a page of this namespace, or a put of this number is open: asking again is of no use.
        Malformed = 5,
    }
);
codes!(
    /// Answer to a commit.
    CommitOutcome, "commit outcome" {
        /// The page is sealed and served.
        Stored = 1,
        /// It was there with the same bytes.
        AlreadyThere = 2,
        /// It was there with other bytes; the first stay.
        Refused = 3,
        /// Parts are missing or damaged, or the put is not known: nothing was stored.
        Incomplete = 4,
    }
);
codes!(
    /// How a followed page ended.
    FollowState, "follow state" {
        /// Sealed.
        Sealed = 1,
        /// The writer gave up.
        Aborted = 2,
        /// Not there before the deadline.
        Miss = 3,
    }
);
codes!(
    /// How firmly L2 holds a page.
    PinKind, "pin kind" {
        /// Not at all: a pin ends.
        None = 0,
        /// It goes only when nothing else can.
        Soft = 1,
        /// It stays, and so do the pages before it that are in L2.
        Hard = 2,
    }
);
codes!(
    /// What went wrong, as far as the other side should act on it.
    ErrorCode, "error code" {
        /// No common protocol version.
        Version = 1,
        /// The message cannot be understood.
        Malformed = 2,
        /// The message needs a namespace and the connection has none, or comes before Hello.
        State = 3,
        /// Too much at once; try again later.
        Busy = 4,
        /// The node failed.
        Internal = 5,
    }
);

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

/// One of the pages that a request named: a put that it reserved, or a page that is held for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Number of the request.
    pub request: u64,
    /// Index in that request.
    pub index: u32,
}

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
        /// Say where the bytes lie in the node's arena, which the client has mapped, and hold them there, instead of sending
        /// them. The node sends them all the same if it holds too much already.
        in_place: bool,
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
    /// One part of a put, as payload; no answer.
    Part {
        /// The put.
        put: Entry,
        /// Part index.
        part: u32,
        /// CRC of each chunk.
        crcs: Vec<u32>,
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
    /// A page; the payload holds its bytes, unless they are read in place.
    Page {
        /// Index in the request.
        index: u32,
        /// Where it was.
        tier: TierCode,
        /// Identity and checksums.
        meta: PageMeta,
        /// Offset in the node's arena. The bytes stay there until the page is released, or nobody has the arena any more.
        place: Option<u64>,
    },
    /// A page that cannot be served.
    Miss {
        /// Index in the request.
        index: u32,
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
    /// Answer to Reserve, in the order of the pages: granted or why not.
    Reserved(Vec<ReserveOutcome>),
    /// Answer to Commit, in the order of the puts, and to Compare.
    Committed(Vec<CommitOutcome>),
    /// A number.
    Count(u32),
    /// All members.
    Members(Vec<MemberEntry>),
    /// The node's state, JSON.
    Status(String),
    /// The request failed.
    Error {
        /// What to do about it.
        code: ErrorCode,
        /// For people.
        message: String,
    },
}

fn put_keys(out: &mut Vec<u8>, keys: &[PageKey]) {
    out.put_list(keys, |out, key| out.put(&key.0));
}

fn put_entry(out: &mut Vec<u8>, put: &Entry) {
    out.put_u64(put.request);
    out.put_u32(put.index);
}

fn entry(reader: &mut Reader<'_>) -> Result<Entry> {
    Ok(Entry { request: reader.u64("put")?, index: reader.u32("index of a put")? })
}

fn key(reader: &mut Reader<'_>) -> Result<PageKey> {
    Ok(PageKey(reader.array("page key")?))
}

fn keys(reader: &mut Reader<'_>) -> Result<Vec<PageKey>> {
    reader.list(MAX_KEYS, "keys", key)
}

fn crcs(reader: &mut Reader<'_>) -> Result<Vec<u32>> {
    reader.list(MAX_CHUNKS, "crcs", |r| r.u32("crc"))
}

fn flag(reader: &mut Reader<'_>) -> Result<bool> {
    match reader.u8("flag")? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Invalid("flag")),
    }
}

fn optional<T>(reader: &mut Reader<'_>, item: impl FnOnce(&mut Reader<'_>) -> Result<T>) -> Result<Option<T>> {
    match reader.u8("presence")? {
        0 => Ok(None),
        1 => item(reader).map(Some),
        _ => Err(DecodeError::Invalid("presence")),
    }
}

impl Request {
    /// The kind and body of this message.
    fn encode(&self) -> (u8, Vec<u8>) {
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
            Request::Get { keys, in_place } => {
                put_keys(&mut out, keys);
                out.put_u8(u8::from(*in_place));
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
            Request::Part { put, part, crcs } => {
                put_entry(&mut out, put);
                out.put_u32(*part);
                out.put_list(crcs, |out, &c| out.put_u32(c));
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
        };
        (kind, out)
    }

    /// A frame of this request.
    pub fn frame(&self, request: u64, deadline_ms: u32, payload: Option<Payload>) -> Frame {
        let (kind, body) = self.encode();
        Frame::new(kind, request, deadline_ms, &body, payload)
    }

    /// Reads a body of kind `kind`.
    pub fn decode(kind: u8, body: &[u8]) -> Result<Self> {
        let mut r = Reader::new(body);
        let message = match kind {
            1 => Request::Hello {
                version_min: r.u16("version")?,
                version_max: r.u16("version")?,
                name: r.string(MAX_NAME_BYTES, "client name")?,
                namespace: optional(&mut r, NamespaceDescriptor::decode)?,
            },
            2 => Request::Locate(keys(&mut r)?),
            3 => Request::Get { keys: keys(&mut r)?, in_place: flag(&mut r)? },
            4 => Request::Reserve(r.list(MAX_PUTS, "pages to reserve", |r| {
                Ok(Reserved {
                    key: key(r)?,
                    parent: key(r)?,
                    position: r.u32("position")?,
                    ttl_ms: r.u64("ttl")?,
                    part_bytes: r.list(MAX_PARTS, "part table", |r| r.u32("part bytes"))?,
                })
            })?),
            5 => Request::Part { put: entry(&mut r)?, part: r.u32("part")?, crcs: crcs(&mut r)? },
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
            _ => return Err(DecodeError::Invalid("request kind")),
        };
        r.finish()?;
        Ok(message)
    }
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
                out.put_u8(u8::from(place.is_some()));
                if let Some(place) = place {
                    out.put_u64(*place);
                }
                130
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
            Response::Reserved(outcomes) => {
                out.put_list(outcomes, |out, outcome| out.put_u8(outcome.code()));
                135
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

    /// A frame of this answer to `request`.
    pub fn frame(&self, request: u64, payload: Option<Payload>) -> Frame {
        let (kind, body) = self.encode();
        Frame::new(kind, request, 0, &body, payload)
    }

    /// Reads a body of kind `kind`.
    pub fn decode(kind: u8, body: &[u8]) -> Result<Self> {
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
                place: optional(&mut r, |r| r.u64("place"))?,
            },
            131 => Response::Miss { index: r.u32("index")? },
            132 => Response::End,
            133 => Response::Part { part: r.u32("part")?, crcs: crcs(&mut r)? },
            134 => Response::FollowEnd {
                state: FollowState::from_code(r.u8("state")?)?,
                meta: optional(&mut r, PageMeta::decode)?,
            },
            135 => Response::Reserved(r.list(MAX_PUTS, "outcomes", |r| ReserveOutcome::from_code(r.u8("outcome")?))?),
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
            _ => return Err(DecodeError::Invalid("response kind")),
        };
        r.finish()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{PageId, chunk_crcs};
    use proptest::prelude::*;

    fn meta() -> PageMeta {
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        PageMeta::describe(id, PageKey::NONE, 1, vec![3, 2], b"abcde")
    }

    #[test]
    fn requests_round_trip() {
        let crcs: Vec<u32> = chunk_crcs(b"abc").collect();
        let put = Entry { request: 3, index: 1 };
        for message in [
            Request::Hello { version_min: 1, version_max: 2, name: "x".into(), namespace: None },
            Request::Locate(vec![PageKey([1; 32]); 3]),
            Request::Get { keys: vec![], in_place: true },
            Request::Lookup { keys: vec![PageKey([1; 32])], hold_ms: 5 },
            Request::Release(vec![put; 2]),
            Request::Reserve(vec![Reserved {
                key: PageKey([1; 32]),
                parent: PageKey::NONE,
                position: 7,
                ttl_ms: 1,
                part_bytes: vec![1, 2],
            }]),
            Request::Part { put, part: 2, crcs },
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
            let (kind, body) = message.encode();
            assert_eq!(Request::decode(kind, &body).unwrap(), message);
            let mut longer = body.clone();
            longer.push(0);
            assert!(Request::decode(kind, &longer).is_err(), "{message:?} with a byte too many");
        }
    }

    #[test]
    fn responses_round_trip() {
        for message in [
            Response::Hello {
                version: 1,
                node_id: "n".into(),
                epoch: 3,
                namespace: Some(NamespaceId([5; 32])),
                door: Some(LocalDoor { machine: "m".into(), name: "d".into() }),
            },
            Response::Located(vec![TierCode::L2, TierCode::Nowhere, TierCode::L3]),
            Response::Page { index: 1, tier: TierCode::L3, meta: meta(), place: None },
            Response::Page { index: 1, tier: TierCode::L2, meta: meta(), place: Some(4096) },
            Response::Looked { tiers: vec![TierCode::L2, TierCode::L3], held: 1, l3_expected_us: 500 },
            Response::Miss { index: 2 },
            Response::End,
            Response::Part { part: 1, crcs: vec![7] },
            Response::FollowEnd { state: FollowState::Sealed, meta: Some(meta()) },
            Response::Reserved(vec![ReserveOutcome::Granted, ReserveOutcome::Busy]),
            Response::Committed(vec![CommitOutcome::Refused]),
            Response::Count(5),
            Response::Members(vec![MemberEntry { name: "a".into(), info: "{}".into() }]),
            Response::Status("{}".into()),
            Response::Error { code: ErrorCode::Busy, message: "later".into() },
        ] {
            let (kind, body) = message.encode();
            assert_eq!(Response::decode(kind, &body).unwrap(), message);
        }
    }

    proptest! {
        #[test]
        fn noise_never_panics(kind: u8, body in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Request::decode(kind, &body);
            let _ = Response::decode(kind, &body);
        }
    }
}
