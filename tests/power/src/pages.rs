//! Pages whose bytes name the page and its version, so that every wrong byte is noticed.

use crate::record::Page;
use bytes::Bytes;
use larder_client::NewPage;
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};

/// Pages of one size, in a namespace of their own.
#[derive(Debug, Clone, Copy)]
pub struct PageKind {
    number: u32,
    pub pages: usize,
    layers: u32,
    head_dim: u32,
}

/// Small pages share blocks of the file system's journal; large ones fill the log, so that it
/// reclaims segments.
pub const KINDS: [PageKind; 2] = [
    PageKind { number: 0, pages: 48, layers: 3, head_dim: 10 },
    PageKind { number: 1, pages: 20, layers: 4, head_dim: 240 },
];

pub fn all_pages() -> impl Iterator<Item = Page> {
    (0..KINDS.len()).flat_map(|kind| (0..KINDS[kind].pages).map(move |page| (kind, page)))
}

const PAGE_TOKENS: u32 = 100;
const VERSION_BYTES: usize = 8;

impl PageKind {
    pub fn namespace(self) -> NamespaceDescriptor {
        let geometry = PageGeometry {
            dtype: KvDtype::F16,
            layers: self.layers,
            kv_heads: 1,
            head_dim: self.head_dim,
            page_tokens: PAGE_TOKENS,
            layers_per_part: self.layers / 2 + 1,
            head_groups: 1,
        };
        let model = format!("power-{}", self.number);
        NamespaceDescriptor { model, weights: [self.number as u8; 32], geometry, tenant: "test".into() }
    }

    pub fn bytes(self) -> usize {
        self.namespace().geometry.page_bytes()
    }

    pub fn key(self, page: usize) -> PageKey {
        PageKey::chain(None, &[self.number, page as u32])
    }

    pub fn new_page(self, page: usize) -> NewPage {
        NewPage::first(self.key(page))
    }

    /// The version, then words that depend on it, the page and their position.
    pub fn payload(self, page: usize, version: u64) -> Vec<u8> {
        let seed = version.rotate_left(40) ^ ((page as u64) << 8) ^ u64::from(self.number);
        let words = (1..).map(|word: u64| seed.wrapping_add(word).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        let bytes = version.to_le_bytes().into_iter().chain(words.flatten());
        bytes.take(self.bytes()).collect()
    }

    pub fn parts(self, payload: Vec<u8>) -> Vec<Bytes> {
        let mut rest = Bytes::from(payload);
        self.namespace().geometry.part_table().iter().map(|&bytes| rest.split_to(bytes as usize)).collect()
    }

    /// Version of a page with these bytes. `None` if no version has them.
    pub fn version_of(self, page: usize, bytes: &[u8]) -> Option<u64> {
        let version = u64::from_le_bytes(bytes.get(..VERSION_BYTES)?.try_into().ok()?);
        (self.payload(page, version) == bytes).then_some(version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_read_from_whole_pages_only() {
        for kind in KINDS {
            kind.namespace().geometry.validate().unwrap();
            let bytes = kind.parts(kind.payload(3, 9)).concat();
            assert_eq!(kind.version_of(3, &bytes), Some(9));
            assert_eq!(kind.version_of(4, &bytes), None);
            for at in (0..bytes.len()).step_by(997) {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1;
                assert_eq!(kind.version_of(3, &damaged), None, "byte {at}");
            }
        }
    }
}
