//! Pages whose bytes tell which page and which version of it they are.
//!
//! Always true: no two pages, and no two versions of a page, have the same bytes, and every byte of a page is checked.

use bytes::Bytes;
use larder_client::NewPage;
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};

/// Pages of one length.
#[derive(Debug, Clone)]
pub struct Kind {
    number: u64,
    seed: u64,
    /// How many there are.
    pub keys: usize,
    geometry: PageGeometry,
}

/// Layers, tokens and elements per head, layers per part, and how many pages: 6,000 bytes in three parts (no whole
/// blocks), 64 KiB in two unequal parts, and 256,000 bytes in one.
const SHAPES: [(u32, u32, u32, u32, usize); 3] = [(3, 100, 5, 1, 512), (4, 64, 64, 3, 384), (5, 200, 64, 5, 128)];

impl Kind {
    /// All kinds. Keys depend on `seed`, so that an episode never meets the keys of another.
    pub fn all(seed: u64) -> Vec<Kind> {
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
                Kind { number, seed, keys, geometry }
            })
            .collect()
    }

    /// The namespace of these pages.
    pub fn namespace(&self) -> NamespaceDescriptor {
        let (model, tenant) = (format!("crash-{}", self.number), String::from("bench"));
        NamespaceDescriptor { model, weights: [self.number as u8; 32], geometry: self.geometry, tenant }
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.geometry.page_bytes()
    }

    /// Key of page `key`.
    pub fn key(&self, key: usize) -> PageKey {
        let mut words = Words::new(&[self.seed, self.number, key as u64]);
        let mut bytes = [0; 32];
        bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&words.next().to_le_bytes()));
        PageKey(bytes)
    }

    /// Page `key`, for a put.
    pub fn page(&self, key: usize) -> NewPage {
        NewPage { key: self.key(key), parent: PageKey::NONE, position: 0 }
    }

    /// The bytes of one version: the version, and then numbers that follow from it and the page.
    pub fn payload(&self, key: usize, version: u64) -> Vec<u8> {
        let mut words = Words::new(&[self.seed, self.number, key as u64, version]);
        let mut bytes = Vec::with_capacity(self.page_bytes() + 8);
        bytes.extend_from_slice(&version.to_le_bytes());
        while bytes.len() < self.page_bytes() {
            bytes.extend_from_slice(&words.next().to_le_bytes());
        }
        bytes.truncate(self.page_bytes());
        bytes
    }

    /// The same in parts.
    pub fn parts(&self, key: usize, version: u64) -> Vec<Bytes> {
        let mut rest = Bytes::from(self.payload(key, version));
        self.geometry.part_table().iter().map(|&bytes| rest.split_to(bytes as usize)).collect()
    }

    /// Which version of page `key` these bytes are; `None` if they are none.
    pub fn version_of(&self, key: usize, bytes: &[u8]) -> Option<u64> {
        let version = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
        (self.payload(key, version) == bytes).then_some(version)
    }
}

/// SplitMix64.
struct Words(u64);

impl Words {
    fn new(seeds: &[u64]) -> Words {
        seeds.iter().fold(Words(0), |mut words, &seed| {
            words.0 ^= seed;
            Words(words.next())
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
    fn every_wrong_byte_and_every_other_page_is_told_apart() {
        for kind in Kind::all(7) {
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
        assert_ne!(Kind::all(7)[0].key(0), Kind::all(8)[0].key(0));
        assert_ne!(Kind::all(7)[0].key(0), Kind::all(7)[1].key(0));
    }
}
