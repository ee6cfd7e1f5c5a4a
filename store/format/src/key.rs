//! The page key, by which clients name a page.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;

/// 32 bytes that name a page inside its namespace.
///
/// Keys of token pages are chained: `SHA-256(previous key ‖ tokens as u32 LE)`, without a previous
/// key for the first page. So a key names the page *and the whole sequence before it*. SGLang's
/// hierarchical cache uses the same chain, so tools can compute keys from token ids alone. Other
/// engines may use any 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct PageKey(pub [u8; 32]);

impl PageKey {
    /// Parent of a sequence's first page: all zeros. No token page has this key, short of a SHA-256
    /// preimage.
    pub const NONE: PageKey = PageKey([0; 32]);

    /// Key of the page with `tokens` that follows the page `previous`. `None` at the start of a
    /// sequence.
    pub fn chain(previous: Option<&PageKey>, tokens: &[u32]) -> PageKey {
        let mut hash = Sha256::new();
        if let Some(previous) = previous {
            hash.update(previous.0);
        }
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        PageKey(hash.finalize().into())
    }

    /// First 8 bytes as a little-endian number. Its values are uniform for token pages, so callers
    /// may use them as a hash.
    pub fn prefix_u64(&self) -> u64 {
        u64::from_le_bytes(self.0[..8].try_into().expect("8 of 32 bytes"))
    }
}

impl fmt::Debug for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageKey({})", hex::encode(&self.0[..8]))
    }
}

impl fmt::Display for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

/// Keys of the whole pages of `page_tokens` tokens at the start of `tokens`. A shorter tail has no
/// key.
pub fn page_keys(tokens: &[u32], page_tokens: usize) -> Vec<PageKey> {
    let mut keys: Vec<PageKey> = Vec::with_capacity(tokens.len() / page_tokens.max(1));
    for page in tokens.chunks_exact(page_tokens) {
        keys.push(PageKey::chain(keys.last(), page));
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_follows_the_published_rule() {
        // Computed independently:
        // python3 -c "import hashlib,struct as s; d=hashlib.sha256(s.pack('<2I',1,2)).digest();
        // print(d.hex(), hashlib.sha256(d+s.pack('<2I',3,4)).hexdigest())"
        let keys = page_keys(&[1, 2, 3, 4, 5], 2);
        assert_eq!(keys.len(), 2);
        assert_eq!(keys[0].to_string(), "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f");
        assert_eq!(keys[1].to_string(), "c57b445f90651b9a650e516ab2238c965b21af35608a31c303e6d9e407f2915c");
    }

    #[test]
    fn a_key_depends_on_everything_before_it() {
        let a = page_keys(&[1, 2, 3, 4], 2);
        let b = page_keys(&[9, 2, 3, 4], 2);
        assert_ne!(a[1], b[1]);
    }
}
