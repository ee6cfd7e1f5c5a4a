//! Copies of whole pages that bypass the processor's cache.

/// Copies of at least this length use streaming stores. A reader of that much data does not find it
/// in the cache anyway, and streaming saves reading the cache lines that are overwritten.
const STREAM_BYTES: usize = 32 << 10;

/// Copies `from` to `into`.
///
/// # Panics
/// If the lengths differ.
pub fn copy_out(from: &[u8], into: &mut [u8]) {
    assert_eq!(from.len(), into.len(), "copies keep the length");
    #[cfg(target_arch = "x86_64")]
    if from.len() >= STREAM_BYTES && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX, and the lengths are equal.
        return unsafe { stream(from, into) };
    }
    into.copy_from_slice(from);
}

/// Copies with stores that bypass the cache.
///
/// # Safety
/// The processor has AVX, and both slices have the same length.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream(from: &[u8], into: &mut [u8]) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    const VECTOR: usize = size_of::<__m256i>();
    let lead = into.as_ptr().align_offset(VECTOR).min(into.len());
    let (head, body) = into.split_at_mut(lead);
    let (from_head, from_body) = from.split_at(lead);
    head.copy_from_slice(from_head);
    let whole = body.len() / VECTOR * VECTOR;
    for at in (0..whole).step_by(VECTOR) {
        // SAFETY: at + VECTOR <= length of both slices; the target is aligned because the unaligned
        // head was split off.
        unsafe {
            let vector = _mm256_loadu_si256(from_body.as_ptr().add(at).cast());
            _mm256_stream_si256(body.as_mut_ptr().add(at).cast(), vector);
        }
    }
    body[whole..].copy_from_slice(&from_body[whole..]);
    // Streaming stores are weakly ordered. The fence makes them visible before any later store of
    // this thread.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_writes_exactly_the_target_range() {
        for len in [0, 1, 31, 4096, STREAM_BYTES - 1, STREAM_BYTES, STREAM_BYTES + 77, 300_001] {
            for shift in [0, 1, 17] {
                let from: Vec<u8> = (0..len + shift).map(|i| (i * 7 + 1) as u8).collect();
                let mut into = vec![0xee; len + 2 * shift];
                copy_out(&from[shift..], &mut into[shift..shift + len]);
                assert!(into[shift..shift + len] == from[shift..], "{len} bytes shifted by {shift}");
                assert!(into[..shift].iter().chain(&into[shift + len..]).all(|&byte| byte == 0xee));
            }
        }
    }
}
