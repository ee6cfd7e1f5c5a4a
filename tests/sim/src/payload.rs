//! Names and bytes of pages.
//!
//! Always true: the bytes of a page follow from its key and its version alone, and two versions differ from the first
//! bytes on, so that any byte that turns up can be attributed.

use larder_format::{NamespaceId, PageId, PageKey};

/// Every key of the simulation begins with these bytes, so that the device knows a key when it sees one.
pub const KEY_MAGIC: [u8; 8] = *b"SIMxKEY:";
const NAMESPACES: u64 = 2;

fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// The page key of a key.
pub fn page_key(key: u64) -> PageKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&KEY_MAGIC);
    bytes[8..16].copy_from_slice(&key.to_le_bytes());
    bytes[16..24].copy_from_slice(&mix(key).to_le_bytes());
    PageKey(bytes)
}

/// The full name of a key.
pub fn page_id(key: u64) -> PageId {
    PageId { namespace: NamespaceId([(key % NAMESPACES) as u8 + 1; 32]), key: page_key(key) }
}

/// The key that a block names, if it names one near its beginning.
pub fn key_in(block: &[u8]) -> Option<u64> {
    let head = &block[..block.len().min(512)];
    let at = head.windows(8).position(|window| window == KEY_MAGIC)?;
    let number = head.get(at + 8..at + 16)?;
    Some(u64::from_le_bytes(number.try_into().ok()?))
}

/// From one word's state to the next.
const STEP: (u64, u64) = (6_364_136_223_846_793_005, 1_442_695_040_888_963_407);

/// The state so many words later.
fn skip(mut state: u64, mut words: usize) -> u64 {
    let (mut factor, mut term) = STEP;
    while words > 0 {
        if words & 1 == 1 {
            state = state.wrapping_mul(factor).wrapping_add(term);
        }
        // Twice as many at once.
        term = term.wrapping_mul(factor.wrapping_add(1));
        factor = factor.wrapping_mul(factor);
        words >>= 1;
    }
    state
}

/// The words of a version's payload, from one of them on.
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

/// Writes the bytes of a version.
pub fn fill(key: u64, version: u64, bytes: &mut [u8]) {
    for (target, word) in bytes.chunks_mut(8).zip(words(key, version)) {
        target.copy_from_slice(&word[..target.len()]);
    }
}

/// Whether these are the bytes of the version; if not, what is wrong.
pub fn check(key: u64, version: u64, bytes: &[u8]) -> Result<(), String> {
    let wrong = |(found, word): (&[u8], [u8; 8])| *found != word[..found.len()];
    let Some(at) = bytes.chunks(8).zip(words(key, version)).position(wrong) else { return Ok(()) };
    let number = |from: usize| bytes.get(from..from + 8).map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default()));
    Err(format!(
        "bytes differ from key {key} version {version} from byte {} on; they begin with key {:?} version {:?}",
        at * 8,
        number(0),
        number(8)
    ))
}

/// Whether these are bytes of the version, from byte `at` on.
pub fn is_at(key: u64, version: u64, at: usize, bytes: &[u8]) -> bool {
    let expected = words_from(key, version, at / 8).flatten().skip(at % 8);
    expected.take(bytes.len()).eq(bytes.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_bytes_are_noticed() {
        let mut bytes = vec![0; 1001];
        fill(3, 4, &mut bytes);
        assert_eq!(check(3, 4, &bytes), Ok(()));
        assert!(check(3, 5, &bytes).is_err());
        assert!(check(4, 4, &bytes).is_err());
        bytes[1000] ^= 1;
        assert!(check(3, 4, &bytes).unwrap_err().contains("from byte 1000 on"));
    }

    #[test]
    fn bytes_anywhere_are_known() {
        let mut bytes = vec![0; 1001];
        fill(3, 4, &mut bytes);
        for range in [0..1001, 0..1, 7..9, 8..16, 13..17, 16..24, 17..990, 1000..1001, 5..5] {
            assert!(is_at(3, 4, range.start, &bytes[range.clone()]), "{range:?}");
        }
        assert!(!is_at(3, 4, 17, &bytes[16..900]) && !is_at(3, 5, 16, &bytes[16..900]));
    }

    #[test]
    fn keys_are_found_in_blocks() {
        let mut block = vec![0; 4096];
        block[77..109].copy_from_slice(&page_key(9).0);
        assert_eq!(key_in(&block), Some(9));
        assert_eq!(key_in(&[0; 4096]), None);
    }
}
