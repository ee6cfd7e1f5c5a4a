//! Operations of a client: the upper layer. Each file adds methods to [`Client`](crate::Client).
//!
//! Invariants:
//! - A key's owner is chosen among the nodes that are connected when the operation starts.
//! - Nothing fails because a node is absent or busy: a get is a miss, and a put is lost.
//!
//! `routing` picks nodes and connections, and sends requests to many at once. `durations` and
//! `verify` are helpers. Every other file is one operation or a pair of them.

mod durations;
mod explain;
mod extents;
mod follow;
mod forget;
mod get;
mod hint;
mod lookup;
mod members;
mod pin;
mod pins;
mod put;
mod put_pages;
mod routing;
mod status;
mod verify;
mod view;

pub use explain::{Explanation, MissReason};
pub use extents::Extent;
pub use follow::{Follow, FollowEnd};
pub use forget::Forgotten;
pub use get::{Fetched, GetOptions, PageDescription};
pub use hint::Hint;
pub use lookup::{Lease, Lookup, Tier};
pub use members::{MEMBER_TTL, Member, Registration};
pub use pin::{PinKind, Pinned};
pub use pins::PagePin;
pub use put::{NewPage, PagePut, PutOptions, PutOutcome};
pub use status::NodeView;
pub use view::PageView;
