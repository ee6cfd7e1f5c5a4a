//! Page keys, namespaces, page layout, checksums and the on-disk format of Larder.
//!
//! This crate is pure: no I/O but through what [`verify`] is handed, no clock, no randomness, no `unsafe`. Everything that several sides must agree on lives
//! here, so that the store node, the client, the engines and an offline verifier read the same bytes the same way.
//!
//! - [`key`]: the 32-byte page key, chained over token ids.
//! - [`namespace`]: which model's pages may be shared, and how a page of that model is laid out.
//! - [`page`]: what identifies a stored page and how its bytes are checked.
//! - [`codec`]: a reader that cannot over-read, shared by disk and wire.
//! - [`disk`]: the blocks of an L3 segment log.
//! - [`footer`]: the table of a segment's records that stands at its end.
//! - [`life`]: which life a segment has whose header cannot be read.
//! - [`range`]: ranges of a page, and the chunks they touch;
//! - [`planted`]: bugs that a simulation plants;
//! - [`verify`]: checking a segment offline, and taking out what is damaged.
#![forbid(unsafe_code)]

pub mod codec;
pub mod disk;
pub mod footer;
pub mod key;
pub mod life;
pub mod namespace;
pub mod page;
pub mod planted;
pub mod range;
pub mod verify;

pub use key::{PageKey, page_keys};
pub use namespace::{KvDtype, NamespaceDescriptor, NamespaceId, PageGeometry};
pub use page::{Arriving, CHUNK_BYTES, MAX_PAGE_BYTES, MAX_PARTS, Mismatch, PageId, PageMeta, chunk_crcs, is_expired};
pub use range::whole_chunks;
