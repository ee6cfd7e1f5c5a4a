//! The table of messages: every kind of message is declared once, here.
//!
//! A row gives the pattern of the values that a kind carries, its name and number, the first
//! protocol version that has it, and the limits that its decoder enforces. A request's row also
//! says whether a node may shed it under overload. From the rows follow the kind enums, the kind of
//! a value, the decoding of a kind number and the public tables [`REQUESTS`] and [`RESPONSES`].
//!
//! Invariants:
//! - A number names one kind forever. A kind that is withdrawn leaves a gap (23 and 144 are gaps).
//! - Requests use the numbers below 128, responses the others.
//! - A kind that the negotiated version lacks does not decode. A peer that sends one violates the
//!   protocol.
//! - Tests compare the tables with `docs/protocol.md`, with the decoders' limits and with the fuzz
//!   corpus.

use crate::limits::{
    MAX_ARENA_PAGES, MAX_EXPLAINED, MAX_EXTENTS, MAX_INFO_BYTES, MAX_KEYS, MAX_MEMBERS, MAX_NAME_BYTES,
    MAX_PART_GRANTS, MAX_PUTS, MAX_RDMA_CHANNELS, MAX_TEXT_BYTES,
};
use crate::request::Request;
use crate::response::Response;
use larder_format::MAX_CHUNKS;
use larder_format::MAX_PARTS;
use larder_format::MAX_TOKEN_IDS;
use larder_format::codec::{DecodeError, Result};

/// One row of [`REQUESTS`] or [`RESPONSES`]. The tests compare `docs/protocol.md` and pinned
/// numbers with these rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageInfo {
    /// Number in the frame header. Deployed builds depend on it, so it never changes.
    pub kind: u8,
    /// Name of the message in `docs/protocol.md`.
    pub name: &'static str,
    /// First protocol version that has this kind. To an older version the kind is unknown, and
    /// receiving it is an error.
    pub since: u16,
    /// True if a node under overload may refuse the message without reading its body.
    pub sheddable: bool,
    /// Limits that the decoder enforces: the name of a list or text, and its maximum length. Lists
    /// count items, texts count bytes.
    pub limits: &'static [(&'static str, usize)],
}

/// Declares the kinds of one direction. The rows' patterns must cover the message type: the
/// compiler checks it. Earlier rows win where patterns overlap.
macro_rules! message_table {
    (
        $(#[$meta:meta])*
        $table:ident, $kinds:ident, $message:ident, $unknown:literal;
        $(
            $pattern:pat => $name:ident = $number:literal {
                since: $since:literal
                $(, sheddable: $sheddable:literal)?
                $(, limits: [$($limit:ident <= $max:expr),+])?
            }
        )+
    ) => {
        #[doc = concat!("Kinds of [`", stringify!($message), "`] on the wire.")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum $kinds { $($name = $number),+ }

        impl $kinds {
            pub(crate) fn decode(version: u16, number: u8) -> Result<Self> {
                match number {
                    $($number if version >= $since => Ok(Self::$name),)+
                    _ => Err(DecodeError::Invalid($unknown)),
                }
            }

            pub(crate) fn since_version(self) -> u16 {
                match self { $(Self::$name => $since),+ }
            }
        }

        impl $message {
            pub(crate) fn kind(&self) -> $kinds {
                match self { $($pattern => $kinds::$name),+ }
            }
        }

        $(#[$meta])*
        pub const $table: &[MessageInfo] = &[$(MessageInfo {
            kind: $number,
            name: stringify!($name),
            since: $since,
            sheddable: false $(| $sheddable)?,
            limits: &[$($((stringify!($limit), $max)),+)?],
        }),+];
    };
}

message_table! {
    /// All kinds of requests, by number.
    REQUESTS, RequestKind, Request, "request kind in this protocol version";
    Request::Hello { .. } => Hello = 1 { since: 1, limits: [name <= MAX_NAME_BYTES] }
    Request::Locate(_) => Locate = 2 { since: 1, sheddable: true, limits: [keys <= MAX_KEYS] }
    Request::Get { .. } => Get = 3 { since: 1, sheddable: true, limits: [keys <= MAX_KEYS, channels <= MAX_RDMA_CHANNELS] }
    Request::Reserve(_) => Reserve = 4 { since: 1, sheddable: true, limits: [pages <= MAX_PUTS, parts <= MAX_PARTS, tokens <= MAX_TOKEN_IDS] }
    Request::Part { .. } => Part = 5 { since: 1, limits: [crcs <= MAX_CHUNKS] }
    Request::Commit(_) => Commit = 6 { since: 1, limits: [puts <= MAX_PUTS] }
    Request::Abort(_) => Abort = 7 { since: 1 }
    Request::Follow(_) => Follow = 8 { since: 1, sheddable: true }
    Request::Warm(_) => Warm = 9 { since: 1, sheddable: true, limits: [keys <= MAX_KEYS] }
    Request::Forget(_) => Forget = 10 { since: 1, limits: [keys <= MAX_KEYS] }
    Request::Suspect(_) => Suspect = 11 { since: 1 }
    Request::Register { .. } => Register = 12 { since: 1, limits: [name <= MAX_NAME_BYTES, info <= MAX_INFO_BYTES] }
    Request::Withdraw(_) => Withdraw = 13 { since: 1, limits: [name <= MAX_NAME_BYTES] }
    Request::Members => Members = 14 { since: 1 }
    Request::Status => Status = 15 { since: 1 }
    Request::Cancel(_) => Cancel = 16 { since: 1 }
    Request::Compare { .. } => Compare = 17 { since: 1, sheddable: true, limits: [crcs <= MAX_CHUNKS] }
    Request::Pin { .. } => Pin = 18 { since: 1, sheddable: true, limits: [keys <= MAX_KEYS] }
    Request::Lookup { .. } => Lookup = 19 { since: 1, sheddable: true, limits: [keys <= MAX_KEYS] }
    Request::Release(_) => Release = 20 { since: 1, limits: [entries <= MAX_KEYS] }
    Request::RdmaChannels { .. } => RdmaChannels = 21 {
        since: 2, limits: [closed <= MAX_RDMA_CHANNELS, offered <= MAX_RDMA_CHANNELS]
    }
    Request::GrantParts { .. } => GrantParts = 22 { since: 2, limits: [channels <= MAX_RDMA_CHANNELS] }
    Request::GetRanges { .. } => GetRanges = 24 {
        since: 2, sheddable: true, limits: [ranges <= MAX_KEYS, channels <= MAX_RDMA_CHANNELS]
    }
    Request::Pins(_) => Pins = 25 { since: 3, sheddable: true, limits: [keys <= MAX_KEYS] }
    Request::Ping => Ping = 26 { since: 5 }
    Request::RdmaProgress { .. } => RdmaProgress = 27 { since: 6 }
    Request::Hint { .. } => Hint = 28 { since: 7, sheddable: true, limits: [keys <= MAX_KEYS] }
    Request::Explain(_) => Explain = 29 { since: 8, sheddable: true, limits: [keys <= MAX_EXPLAINED] }
    Request::Extents(_) => Extents = 30 { since: 10, sheddable: true, limits: [keys <= MAX_EXTENTS] }
}

message_table! {
    /// All kinds of responses, by number.
    RESPONSES, ResponseKind, Response, "response kind in this protocol version";
    Response::Hello { .. } => Hello = 128 {
        since: 1, limits: [node <= MAX_NAME_BYTES, machine <= MAX_NAME_BYTES, socket <= MAX_NAME_BYTES]
    }
    Response::Located(_) => Located = 129 { since: 1, limits: [tiers <= MAX_KEYS] }
    Response::Page { .. } => Page = 130 { since: 1 }
    Response::Miss { .. } => Miss = 131 { since: 1 }
    Response::End => End = 132 { since: 1 }
    Response::Part { .. } => Part = 133 { since: 1, limits: [crcs <= MAX_CHUNKS] }
    Response::FollowEnd { .. } => FollowEnd = 134 { since: 1 }
    Response::Reserved { retry_after_ms: 0, .. } => Reserved = 135 { since: 1, limits: [outcomes <= MAX_PUTS] }
    Response::Committed(_) => Committed = 136 { since: 1, limits: [outcomes <= MAX_PUTS] }
    Response::Count(_) => Count = 137 { since: 1 }
    Response::Members(_) => Members = 138 {
        since: 1, limits: [members <= MAX_MEMBERS, name <= MAX_NAME_BYTES, info <= MAX_INFO_BYTES]
    }
    Response::Status(_) => Status = 139 { since: 1, limits: [json <= MAX_TEXT_BYTES] }
    Response::Error { .. } => Error = 140 { since: 1, limits: [message <= MAX_TEXT_BYTES] }
    Response::LookedUp { .. } => LookedUp = 141 { since: 1, limits: [tiers <= MAX_KEYS] }
    Response::RdmaChannels(_) => RdmaChannels = 142 { since: 2, limits: [accepted <= MAX_RDMA_CHANNELS] }
    Response::PartGrants(_) => PartGrants = 143 { since: 2, limits: [grants <= MAX_PART_GRANTS] }
    Response::Range { .. } => Range = 145 { since: 2 }
    Response::Busy { .. } => Busy = 146 { since: 2 }
    Response::Reserved { .. } => ReservedBusy = 147 { since: 2, limits: [outcomes <= MAX_PUTS] }
    Response::ArenaPages(_) => ArenaPages = 148 { since: 2, limits: [pages <= MAX_ARENA_PAGES] }
    Response::Pins(_) => Pins = 149 { since: 3, limits: [pins <= MAX_KEYS] }
    Response::Pong => Pong = 150 { since: 5 }
    Response::Explained(_) => Explained = 151 { since: 8, limits: [explanations <= MAX_EXPLAINED] }
    Response::Extents { .. } => Extents = 152 { since: 10, limits: [extents <= MAX_EXTENTS] }
}
