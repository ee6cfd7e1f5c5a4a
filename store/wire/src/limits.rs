//! Limits of messages. A decoder refuses a longer list or text before it allocates memory for it.

/// Maximum number of keys in one message: 256 KiB of keys, a quarter of the largest body.
pub const MAX_KEYS: usize = 8192;
/// Maximum number of pages that one Reserve asks for, and of puts that one Commit seals. Larger
/// batches take several requests.
pub const MAX_PUTS: usize = 1024;
/// Maximum number of pages that one Explain asks for. The node looks each up in several namespaces.
pub const MAX_EXPLAINED: usize = 512;
/// Maximum number of pages that one Extents asks for. The answer carries the CRCs of each.
pub const MAX_EXTENTS: usize = 256;
/// Maximum number of files that the answer to one Extents names. Their descriptors travel in one
/// message, and Linux allows 253.
pub const MAX_EXTENT_FILES: usize = 16;
/// Maximum number of members that a node keeps. It bounds the body of the Members response.
pub const MAX_MEMBERS: usize = 1024;
/// Maximum length of a name, in bytes: of a client, a node, a member, a machine or a socket.
pub const MAX_NAME_BYTES: usize = 256;
/// Maximum length of a member's JSON description, in bytes. A node keeps all descriptions in
/// memory.
pub const MAX_INFO_BYTES: usize = 16 << 10;
/// Maximum time for which a lookup holds pages, in milliseconds. Nodes shorten longer requests.
pub const MAX_HOLD_MS: u32 = 60_000;
/// Maximum time to live of a pin, in milliseconds: 30 days. A client that is gone cannot keep
/// memory for longer.
pub const MAX_PIN_MS: u64 = 30 * 24 * 3_600_000;
/// Maximum number of RDMA channels of one connection, and of channels that one message names.
pub const MAX_RDMA_CHANNELS: usize = 16;
/// Maximum number of write grants in one message. The client writes parts without a grant by
/// another way.
pub const MAX_PART_GRANTS: usize = 4096;
/// Maximum number of arena pages in one message. Each carries its page's CRCs, so few fit.
pub const MAX_ARENA_PAGES: usize = 16;
/// Maximum length of any other text, in bytes: a status report, an error message.
pub(crate) const MAX_TEXT_BYTES: usize = 256 << 10;
