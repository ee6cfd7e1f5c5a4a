//! The framed binary protocol between Larder clients and store nodes.
//!
//! A connection is a sequence of frames in each direction. The client's first frame is
//! [`Request::Hello`], and the node's first frame answers it. After that the client multiplexes
//! requests by number, and the node answers them in any order. `docs/protocol.md` describes the
//! protocol in full.
//!
//! ```text
//! 0   magic "LRDR"            4
//! 4   kind                    1     which message the body holds
//! 5   flags                   1     0; 1: the payload follows in fragments; 2: a fragment
//! 6   reserved, zero          2
//! 8   request number          8     chosen by the client; responses repeat it
//! 16  body bytes              4     at most MAX_BODY_BYTES
//! 20  payload bytes           4     at most MAX_PAGE_BYTES
//! 24  deadline, milliseconds  4     time left to the request; 0 in responses
//! 28  check                   4     CRC-32 over bytes 0..28 and the body, xor the sequence number
//! 32  body, then payload
//! ```
//!
//! The payload holds page bytes and nothing else, so that a peer receives it straight into its
//! final memory. Its CRCs, one per 64 KiB chunk, travel in the body. All numbers are little-endian.
//!
//! Invariants:
//! - Each kind of message is declared once, in `messages.rs`. The tables of `docs/protocol.md` are
//!   tested against that declaration.
//! - A decoder checks every length against a named limit before it allocates.
//! - A peer never sends messages newer than the negotiated version. Receiving one is a protocol
//!   error, as for any unknown kind.
//! - One message has one encoding: decoding and encoding again yields the same bytes.
//!
//! Layout: `frame` reads and writes frames. `request` and `response` hold the messages, each with
//! its `codec`, and `fields` and `codes` their parts. `stream` and `busy_poll` are the byte streams
//! below.

// The simulation runs this crate: see store/clippy.toml.
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod busy_poll;
mod codes;
mod fields;
mod frame;
mod limits;
mod messages;
mod request;
mod response;

mod stream;

pub use busy_poll::{BusyPollSource, DEFAULT_BUSY_POLL};
pub use codes::{CommitOutcome, ErrorCode, FollowState, Hint, MissReason, PinKind, ReserveOutcome, TierCode};
pub use fields::{
    Delivery, Entry, Explanation, Extent, GrantedRange, PagePin, PageRange, PartLocation, PayloadLocation, RdmaEndpoint,
};
pub use frame::{
    FRAGMENT_BYTES, Frame, FrameHead, FrameHeader, FrameQueue, FrameReader, FrameWriter, HEADER_BYTES, MAX_BODY_BYTES,
    Payload, PayloadGuard, Piece, QueuedPayloads, YieldBudget,
};
pub use limits::{
    MAX_ARENA_PAGES, MAX_EXPLAINED, MAX_EXTENT_FILES, MAX_EXTENTS, MAX_HOLD_MS, MAX_INFO_BYTES, MAX_KEYS, MAX_MEMBERS,
    MAX_NAME_BYTES, MAX_PART_GRANTS, MAX_PIN_MS, MAX_PUTS, MAX_RDMA_CHANNELS,
};
pub use messages::{MessageInfo, REQUESTS, RESPONSES};
pub use request::{Request, Reserved};
pub use response::{ArenaListenerInfo, ArenaPage, MemberEntry, PartGrant, PutEnd, Response, SharedResponse};
pub use stream::{ByteSink, ByteSource, TryReceive, prepare_socket};

/// Newest protocol version of this build. Hello offers it, and the node answers with the newest
/// version that both sides speak.
pub const PROTOCOL_VERSION: u16 = 10;
/// Oldest protocol version of this build. A peer that speaks only older ones is refused in the
/// handshake.
pub const PROTOCOL_VERSION_MIN: u16 = 1;

/// First version with [`Request::GetRanges`]. Older nodes send whole pages, so a client asks them
/// for the pages and copies the ranges.
pub const VERSION_PAGE_RANGES: u16 = 2;
/// First version in which a client shares memory with a node, which copies parts of puts from
/// there.
pub const VERSION_SHARED_MEMORY_PUTS: u16 = 2;
/// First version with [`Response::ArenaPages`]. Older peers describe one page per message.
pub const VERSION_ARENA_PAGES: u16 = 2;
/// First version in which pages move by RDMA. A client neither offers channels nor asks for grants
/// in older ones.
pub const VERSION_RDMA: u16 = 2;
/// First version in which an overloaded node says when to retry. Before, it answers with misses or
/// errors.
pub const VERSION_RETRY_AFTER: u16 = 2;
/// First version with [`Request::Pins`]. Older nodes treat it as an unknown kind, so a client must
/// not send it to them.
pub const VERSION_PIN_STATUS: u16 = 3;
/// First version in which large payloads travel in fragments. To an older peer a payload leaves in
/// one frame, which nothing can interrupt.
pub const VERSION_FRAGMENTS: u16 = 4;
/// First version with [`Reserved::copy_of`] and [`PutEnd::generation`]. An older node cannot refuse
/// copies of forgotten pages, so a client puts no copies there.
pub const VERSION_COPIES: u16 = 5;
/// First version with [`Request::Ping`]. Clients probe older nodes with another small request.
pub const VERSION_PING: u16 = 5;
/// First version with [`Request::RdmaProgress`]. Clients of older nodes do not report progress, so
/// a node may take them for silent.
pub const VERSION_RDMA_PROGRESS: u16 = 6;
/// First version with [`Request::Hint`]. Older nodes learn nothing of generations, so a client
/// sends them no hints.
pub const VERSION_HINTS: u16 = 7;
/// First version with [`Request::Explain`] and [`ReserveOutcome::Retired`]. A client of an older
/// node learns no reasons of misses.
pub const VERSION_EXPLAIN: u16 = 8;
/// First version with [`Reserved::token_ids`]. An older node stores pages without them.
pub const VERSION_TOKEN_IDS: u16 = 9;
/// First version with [`Request::Extents`] and [`Request::Lookup`]'s `load_l3`. Pages of an older
/// node reach a client through the node only.
pub const VERSION_EXTENTS: u16 = 10;
