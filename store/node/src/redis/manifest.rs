//! The page of a key.
//!
//! ```text
//! offset  bytes  field
//!      0      1  version, 1
//!      1      1  place of the value: 0 here, 1 in data pages
//!      2      2  length of the key
//!      4      8  length of the value
//!     12     16  value id, zeros for a value that is here
//!     28      k  key
//!   28+k      v  value, if it is here
//! ```
//!
//! Numbers are little-endian. The page is named by a hash of the key, so a reader compares the key.

use larder_format::PageKey;
use larder_format::codec::Reader;
use larder_redis::VALUE_BYTES_MAX;
use sha2::{Digest, Sha256};
use std::ops::Range;

const VERSION: u8 = 1;
const HEADER_BYTES: usize = 28;
/// Bytes of a data page, except the last one of a value. A huge page of memory.
pub(super) const DATA_PAGE_BYTES: usize = 2 << 20;
/// Position of manifests, in the place where pages of tokens have their index.
pub(super) const MANIFEST_POSITION: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ValueId(pub(super) [u8; 16]);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// Range of the value in the manifest.
    Here(Range<usize>),
    DataPages(ValueId),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Manifest {
    pub(super) value_bytes: u64,
    pub(super) place: Place,
}

/// Hash of a key, which names its manifest.
pub(super) fn manifest_key(key: &[u8]) -> PageKey {
    PageKey(Sha256::new().chain_update(b"larder redis key\0").chain_update(key).finalize().into())
}

pub(super) fn data_key(value: ValueId, index: u32) -> PageKey {
    let hash = Sha256::new().chain_update(b"larder redis value\0").chain_update(value.0);
    PageKey(hash.chain_update(index.to_le_bytes()).finalize().into())
}

/// Number of data pages of a value.
pub(super) fn data_pages(value_bytes: u64) -> u32 {
    u32::try_from(value_bytes.div_ceil(DATA_PAGE_BYTES as u64)).expect("no value has more than 512 MiB")
}

/// Length of a data page.
pub(super) fn data_page_bytes(value_bytes: u64, index: u32) -> usize {
    (value_bytes - u64::from(index) * DATA_PAGE_BYTES as u64).min(DATA_PAGE_BYTES as u64) as usize
}

/// Encodes the manifest of a short value.
pub(super) fn encode_short(key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut bytes = header(key, value.len() as u64, None);
    bytes.extend_from_slice(value);
    bytes
}

/// Encodes the manifest of a value in data pages.
pub(super) fn encode_long(key: &[u8], value_bytes: u64, id: ValueId) -> Vec<u8> {
    header(key, value_bytes, Some(id))
}

fn header(key: &[u8], value_bytes: u64, id: Option<ValueId>) -> Vec<u8> {
    let mut bytes = vec![VERSION, u8::from(id.is_some())];
    bytes.extend_from_slice(&u16::try_from(key.len()).expect("keys have at most 1 KiB").to_le_bytes());
    bytes.extend_from_slice(&value_bytes.to_le_bytes());
    bytes.extend_from_slice(&id.map_or([0; 16], |id| id.0));
    bytes.extend_from_slice(key);
    bytes
}

/// Decodes a manifest, and returns it with its key. `None` if this build cannot read it.
pub(super) fn decode(bytes: &[u8]) -> Option<(&[u8], Manifest)> {
    let mut reader = Reader::new(bytes);
    let version = reader.u8("version").ok()?;
    let place = reader.u8("place").ok()?;
    let key_bytes = usize::from(reader.u16("key length").ok()?);
    let value_bytes = reader.u64("value length").ok()?;
    let id = ValueId(reader.array("value id").ok()?);
    let value_at = HEADER_BYTES + key_bytes;
    let key = bytes.get(HEADER_BYTES..value_at)?;
    let behind = (bytes.len() - value_at) as u64;
    let place = match place {
        0 if behind == value_bytes => Place::Here(value_at..bytes.len()),
        1 if behind == 0 && (1..=VALUE_BYTES_MAX).contains(&value_bytes) => Place::DataPages(id),
        _ => return None,
    };
    (version == VERSION).then_some((key, Manifest { value_bytes, place }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_round_trip_and_damaged_ones_are_refused() {
        let short = encode_short(b"key", b"value");
        let (key, manifest) = decode(&short).unwrap();
        assert_eq!((key, manifest.value_bytes), (&b"key"[..], 5));
        assert!(matches!(manifest.place, Place::Here(range) if &short[range.clone()] == b"value"));
        let id = ValueId([7; 16]);
        let long = encode_long(b"key", 5 << 20, id);
        assert_eq!(decode(&long), Some((&b"key"[..], Manifest { value_bytes: 5 << 20, place: Place::DataPages(id) })));
        // Another length of a long value is valid. The checksum of the page protects it.
        for (bytes, checked) in [(&short, &[0, 1, 2, 4][..]), (&long, &[0, 1, 2])] {
            assert!((0..bytes.len()).all(|end| decode(&bytes[..end]).is_none()), "every prefix is damaged");
            for &at in checked {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x42;
                assert!(decode(&damaged).is_none(), "byte {at}");
            }
        }
        assert!(decode(&encode_long(b"key", VALUE_BYTES_MAX + 1, id)).is_none());
    }

    #[test]
    fn data_pages_cover_the_value() {
        for bytes in [1, DATA_PAGE_BYTES as u64, DATA_PAGE_BYTES as u64 + 1, VALUE_BYTES_MAX] {
            let pages = (0..data_pages(bytes)).map(|index| data_page_bytes(bytes, index));
            assert!(pages.clone().all(|bytes| bytes > 0));
            assert_eq!(pages.map(|bytes| bytes as u64).sum::<u64>(), bytes);
        }
    }
}
