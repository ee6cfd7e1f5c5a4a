//! Limits of messages: no list or text is longer, whoever says so.

/// Most keys in one message.
pub const MAX_KEYS: usize = 8192;
/// Most pages reserved, or sealed, by one message.
pub const MAX_PUTS: usize = 1024;
/// Most members a node keeps.
pub const MAX_MEMBERS: usize = 1024;
/// Most bytes of a member's name.
pub const MAX_NAME_BYTES: usize = 256;
/// Most bytes of what a member says of itself.
pub const MAX_INFO_BYTES: usize = 16 << 10;
/// Longest time for which a lookup holds pages, in milliseconds.
pub const MAX_HOLD_MS: u32 = 60_000;
/// Longest time for which pages are pinned, in milliseconds: 30 days.
pub const MAX_PIN_MS: u64 = 30 * 24 * 3_600_000;
/// Most RDMA lines of a connection.
pub const MAX_LINES: usize = 16;
/// Most windows told in one message.
pub const MAX_WINDOWS: usize = 4096;
/// Most pages that one message says the places of.
pub const MAX_PLACES: usize = 16;
/// Most bytes of any other text.
pub(crate) const MAX_TEXT_BYTES: usize = 256 << 10;
