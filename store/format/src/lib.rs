//! Page keys, namespaces, page layout, checksums and the on-disk format of Larder.
//!
//! Everything that several sides must agree on lives here. So the store node, the client, the
//! engines and the offline verifier read the same bytes the same way.
//!
//! Invariants:
//! - The crate is pure: no clock, no randomness, no `unsafe`, and no I/O except through the
//!   files that a caller passes to [`verify`].
//! - A decoder accepts bytes only if every field is within its limits. It never panics on any
//!   input.
//!
//! Layout:
//! - [`key`]: the 32-byte page key, chained over token ids.
//! - [`namespace`]: the model whose pages may be shared, and the layout of its pages.
//! - [`namespace_fields`]: fields by which namespaces differ.
//! - [`limits`]: limits of a page.
//! - [`page`]: identity of a stored page, and verification of its bytes.
//! - [`range`]: ranges of a page, and the chunks that contain them.
//! - [`codec`]: a reader that cannot over-read, shared by disk and wire.
//! - [`disk`]: the blocks of an L3 segment log.
//! - [`footer`]: the table of records at the end of a segment.
//! - [`epoch`]: the epoch of a segment whose header is unreadable.
//! - [`verify`]: offline verification and repair of a segment.

// The simulation runs this crate: see store/clippy.toml.
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]
#![forbid(unsafe_code)]

pub mod codec;
pub mod disk;
pub mod epoch;
pub mod footer;
pub mod key;
pub mod limits;
pub mod namespace;
pub mod namespace_fields;
pub mod page;
pub mod range;
pub mod verify;

pub use key::{PageKey, page_keys};
pub use limits::{CHUNK_BYTES, MAX_CHUNKS, MAX_PAGE_BYTES, MAX_PARTS, MAX_TOKEN_IDS};
pub use namespace::{KvDtype, NamespaceDescriptor, NamespaceId, PageGeometry};
pub use namespace_fields::NamespaceFields;
pub use page::{Mismatch, PageId, PageMeta, PageOrigin, PayloadVerifier, chunk_crcs, is_expired};
pub use range::whole_chunks;
