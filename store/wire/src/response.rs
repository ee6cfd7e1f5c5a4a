//! Messages from nodes to clients. Their numbers, versions and limits are in `messages.rs`, their
//! encoding is in `codec`.

mod codec;

pub use codec::SharedResponse;

use crate::codes::{CommitOutcome, ErrorCode, FollowState, ReserveOutcome, TierCode};
use crate::fields::{Explanation, Extent, GrantedRange, PagePin, PayloadLocation, RdmaEndpoint};
use larder_format::{NamespaceId, PageMeta};
use std::ops::Range;

/// Address of the socket by which processes on the node's machine map its arena. Processes
/// elsewhere cannot reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaListenerInfo {
    /// Boot id of the node's kernel. A client with another boot id runs on another machine.
    pub machine: String,
    /// Name of an abstract UNIX socket.
    pub name: String,
}

/// A registered process of the installation. The node only keeps it: clients give its description a
/// meaning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberEntry {
    /// Unique name.
    pub name: String,
    /// JSON description that the member gave.
    pub info: String,
}

/// RDMA write access to one part of a put. The grant covers the part alone, and ends with the put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartGrant {
    /// Index of the page in the Reserve.
    pub index: u32,
    /// Index of the part.
    pub part: u32,
    /// Memory to write the part to.
    pub range: GrantedRange,
}

/// End of one put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PutEnd {
    /// Outcome for the writer.
    pub outcome: CommitOutcome,
    /// Generation of the page that the node has now, if it has the writer's bytes, else 0. With it
    /// the writer can put a copy later: see [`Reserved::copy_of`](crate::Reserved::copy_of).
    pub generation: u64,
}

/// A page, or a range of one, that the client reads in the node's arena. The node holds it until
/// the client releases it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaPage {
    /// Index in the request.
    pub index: u32,
    /// Tier that had the page.
    pub tier: TierCode,
    /// Identity and CRCs of the whole page.
    pub meta: PageMeta,
    /// Range of the page's payload.
    pub bytes: Range<u32>,
    /// Offset of the range in the arena, in bytes.
    pub offset: u64,
}

/// A message from a node to a client. Its frame repeats the number of the request that it answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Response {
    /// Handshake: answers Hello.
    Hello {
        /// Protocol version of the connection from here on: the newest that both sides speak.
        version: u16,
        /// Name of the node, kept in its data directory.
        node_id: String,
        /// Number of the node's run. It grows with each start. Another epoch tells a client that L2
        /// is empty.
        epoch: u64,
        /// Namespace of the connection, if it has one.
        namespace: Option<NamespaceId>,
        /// Address for clients on the same machine, if the node shares its arena.
        arena_listener: Option<ArenaListenerInfo>,
    },
    /// Answers Locate: the tier of each page, in the order of the keys.
    Located(Vec<TierCode>),
    /// Answers Lookup: the longest servable prefix. It ends before the first page that the node
    /// cannot serve.
    LookedUp {
        /// Tier of each page of the prefix.
        tiers: Vec<TierCode>,
        /// Number of pages that the node holds, from the first on. Each is an
        /// [`Entry`](crate::Entry) of the request.
        held: u32,
        /// Expected time to load one page from [`TierCode::L3`], in microseconds.
        l3_expected_us: u32,
    },
    /// A page of a Get. The node sends pages in any order, and each at most once.
    Page {
        /// Index in the request.
        index: u32,
        /// Tier that had the page.
        tier: TierCode,
        /// Identity and CRCs of the page.
        meta: PageMeta,
        /// Location of the page's bytes.
        location: PayloadLocation,
    },
    /// A range of a GetRanges. Its bytes are whole chunks, so the client can verify them alone.
    Range {
        /// Index in the request.
        index: u32,
        /// Tier that had the page.
        tier: TierCode,
        /// Identity and CRCs of the whole page.
        meta: PageMeta,
        /// Range of the page's payload.
        bytes: Range<u32>,
        /// Location of the range's bytes.
        location: PayloadLocation,
    },
    /// Several pages of a Get, or ranges of a GetRanges, that the client reads in place.
    ArenaPages(Vec<ArenaPage>),
    /// A page or range that the node cannot serve. A client treats it as absent, and must not
    /// conclude that it was deleted.
    Miss {
        /// Index in the request.
        index: u32,
    },
    /// The node is overloaded and refuses the request, or the last pages of a Get. It is no miss:
    /// the node may have the pages.
    Busy {
        /// First refused index of the request. `None`: the whole request, and no other response
        /// follows.
        index: Option<u32>,
        /// Time to wait before a retry, in milliseconds, at least 1.
        retry_after_ms: u32,
    },
    /// The node has answered every page of a Get or GetRanges. No further response to this request
    /// follows.
    End,
    /// A part of a followed page, as payload. The index tells its place, so no part has to wait for
    /// an earlier one.
    Part {
        /// Index of the part.
        part: u32,
        /// CRC of each chunk of the part.
        crcs: Vec<u32>,
    },
    /// End of a followed page. The client may use the parts only if the state is sealed.
    FollowEnd {
        /// Reason.
        state: FollowState,
        /// Identity and CRCs of the page if it was sealed.
        meta: Option<PageMeta>,
    },
    /// Answers Reserve.
    Reserved {
        /// One outcome per page, in the order of the request.
        outcomes: Vec<ReserveOutcome>,
        /// Time to wait before a retry of busy pages, in milliseconds. 0 if no page is busy.
        retry_after_ms: u32,
    },
    /// Answers Commit with the end of each put, in the order of the request. Also answers Compare.
    Committed(Vec<PutEnd>),
    /// A number. The request defines its meaning.
    Count(u32),
    /// Answers Members. The order of the members has no meaning.
    Members(Vec<MemberEntry>),
    /// Answers Status: the node's state as JSON.
    Status(String),
    /// Answers Ping.
    Pong,
    /// Answers Pins: the pin of each page, in the order of the keys.
    Pins(Vec<Option<PagePin>>),
    /// Answers Explain, in the order of the keys.
    Explained(Vec<Explanation>),
    /// Answers Extents. The descriptors of the files came over the arena session before, in one
    /// message with the number of the request.
    Extents {
        /// Number of the descriptors, at most [`MAX_EXTENT_FILES`](crate::MAX_EXTENT_FILES).
        files: u32,
        /// Extent of each page, in the order of the keys. `None`: the client gets the page by Get.
        extents: Vec<Option<Extent>>,
    },
    /// Answers an offer of RDMA channels: the node's ends of the channels that it connected.
    RdmaChannels(Vec<RdmaEndpoint>),
    /// Parts that the client may write by RDMA. Parts that are missing from the list travel another
    /// way.
    PartGrants(Vec<PartGrant>),
    /// The request failed. This is the last response to it, and earlier responses keep their
    /// meaning.
    Error {
        /// Error class, by which the client chooses its reaction.
        code: ErrorCode,
        /// Explanation for people.
        message: String,
    },
}
