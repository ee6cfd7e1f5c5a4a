//! The framed binary protocol between Larder clients and store nodes.
//!
//! A connection is a sequence of frames in each direction. The first frame of a client is [`Request::Hello`], the first of
//! a node its answer; from then on requests are multiplexed by number and answered in any order. A frame is
//!
//! ```text
//! 0   magic "LRDR"            4
//! 4   kind                    1     which message the body holds
//! 5   reserved, zero          3
//! 8   request number          8     chosen by the client; answers repeat it
//! 16  body bytes              4     at most MAX_BODY_BYTES
//! 20  payload bytes           4     at most MAX_PAGE_BYTES
//! 24  deadline, milliseconds  4     what is left of the requester's patience; 0 in answers
//! 28  check                   4     CRC-32 over bytes 0..28 and the body, xor the number of the frame in its direction
//! 32  body, then payload
//! ```
//!
//! The payload is page bytes and nothing else, so that it can be received straight into the memory where it stays; its CRCs
//! (one per 64 KiB chunk) travel in the body. Everything is little-endian.
//!
//! Versions: 1 is the first; 2 adds ranges of pages. Peers of both speak to each other: what a version has not, its messages
//! have not, and what a kind of message is to a version that has it not is what it is to a stranger.
#![forbid(unsafe_code)]

mod codes;
mod fields;
mod frame;
mod limits;
mod request;
mod response;
mod spin;
mod stream;

pub use codes::{CommitOutcome, ErrorCode, FollowState, PinKind, ReserveOutcome, TierCode};
pub use fields::{Delivery, Entry, LineEnd, LineWindow, PageRange, PartBytes, Place};
pub use frame::{
    Frame, FrameHead, FrameHeader, FrameQueue, FrameReader, FrameWriter, HEADER_BYTES, MAX_BODY_BYTES, Payload, Turn,
};
pub use limits::{
    MAX_HOLD_MS, MAX_INFO_BYTES, MAX_KEYS, MAX_LINES, MAX_MEMBERS, MAX_NAME_BYTES, MAX_PIN_MS, MAX_PLACES, MAX_PUTS,
    MAX_WINDOWS,
};
pub use request::{Request, Reserved};
pub use response::{LocalDoor, MemberEntry, PartWindow, Placed, Response};
pub use spin::{SPIN, Spinning};
pub use stream::{Ready, Sink, Source};

/// Protocol version of this build.
pub const PROTOCOL_VERSION: u16 = 2;
/// First version that has ranges of pages.
pub const VERSION_OF_RANGES: u16 = 2;
/// First version in which a client lends memory, and puts from there.
pub const VERSION_OF_LENDING: u16 = 2;
/// First version in which one message says where many pages lie.
pub const VERSION_OF_PLACES: u16 = 2;
/// First version in which pages move by RDMA.
pub const VERSION_OF_LINES: u16 = 2;
/// Oldest version this build speaks.
pub const PROTOCOL_VERSION_MIN: u16 = 1;
/// First version in which a node that is too busy says when to try again.
pub const VERSION_OF_BUSY: u16 = 2;
