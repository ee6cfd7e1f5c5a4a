//! Answers and states that are one byte on the wire.

use larder_format::codec::{DecodeError, Result};

/// Declares a small enum with its wire code.
macro_rules! codes {
    ($(#[$meta:meta])* $name:ident, $what:literal { $($(#[$vmeta:meta])* $variant:ident = $code:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$vmeta])* $variant),+ }
        impl $name {
            pub(crate) fn code(self) -> u8 { match self { $(Self::$variant => $code),+ } }
            pub(crate) fn from_code(code: u8) -> Result<Self> {
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
