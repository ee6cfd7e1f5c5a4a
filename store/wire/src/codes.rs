//! Enums that travel as one byte. Each variant states its number once.

use larder_format::codec::{DecodeError, Result};

/// Declares an enum with its wire codes, its encoder and its decoder. An unknown code is a decode
/// error.
macro_rules! codes {
    ($(#[$meta:meta])* $name:ident, $field:literal { $($(#[$vmeta:meta])* $variant:ident = $code:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$vmeta])* $variant),+ }
        impl $name {
            pub(crate) fn code(self) -> u8 { match self { $(Self::$variant => $code),+ } }
            pub(crate) fn from_code(code: u8) -> Result<Self> {
                match code { $($code => Ok(Self::$variant),)+ _ => Err(DecodeError::Invalid($field)) }
            }
        }
    };
}

codes!(
    /// Tier that holds a page on a node. Code 1 is unused: L1 is the engine's own memory, which no
    /// node serves.
    TierCode, "tier" {
        /// The node has no servable copy.
        Absent = 0,
        /// The page is in the node's DRAM arena.
        L2 = 2,
        /// The page is in the node's NVMe log.
        L3 = 3,
    }
);
codes!(
    /// Outcome of a reservation, for one page.
    ReserveOutcome, "reserve outcome" {
        /// The node reserved memory; the client may send the parts.
        Granted = 1,
        /// The node already serves a page of this key, so no put is needed.
        Exists = 2,
        /// Another client has an open put of this page.
        InProgress = 3,
        /// The node has no memory for the page now. The client may retry later.
        Busy = 4,
        /// The page does not fit its namespace, or the request number has an open put. A retry
        /// fails again.
        Malformed = 5,
        /// The page is a copy, and the node cannot prove that the page was not forgotten since it
        /// was copied. The client must drop the copy.
        Forgotten = 6,
        /// An operator has retired the namespace. A retry fails until the rollback. To versions
        /// before 8 this is [`ReserveOutcome::Malformed`].
        Retired = 7,
    }
);
codes!(
    /// Reason why a node cannot serve a page now.
    MissReason, "miss reason" {
        /// None: the node can serve the page.
        Present = 0,
        /// The node knows nothing of the page. Its records begin with its start and have a bounded
        /// size, so the page may also have left long ago.
        NeverStored = 1,
        /// The page left the node, because it had no room for it.
        Evicted = 2,
        /// The time to live of the page is over.
        Expired = 3,
        /// A client deleted the page.
        Forgotten = 4,
        /// The node has a page of this key in another namespace.
        OtherNamespace = 5,
        /// An operator has retired the namespace.
        Retired = 6,
        /// A client is putting the page.
        BeingPut = 7,
        /// The node has not read all of L3 since its start. The page may be there.
        Recovering = 8,
        /// A failing device has the page. The node tries the device again later.
        DeviceFailing = 9,
    }
);
codes!(
    /// Outcome of a commit, for one put.
    CommitOutcome, "commit outcome" {
        /// The node sealed the page and serves it from now on. It is not necessarily durable in L3
        /// yet.
        Stored = 1,
        /// The node already had the page with the same bytes.
        AlreadyThere = 2,
        /// The node already had the page with other bytes. It keeps the first copy and reports the
        /// conflict.
        Refused = 3,
        /// Parts are missing or damaged, or the put is unknown. The node stored nothing.
        Incomplete = 4,
    }
);
codes!(
    /// End of a followed page.
    FollowState, "follow state" {
        /// The writer committed the page. The node has sent all of its parts.
        Sealed = 1,
        /// The writer, or the node for it, aborted the put.
        Aborted = 2,
        /// The page did not appear before the request's deadline.
        Miss = 3,
    }
);
codes!(
    /// Strength of a pin, which keeps a page in L2.
    PinKind, "pin kind" {
        /// No pin. In a Pin request it ends existing pins.
        None = 0,
        /// Eviction takes the page only when no unpinned page can make room.
        Soft = 1,
        /// Eviction never takes the page, nor its resident ancestors.
        Hard = 2,
    }
);
codes!(
    /// Advice about the further use of pages. It ranks pages of its namespace, and no more.
    Hint, "hint" {
        /// No advice.
        None = 0,
        /// The pages return soon: the node keeps them for a time, as if they had a soft pin.
        Retain = 1,
        /// The pages are not expected to return.
        Demote = 2,
        /// The session has ended. Pages that other sequences continue stay as they are.
        SessionEnded = 3,
    }
);
codes!(
    /// Error class: enough for the client to choose its reaction. The text beside it is for people,
    /// and no program parses it.
    ErrorCode, "error code" {
        /// The peers share no protocol version. Another attempt fails in the same way until one
        /// side is upgraded.
        Version = 1,
        /// The node cannot decode the message. It closes the connection, because the stream may be
        /// out of step.
        Malformed = 2,
        /// The message came before Hello, or needs a namespace that the connection lacks.
        State = 3,
        /// The node is overloaded. The client may retry later.
        Busy = 4,
        /// The node failed. The request may succeed elsewhere, or later.
        Internal = 5,
    }
);
