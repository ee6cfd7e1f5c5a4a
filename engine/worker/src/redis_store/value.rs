//! Value of a page in Redis: a header that proves the bytes, and the bytes.
//!
//! | field | bytes |
//! | --- | --- |
//! | magic, with the version | 8 |
//! | length of the description, little-endian | 4 |
//! | CRC-32 of the description, little-endian | 4 |
//! | description: the encoding of [`PageMeta`] | as stated |
//! | payload | as the description states |
//!
//! Invariants:
//! - A value is accepted only if its namespace, key, shape and every checksum are as expected.
//! - The checksums are those of the engine that computed the page.
//! - All values of a namespace have one length. A reader knows it before it asks.

use larder_client::NewPage;
use larder_format::codec::{DecodeError, Reader};
use larder_format::{Mismatch, NamespaceDescriptor, NamespaceId, PageId, PageKey, PageMeta};
use std::ops::Range;
use thiserror::Error;

/// Begins every value. The last two characters are the version.
const MAGIC: &[u8; 8] = b"LRDPAG01";
const PREFIX_BYTES: usize = MAGIC.len() + 2 * size_of::<u32>();

/// Difference between a value and the page that its key stands for. The value must not be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum ValueError {
    #[error("the value has {found} bytes instead of {expected}")]
    Length { expected: usize, found: usize },
    #[error("the value is no page: {0}")]
    Header(#[from] DecodeError),
    #[error("the page has another shape")]
    Shape,
    #[error(transparent)]
    Page(#[from] Mismatch),
}

/// Names and shape of the pages of a namespace.
pub(super) struct PageFormat {
    namespace: NamespaceId,
    part_bytes: Vec<u32>,
    header_bytes: usize,
    page_bytes: usize,
}

impl PageFormat {
    pub(super) fn new(descriptor: &NamespaceDescriptor) -> Self {
        let part_bytes = descriptor.geometry.part_table();
        let chunks: usize = part_bytes.iter().map(|&bytes| PageMeta::chunks_of(bytes)).sum();
        let mut format = Self {
            namespace: descriptor.id(),
            header_bytes: 0,
            page_bytes: part_bytes.iter().map(|&bytes| bytes as usize).sum(),
            part_bytes,
        };
        // Only the numbers of parts and chunks change the length of a description.
        let first = NewPage::first(PageKey::NONE);
        format.header_bytes = PREFIX_BYTES + encoded(&format.describe(&first, vec![0; chunks])).len();
        format
    }

    /// Name of a page in Redis.
    pub(super) fn name(&self, key: &PageKey) -> String {
        format!("larder:{}:{key}", self.namespace)
    }

    pub(super) fn value_bytes(&self) -> usize {
        self.header_bytes + self.page_bytes
    }

    pub(super) fn part_count(&self) -> usize {
        self.part_bytes.len()
    }

    /// Range of part `part` in a value. `None` if there is no such part.
    pub(super) fn part_range(&self, part: usize) -> Option<Range<usize>> {
        let before = self.part_bytes.get(..part)?.iter().map(|&bytes| bytes as usize).sum::<usize>();
        let start = self.header_bytes + before;
        Some(start..start + *self.part_bytes.get(part)? as usize)
    }

    fn describe(&self, page: &NewPage, chunk_crcs: Vec<u32>) -> PageMeta {
        PageMeta {
            id: self.id(page.key),
            parent: page.parent,
            position: page.position,
            generation: 0,
            expires_unix_ms: 0,
            part_bytes: self.part_bytes.clone(),
            chunk_crcs,
            token_ids: Vec::new(),
        }
    }

    fn id(&self, key: PageKey) -> PageId {
        PageId { namespace: self.namespace, key }
    }

    /// Writes the header of a value whose parts are all in place. Costs a pass over them.
    ///
    /// # Errors
    /// The bytes do not match the checksums: they were damaged since their writer computed these.
    pub(super) fn seal(&self, page: &NewPage, value: &mut [u8], chunk_crcs: Vec<u32>) -> Result<(), ValueError> {
        let meta = self.describe(page, chunk_crcs);
        meta.validate()?;
        self.check_length(value)?;
        let (header, payload) = value.split_at_mut(self.header_bytes);
        meta.verify(&meta.id, payload)?;
        let description = encoded(&meta);
        let (magic, rest) = header.split_at_mut(MAGIC.len());
        let (length, rest) = rest.split_at_mut(size_of::<u32>());
        let (crc, place) = rest.split_at_mut(size_of::<u32>());
        magic.copy_from_slice(MAGIC);
        length.copy_from_slice(&(description.len() as u32).to_le_bytes());
        crc.copy_from_slice(&crc32fast::hash(&description).to_le_bytes());
        place.copy_from_slice(&description);
        Ok(())
    }

    /// Copies the payload of a value into `page`, and verifies it there. Returns the checksums of
    /// its chunks. After an error the content of `page` is undefined.
    pub(super) fn open(&self, key: PageKey, value: &[u8], page: &mut [u8]) -> Result<Vec<u32>, ValueError> {
        self.check_length(value)?;
        let (header, payload) = value.split_at(self.header_bytes);
        let mut reader = Reader::new(header);
        if reader.array::<8>("magic")? != *MAGIC {
            return Err(DecodeError::Invalid("magic").into());
        }
        let length = reader.u32("length of the description")? as usize;
        let crc = reader.u32("checksum of the description")?;
        let description = reader.take(length, "description")?;
        if reader.remaining() > 0 {
            return Err(DecodeError::TrailingBytes(reader.remaining()).into());
        }
        if crc32fast::hash(description) != crc {
            return Err(DecodeError::Checksum("description").into());
        }
        let mut reader = Reader::new(description);
        let meta = PageMeta::decode(&mut reader)?;
        if reader.remaining() > 0 {
            return Err(DecodeError::TrailingBytes(reader.remaining()).into());
        }
        if meta.part_bytes != self.part_bytes || page.len() != payload.len() {
            return Err(ValueError::Shape);
        }
        page.copy_from_slice(payload);
        meta.verify(&self.id(key), page)?;
        Ok(meta.chunk_crcs)
    }

    fn check_length(&self, value: &[u8]) -> Result<(), ValueError> {
        let expected = self.value_bytes();
        if value.len() == expected { Ok(()) } else { Err(ValueError::Length { expected, found: value.len() }) }
    }
}

fn encoded(meta: &PageMeta) -> Vec<u8> {
    let mut description = Vec::new();
    meta.encode(&mut description);
    description
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{KvDtype, PageGeometry, chunk_crcs};

    fn format(tenant: &str) -> PageFormat {
        let geometry = PageGeometry {
            dtype: KvDtype::F32,
            layers: 5,
            kv_heads: 2,
            head_dim: 4,
            page_tokens: 1024,
            layers_per_part: 2,
            head_groups: 1,
        };
        PageFormat::new(&NamespaceDescriptor { model: "m".into(), weights: [7; 32], geometry, tenant: tenant.into() })
    }

    fn page(seed: u8) -> NewPage {
        NewPage { position: 3, ..NewPage::first(PageKey([seed; 32])) }
    }

    /// A value with its payload, and the checksums of its chunks.
    fn filled(format: &PageFormat) -> (Vec<u8>, Vec<u32>) {
        let mut value = vec![0; format.value_bytes()];
        let mut crcs = Vec::new();
        for part in 0..format.part_count() {
            let range = format.part_range(part).unwrap();
            value[range.clone()].iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 + part) as u8);
            crcs.extend(chunk_crcs(&value[range]));
        }
        (value, crcs)
    }

    #[test]
    fn sealed_value_opens_to_the_same_bytes() {
        let format = format("a");
        let (mut value, crcs) = filled(&format);
        assert!(crcs.len() > format.part_count(), "a part has several chunks");
        assert_eq!(format.part_range(format.part_count()), None);
        format.seal(&page(1), &mut value, crcs.clone()).unwrap();
        let mut bytes = vec![0xEE; format.page_bytes];
        assert_eq!(format.open(page(1).key, &value, &mut bytes), Ok(crcs));
        assert_eq!(bytes, value[format.header_bytes..]);
    }

    #[test]
    fn no_changed_bit_is_accepted() {
        let format = format("a");
        let (mut value, crcs) = filled(&format);
        format.seal(&page(1), &mut value, crcs).unwrap();
        let mut bytes = vec![0; format.page_bytes];
        // Every bit of the header, and some of the payload.
        let places = (0..format.header_bytes).chain((format.header_bytes..value.len()).step_by(4999));
        for place in places {
            for bit in 0..8 {
                value[place] ^= 1 << bit;
                assert!(format.open(page(1).key, &value, &mut bytes).is_err(), "bit {bit} of byte {place}");
                value[place] ^= 1 << bit;
            }
        }
        assert!(format.open(page(1).key, &value, &mut bytes).is_ok());
    }

    #[test]
    fn page_of_another_key_namespace_or_length_is_refused() {
        let ours = format("a");
        let (mut value, crcs) = filled(&ours);
        ours.seal(&page(1), &mut value, crcs).unwrap();
        let mut bytes = vec![0; ours.page_bytes];
        assert!(matches!(ours.open(page(2).key, &value, &mut bytes), Err(ValueError::Page(Mismatch::Identity(_)))));
        let theirs = format("b").open(page(1).key, &value, &mut bytes);
        assert!(matches!(theirs, Err(ValueError::Page(Mismatch::Identity(_)))), "{theirs:?}");
        for length in [0, 7, ours.header_bytes, value.len() - 1] {
            assert!(matches!(
                ours.open(page(1).key, &value[..length], &mut bytes),
                Err(ValueError::Length { found, .. }) if found == length
            ));
        }
        value.push(0);
        assert!(ours.open(page(1).key, &value, &mut bytes).is_err());
    }

    #[test]
    fn bytes_that_do_not_match_their_checksums_are_not_sealed() {
        let format = format("a");
        let (mut value, crcs) = filled(&format);
        let last = value.len() - 1;
        value[last] ^= 1;
        let sealed = format.seal(&page(1), &mut value, crcs.clone());
        assert!(matches!(sealed, Err(ValueError::Page(Mismatch::Crc { .. }))), "{sealed:?}");
        value[last] ^= 1;
        let short = format.seal(&page(1), &mut value, crcs[1..].to_vec());
        assert!(matches!(short, Err(ValueError::Header(_))), "{short:?}");
    }
}
