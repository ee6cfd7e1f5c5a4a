//! Namespaces of foreign engines. Every language derives them alike, so that clients in different
//! languages share pages.

use crate::InvalidArgument;
use larder_format::namespace::MAX_NAME_BYTES;
use larder_format::{NamespaceDescriptor, PageGeometry};
use sha2::{Digest, Sha256};

/// Namespace of pages of `page_bytes` bytes in `parts` equal parts, whose layout only the engine
/// knows. `identity` must differ whenever the bytes would mean something else.
pub fn opaque(
    page_bytes: u32,
    parts: u32,
    identity: &[u8],
    model: &str,
    tenant: &str,
) -> Result<NamespaceDescriptor, InvalidArgument> {
    if parts == 0 || !page_bytes.is_multiple_of(parts) {
        return Err(InvalidArgument(format!("{page_bytes} bytes cannot be cut into {parts} equal parts")));
    }
    let weights = Sha256::new_with_prefix(b"larder-opaque-identity").chain_update(identity).finalize().into();
    let geometry = PageGeometry::opaque(page_bytes / parts, parts);
    checked(NamespaceDescriptor { model: model.into(), weights, geometry, tenant: tenant.into() })
}

/// Refuses pages that are impossible, and names that are too long for the protocol.
pub fn checked(descriptor: NamespaceDescriptor) -> Result<NamespaceDescriptor, InvalidArgument> {
    let invalid = |error| InvalidArgument(format!("no such page is possible: {error}"));
    descriptor.geometry.validate().map_err(invalid)?;
    if descriptor.model.len().max(descriptor.tenant.len()) > MAX_NAME_BYTES {
        return Err(InvalidArgument(format!("model and tenant have at most {MAX_NAME_BYTES} bytes")));
    }
    Ok(descriptor)
}
