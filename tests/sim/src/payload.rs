//! Keys and page contents that identify the put they belong to.
//!
//! Invariants:
//! - The bytes of a page follow from its key and its version.
//! - Two versions differ from their first bytes on, so the model can attribute any byte.

use larder_format::{NamespaceId, PageId, PageKey};

/// Prefix of every simulated key. The device recognizes keys in the blocks it stores by it.
pub const KEY_MAGIC: [u8; 8] = *b"SIMxKEY:";
/// Number of namespaces. Keys that follow each other name pages of different namespaces, and up to
/// this many of them have the same key bytes.
pub const NAMESPACES: u64 = 3;

/// One step of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
/// 2014). It is a bijection, so different numbers stay different.
fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// Number of a key within its namespace. The key bytes follow from it. The [`NAMESPACES`] keys that
/// share a number have the same key bytes.
pub fn number_of(key: u64) -> u64 {
    key / NAMESPACES
}

pub fn key_in_namespace(namespace: u64, number: u64) -> u64 {
    number * NAMESPACES + namespace
}

pub fn namespace_of(key: u64) -> u64 {
    key % NAMESPACES
}

pub fn page_key(key: u64) -> PageKey {
    let number = number_of(key);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&KEY_MAGIC);
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    bytes[16..24].copy_from_slice(&mix(number).to_le_bytes());
    PageKey(bytes)
}

pub fn namespace_id(namespace: u64) -> NamespaceId {
    NamespaceId([namespace as u8 + 1; 32])
}

pub fn page_id(key: u64) -> PageId {
    PageId { namespace: namespace_id(namespace_of(key)), key: page_key(key) }
}

/// Returns the number of the key that a block names within its first 512 bytes, if any. It searches
/// at every byte for [`KEY_MAGIC`]. The number follows, little-endian.
pub fn number_in(block: &[u8]) -> Option<u64> {
    let head = &block[..block.len().min(512)];
    let at = head.windows(8).position(|window| window == KEY_MAGIC)?;
    let number = head.get(at + 8..at + 16)?;
    Some(u64::from_le_bytes(number.try_into().ok()?))
}

/// Factor and term of the linear congruential generator that fills pages. They are those of MMIX
/// (Knuth, "The Art of Computer Programming", volume 2).
const STEP: (u64, u64) = (6_364_136_223_846_793_005, 1_442_695_040_888_963_407);

/// State after `words` steps, in logarithmic time. The algorithm is that of F. Brown, "Random
/// Number Generation with Arbitrary Strides", 1994.
fn skip(mut state: u64, mut words: usize) -> u64 {
    let (mut factor, mut term) = STEP;
    while words > 0 {
        if words & 1 == 1 {
            state = state.wrapping_mul(factor).wrapping_add(term);
        }
        // Compose the step with itself: one step now stands for two.
        term = term.wrapping_mul(factor.wrapping_add(1));
        factor = factor.wrapping_mul(factor);
        words >>= 1;
    }
    state
}

fn words_from(key: u64, version: u64, first: usize) -> impl Iterator<Item = [u8; 8]> {
    let names = [key.to_le_bytes(), version.to_le_bytes()];
    let mut state = skip(mix(key ^ mix(version)), first.saturating_sub(names.len()));
    names.into_iter().skip(first).chain(std::iter::repeat_with(move || {
        state = state.wrapping_mul(STEP.0).wrapping_add(STEP.1);
        state.to_le_bytes()
    }))
}

fn words(key: u64, version: u64) -> impl Iterator<Item = [u8; 8]> {
    words_from(key, version, 0)
}

/// Fills `bytes` with the page of `key` in `version`: both numbers, little-endian in 8 bytes each,
/// and then the states of a generator that starts from both.
pub fn fill(key: u64, version: u64, bytes: &mut [u8]) {
    for (target, word) in bytes.chunks_mut(8).zip(words(key, version)) {
        target.copy_from_slice(&word[..target.len()]);
    }
}

/// Checks that these are the bytes of the version. The error names the first difference and the put
/// that the bytes begin with.
pub fn check(key: u64, version: u64, bytes: &[u8]) -> Result<(), String> {
    let wrong = |(found, word): (&[u8], [u8; 8])| *found != word[..found.len()];
    let Some(at) = bytes.chunks(8).zip(words(key, version)).position(wrong) else { return Ok(()) };
    let number = |from: usize| bytes.get(from..from + 8).map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default()));
    Err(format!(
        "bytes differ from key {key} version {version} from byte {} on, and begin with key {:?} version {:?}",
        at * 8,
        number(0),
        number(8)
    ))
}

/// Returns `true` if these are the bytes of the version from offset `at` on.
pub fn is_at(key: u64, version: u64, at: usize, bytes: &[u8]) -> bool {
    let expected = words_from(key, version, at / 8).flatten().skip(at % 8);
    expected.take(bytes.len()).eq(bytes.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_share_key_bytes() {
        let keys: Vec<u64> = (0..NAMESPACES).map(|namespace| key_in_namespace(namespace, 7)).collect();
        assert!(keys.iter().all(|&key| page_key(key) == page_key(keys[0]) && number_of(key) == 7));
        let namespaces: std::collections::BTreeSet<_> = keys.iter().map(|&key| page_id(key).namespace).collect();
        assert_eq!(namespaces.len() as u64, NAMESPACES);
    }

    #[test]
    fn wrong_bytes_are_detected() {
        let mut bytes = vec![0; 1001];
        fill(3, 4, &mut bytes);
        assert_eq!(check(3, 4, &bytes), Ok(()));
        assert!(check(3, 5, &bytes).is_err());
        assert!(check(4, 4, &bytes).is_err());
        bytes[1000] ^= 1;
        assert!(check(3, 4, &bytes).unwrap_err().contains("from byte 1000 on"));
    }

    #[test]
    fn any_range_is_attributed_to_its_version() {
        let mut bytes = vec![0; 1001];
        fill(3, 4, &mut bytes);
        for range in [0..1001, 0..1, 7..9, 8..16, 13..17, 16..24, 17..990, 1000..1001, 5..5] {
            assert!(is_at(3, 4, range.start, &bytes[range.clone()]), "{range:?}");
        }
        assert!(!is_at(3, 4, 17, &bytes[16..900]) && !is_at(3, 5, 16, &bytes[16..900]));
    }

    #[test]
    fn key_number_is_found_in_a_block() {
        let mut block = vec![0; 4096];
        block[77..109].copy_from_slice(&page_key(9).0);
        assert_eq!(number_in(&block), Some(number_of(9)));
        assert_eq!(number_in(&[0; 4096]), None);
    }
}
