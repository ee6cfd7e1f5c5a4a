//! Memory of the caller, which transfers read and write.
//!
//! Invariant: the owner of the memory is dropped only after the last transfer that can touch it.
//! Deadlines and cancelled calls do not change this.

use crate::InvalidArgument;
use bytes::Bytes;
use std::sync::Arc;
use tokio::sync::Notify;

/// A run of bytes, and the owner that keeps them where they are.
pub struct Span<O> {
    start: *mut u8,
    len: usize,
    #[expect(dead_code, reason = "held until it is dropped")]
    owner: O,
}

// SAFETY: the pointer is used through `Target` and `Source` only, and `owner` keeps its memory.
unsafe impl<O: Send> Send for Span<O> {}
// SAFETY: as above; a shared reference reads the address and the length only.
unsafe impl<O: Sync> Sync for Span<O> {}

impl<O: Send + Sync + 'static> Span<O> {
    /// # Safety
    /// The `len` bytes at `start` stay readable, and writable if the span becomes a target, until
    /// `owner` is dropped. Until then nothing else writes to them, nor reads them if the span
    /// becomes a target.
    pub unsafe fn new(start: *mut u8, len: usize, owner: O) -> Self {
        Span { start, len, owner }
    }

    /// Fails unless the span has exactly `expected` bytes.
    pub fn check_bytes(&self, expected: usize) -> Result<(), InvalidArgument> {
        if self.len == expected {
            return Ok(());
        }
        Err(InvalidArgument(format!("the buffer has {} bytes instead of {expected}", self.len)))
    }

    /// Memory that a transfer writes.
    pub fn into_target(self, holds: &Arc<Holds>) -> Target<O> {
        Target { span: self, _hold: holds.clone() }
    }

    /// Memory that a transfer reads.
    pub fn into_bytes(self, holds: &Arc<Holds>) -> Bytes {
        Bytes::from_owner(Source { span: self, _hold: holds.clone() })
    }
}

/// Refuses targets that overlap: two transfers would write the same bytes.
pub fn check_distinct<'a, O: 'a>(targets: impl Iterator<Item = &'a Target<O>>) -> Result<(), InvalidArgument> {
    let range = |target: &Target<O>| (target.span.start.addr(), target.span.len);
    let mut ranges: Vec<(usize, usize)> = targets.map(range).filter(|(_, len)| *len > 0).collect();
    ranges.sort_unstable();
    if ranges.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
        return Err(InvalidArgument("two of the buffers overlap".into()));
    }
    Ok(())
}

/// Announces when all memory of one call is free again.
#[derive(Default)]
pub struct Holds {
    released: Arc<Notify>,
}

impl Holds {
    /// Signal that is given once, when the last target and the last source of the call are dropped.
    pub fn released(&self) -> Arc<Notify> {
        self.released.clone()
    }
}

impl Drop for Holds {
    fn drop(&mut self) {
        self.released.notify_one();
    }
}

/// Memory that a transfer writes.
pub struct Target<O> {
    span: Span<O>,
    _hold: Arc<Holds>,
}

impl<O> AsMut<[u8]> for Target<O> {
    fn as_mut(&mut self) -> &mut [u8] {
        if self.span.len == 0 {
            return &mut [];
        }
        // SAFETY: the owner keeps the memory writable until this target is dropped, and the targets
        // of a call do not overlap. The caller's contract forbids other accesses meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.span.start, self.span.len) }
    }
}

/// Memory that a transfer reads.
struct Source<O> {
    span: Span<O>,
    _hold: Arc<Holds>,
}

impl<O> AsRef<[u8]> for Source<O> {
    fn as_ref(&self) -> &[u8] {
        if self.span.len == 0 {
            return &[];
        }
        // SAFETY: the owner keeps the memory until this source is dropped. If the caller changes it
        // during the call, the node finds other bytes than the checksums say, and refuses the part.
        unsafe { std::slice::from_raw_parts(self.span.start, self.span.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_released_when_the_last_transfer_drops_it() {
        let (mut page, owner) = ([7u8; 64], Arc::new(()));
        let holds = Arc::new(Holds::default());
        let released = holds.released();
        // SAFETY: the array outlives the span.
        let span = unsafe { Span::new(page.as_mut_ptr(), page.len(), owner.clone()) };
        let whole = span.into_bytes(&holds);
        drop(holds);
        let part = whole.slice(10..20);
        drop(whole);
        assert_eq!((&part[..], Arc::strong_count(&owner)), (&[7; 10][..], 2));
        let mut wait = Box::pin(released.notified());
        assert!(futures::FutureExt::now_or_never(&mut wait).is_none(), "a slice still has the memory");
        drop(part);
        assert!(futures::FutureExt::now_or_never(wait).is_some() && Arc::strong_count(&owner) == 1);
    }

    #[test]
    fn overlapping_targets_are_refused() {
        let mut page = [0u8; 64];
        let holds = Arc::new(Holds::default());
        let start = page.as_mut_ptr();
        // SAFETY: all spans lie in the array, which outlives them; nothing accesses them.
        let target = |at: usize, len| unsafe { Span::new(start.add(at), len, ()) }.into_target(&holds);
        assert!(check_distinct([target(32, 32), target(0, 32)].iter()).is_ok());
        assert!(check_distinct([target(31, 32), target(0, 32)].iter()).is_err());
    }
}
