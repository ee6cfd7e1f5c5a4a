//! L3 of a store node: a bounded segment log on one device.
//!
//! Invariants:
//! - A read returns a miss, or exactly the bytes that were written under that name. Identity and
//!   every checksum are checked on the way from the device. Damage is a miss, a counter and a
//!   warning with evidence.
//! - The files never exceed the configured capacity. A full log reclaims its oldest segment.
//! - A forgotten page stays forgotten once [`L3::forget`] has returned, whatever crashes.
//! - A page is found only after its write completed. It survives a crash of the machine once it was
//!   synced, which happens within a second.
//! - One process at a time uses a directory.
//!
//! Layout: [`L3`] is the handle. [`machine`] decides, as a pure state machine: places, reclaims,
//! visibility. `larder-io` moves bytes. The other modules carry the decisions of the one to the
//! other:
//!
//! | module | task |
//! | --- | --- |
//! | `superblock`, `recovery` | start: identity of the log, scan of its segments |
//! | `read`, `write`, `forget` | requests of callers |
//! | `background`, `prepare`, `copy_forward` | segments, footers, syncs, expiry, copies |
//! | `scrub` | reads all pages at a low rate, to find damage early |
//! | `memory` | memory for blocks that state the identity of the log |
//! | `shared`, `lock`, `guards` | shared state, its lock, guards for reads and writes in flight |
//! | `damage`, `report` | the listener for damaged pages, and the report of a recovery |
//!
//! `docs/internals/log-and-recovery.md` explains the design.

// The simulation runs this crate: see store/clippy.toml.
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]
mod background;
mod copy_forward;
mod damage;
mod error;
mod forget;
mod guards;
mod l3;
mod list;
mod lock;
pub mod machine;
mod memory;
mod options;
mod prepare;
mod read;
mod recovery;
mod report;
mod scrub;
mod shared;
mod stats;
mod superblock;
mod write;

pub use error::L3Error;
pub use guards::HeldRecord;
pub use l3::{L3, L3Entry, L3Location};
pub use list::ListedPages;
pub use lock::LogLock;
pub use machine::{FloorPart, NamedPage, NamespacePages, PageListener, PageName, Pin, SharedFloors, Worth};
pub use options::{L3Options, PAGE_MEMORY_BYTES, PIN_MEMORY_BYTES, QUEUE_DEPTH_DEFAULT, WRITE_QUEUE_BYTES_MAX};
pub use report::{RecoveryProgress, RecoveryReport};
pub use scrub::{ScrubProgress, ScrubRate};
pub use stats::L3Stats;
