//! Limits of a page that disk, wire and clients share.
//!
//! Invariant: every decoder checks a length against these before it allocates.

/// Length of a chunk in bytes: the unit of a CRC. Chunks start anew at every part, so a reader can
/// verify a part, or a range of it, alone.
pub const CHUNK_BYTES: usize = 64 << 10;
/// Maximum length of a page in bytes. It bounds every payload on the wire and on disk, so a decoder
/// refuses longer ones before it allocates.
pub const MAX_PAGE_BYTES: usize = 16 << 20;
pub const MAX_PARTS: usize = 128;
/// Maximum number of token ids that describe a page: 1 KiB of them. With the largest tables of
/// parts and chunks they still fit the block of a record header. Pages of more tokens have none.
pub const MAX_TOKEN_IDS: usize = 256;
/// Maximum number of chunks of a page: all full chunks, and one short chunk per part.
pub const MAX_CHUNKS: usize = MAX_PAGE_BYTES / CHUNK_BYTES + MAX_PARTS;
