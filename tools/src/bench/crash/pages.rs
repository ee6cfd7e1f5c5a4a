//! Pages whose bytes identify the page and its version.
//!
//! Invariants:
//! - No two pages, and no two versions of a page, have the same bytes.
//! - Every byte of a page is checked.

use bytes::Bytes;
use larder_client::NewPage;
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};

#[derive(Debug, Clone)]
pub struct PageKind {
    number: u64,
    seed: u64,
    pub keys: usize,
    geometry: PageGeometry,
}

/// Layers, tokens, elements per head, layers per part, and number of pages. The shapes are 6,000
/// bytes in three parts (not a multiple of the block size), 64 KiB in two unequal parts, and
/// 256,000 bytes in one part.
const SHAPES: [(u32, u32, u32, u32, usize); 3] = [(3, 100, 5, 1, 512), (4, 64, 64, 3, 384), (5, 200, 64, 5, 128)];

impl PageKind {
    /// Returns all kinds. Keys depend on `seed`, so that episodes have no key in common.
    pub fn all(seed: u64) -> Vec<PageKind> {
        let kinds = SHAPES.iter().zip(0..);
        kinds
            .map(|(&(layers, page_tokens, head_dim, layers_per_part, keys), number)| {
                let geometry = PageGeometry {
                    dtype: KvDtype::F16,
                    layers,
                    kv_heads: 1,
                    head_dim,
                    page_tokens,
                    layers_per_part,
                    head_groups: 1,
                };
                PageKind { number, seed, keys, geometry }
            })
            .collect()
    }

    pub fn namespace(&self) -> NamespaceDescriptor {
        let model = format!("crash-{}", self.number);
        let tenant = String::from("bench");
        NamespaceDescriptor { model, weights: [self.number as u8; 32], geometry: self.geometry, tenant }
    }

    pub fn page_bytes(&self) -> usize {
        self.geometry.page_bytes()
    }

    pub fn key(&self, key: usize) -> PageKey {
        let mut words = SplitMix64::new(&[self.seed, self.number, key as u64]);
        let mut bytes = [0; 32];
        bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&words.next().to_le_bytes()));
        PageKey(bytes)
    }

    pub fn page(&self, key: usize) -> NewPage {
        NewPage::first(self.key(key))
    }

    /// Returns the bytes of one version: the version number, then pseudo-random words derived from
    /// it and the page.
    pub fn payload(&self, key: usize, version: u64) -> Vec<u8> {
        let mut words = SplitMix64::new(&[self.seed, self.number, key as u64, version]);
        let mut bytes = Vec::with_capacity(self.page_bytes() + 8);
        bytes.extend_from_slice(&version.to_le_bytes());
        while bytes.len() < self.page_bytes() {
            bytes.extend_from_slice(&words.next().to_le_bytes());
        }
        bytes.truncate(self.page_bytes());
        bytes
    }

    pub fn parts(&self, key: usize, version: u64) -> Vec<Bytes> {
        let mut rest = Bytes::from(self.payload(key, version));
        self.geometry.part_table().iter().map(|&bytes| rest.split_to(bytes as usize)).collect()
    }

    pub fn version_of(&self, key: usize, bytes: &[u8]) -> Option<u64> {
        let version = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
        (self.payload(key, version) == bytes).then_some(version)
    }
}

struct SplitMix64(u64);

impl SplitMix64 {
    fn new(seeds: &[u64]) -> SplitMix64 {
        seeds.iter().fold(SplitMix64(0), |mut words, &seed| {
            words.0 ^= seed;
            SplitMix64(words.next())
        })
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_of_rejects_every_wrong_byte_and_every_other_page() {
        for kind in PageKind::all(7) {
            kind.namespace().geometry.validate().unwrap();
            let bytes = kind.payload(3, 9);
            assert_eq!((bytes.len(), kind.version_of(3, &bytes)), (kind.page_bytes(), Some(9)));
            assert_eq!(kind.parts(3, 9).concat(), bytes);
            assert_eq!(kind.version_of(4, &bytes), None);
            assert_eq!(kind.version_of(3, &bytes[1..]), None);
            for at in (0..bytes.len()).step_by(997) {
                let mut bad = bytes.clone();
                bad[at] ^= 1;
                assert_eq!(kind.version_of(3, &bad), None, "byte {at}");
            }
        }
        assert_ne!(PageKind::all(7)[0].key(0), PageKind::all(8)[0].key(0));
        assert_ne!(PageKind::all(7)[0].key(0), PageKind::all(7)[1].key(0));
    }
}
