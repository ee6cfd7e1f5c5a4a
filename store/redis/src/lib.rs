//! The Redis protocol as a server speaks it, without I/O.
//!
//! Invariants:
//! - The decoder allocates nothing for bytes that have not arrived. Every length has a maximum, and
//!   a longer one is an error before any of its bytes is kept.
//! - A long argument never enters the decoder. Its owner receives it where it belongs.
//! - Any split of the same bytes decodes to the same requests.
//!
//! | module | contents |
//! | --- | --- |
//! | [`request`] | requests: arrays of strings, and lines of words |
//! | [`command`] | the commands, from their arguments |
//! | [`catalogue`] | names and properties of the commands |
//! | [`reply`] | replies in RESP2 and RESP3 |
//! | [`glob`] | patterns of `SCAN` and `CONFIG GET` |

#![forbid(unsafe_code)]

pub mod catalogue;
pub mod command;
pub mod glob;
pub mod reply;
pub mod request;

pub use command::{Command, CommandError, Condition, Expiry, SetOptions};
pub use reply::{Protocol, Reply};
pub use request::{Argument, Decoded, ProtocolError, RequestDecoder};

/// Maximum length of a key in bytes. A key stands in the page that describes its value.
pub const KEY_BYTES_MAX: usize = 1 << 10;
/// Maximum length of a value in bytes, as in Redis.
pub const VALUE_BYTES_MAX: u64 = 512 << 20;
/// Number of databases, as in Redis by default.
pub const DATABASES: u32 = 16;
