//! A sealed page in DRAM.

use larder_format::PageMeta;
use larder_memory::Slot;

/// A sealed page in DRAM. It never changes, so readers share it without a lock. Its memory returns
/// to the arena with the last reference.
#[derive(Debug)]
pub struct Page {
    pub meta: PageMeta,
    pub payload: Slot,
}

impl Page {
    /// Bytes of the slot, which is at least as large as the payload.
    pub(crate) fn bytes(&self) -> u32 {
        u32::try_from(self.payload.capacity()).unwrap_or(u32::MAX)
    }
}
