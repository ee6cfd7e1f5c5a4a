//! L3 of a store node: a bounded segment log on one device.
//!
//! Always true:
//! - a read answers a miss or exactly the bytes that were written under that name: identity and every checksum are
//!   checked on the way from the device, and damage is a miss, a counter and a warning with evidence;
//! - files never take more than the configured capacity; a full log gives up its oldest segment;
//! - what was forgotten stays forgotten, once [`L3::forget`] has returned, whatever crashes;
//! - a page is found only after its write completed; it survives a crash of the machine once it was synced, which
//!   happens at least every second;
//! - one process at a time uses a directory.
//!
//! Layout: [`L3`] is the handle. `larder-core` decides (what goes where, what is reclaimed, what may be found);
//! `larder-device` moves bytes; this crate carries the decisions of the one to the other:
//!
//! - `superblock`: what must always be true of a log;
//! - `recovery`: what the segments hold at the start;
//! - `read`, `write`, `forget`: what callers ask for;
//! - `background`: segments made ready, footers, and syncs; `clean`: what is rescued out of the oldest segment;
//! - `scrub`: reading everything again, slowly;
//! - `shared`: the state that all of them use, and guards for what is under way.

mod background;
mod clean;
mod error;
mod forget;
mod options;
mod read;
mod recovery;
mod scrub;
mod shared;
mod stats;
mod store;
mod superblock;
mod write;

pub use error::L3Error;
pub use larder_core::log::Pin;
pub use options::{L3Options, WRITE_QUEUE_BYTES_MAX};
pub use recovery::{RecoveryProgress, RecoveryReport};
pub use scrub::ScrubProgress;
pub use stats::L3Stats;
pub use store::{L3, L3Entry};
