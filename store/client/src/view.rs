//! Pages that are read where they lie.

use crate::client::Tier;
use larder_format::{CHUNK_BYTES, Mismatch, PageId, PageMeta};
use larder_share::{Held, copy_out};
use larder_wire::Entry;
use parking_lot::Mutex;
use std::ops::Deref;
use tokio::sync::Notify;

/// A page, checked: the bytes that were put. On the node's machine they are the node's memory, which it keeps until this is
/// dropped; otherwise a copy.
#[derive(Debug)]
pub struct PageView {
    pub(crate) bytes: ViewBytes,
    pub(crate) tier: Tier,
}

#[derive(Debug)]
pub(crate) enum ViewBytes {
    Held(Held),
    Copied(Vec<u8>),
}

impl PageView {
    /// Where the page was.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Whether these are the node's own bytes.
    pub fn in_place(&self) -> bool {
        matches!(self.bytes, ViewBytes::Held(_))
    }
}

impl Deref for PageView {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.bytes {
            ViewBytes::Held(held) => held,
            ViewBytes::Copied(bytes) => bytes,
        }
    }
}

/// A buffer that is made when it is needed.
pub(crate) struct Later {
    pub(crate) length: usize,
    pub(crate) bytes: Vec<u8>,
}

impl AsMut<[u8]> for Later {
    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes.resize(self.length, 0);
        &mut self.bytes
    }
}

/// Checks a page in place and copies it, chunk by chunk, so that memory is read once.
pub(crate) fn copy_checked(id: &PageId, meta: &PageMeta, from: &[u8], into: &mut [u8]) -> Result<(), Mismatch> {
    meta.check_identity(id)?;
    let expected = meta.payload_bytes();
    for found in [from.len(), into.len()] {
        if found != expected {
            return Err(Mismatch::Length { expected, found });
        }
    }
    let mut crcs = meta.chunk_crcs.iter();
    let mut at = 0;
    for (part, &bytes) in meta.part_bytes.iter().enumerate() {
        let end = at + bytes as usize;
        for (chunk, start) in (at..end).step_by(CHUNK_BYTES).enumerate() {
            let range = start..end.min(start + CHUNK_BYTES);
            if crcs.next() != Some(&crc32fast::hash(&from[range.clone()])) {
                return Err(Mismatch::Crc { part, chunk });
            }
            copy_out(&from[range.clone()], &mut into[range]);
        }
        at = end;
    }
    Ok(())
}

/// Pages that were read in place and are to be released: the node hears of many at a time.
#[derive(Debug, Default)]
pub(crate) struct Releases {
    waiting: Mutex<Vec<Entry>>,
    bell: Notify,
}

impl Releases {
    pub(crate) fn add(&self, entry: Entry) {
        self.waiting.lock().push(entry);
        self.bell.notify_one();
    }

    /// Waits until there are some, and takes at most `max` of them.
    pub(crate) async fn take(&self, max: usize) -> Vec<Entry> {
        loop {
            let taken: Vec<Entry> = {
                let mut waiting = self.waiting.lock();
                let now = waiting.len().min(max);
                waiting.drain(..now).collect()
            };
            if !taken.is_empty() {
                return taken;
            }
            self.bell.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{NamespaceId, PageKey};

    #[test]
    fn a_copy_is_the_page_or_a_mismatch() {
        let parts = [150_000u32, 65_536, 1];
        let payload: Vec<u8> = (0..parts.iter().sum()).map(|i: u32| (i * 31) as u8).collect();
        let id = PageId { namespace: NamespaceId([1; 32]), key: PageKey([2; 32]) };
        let meta = PageMeta::describe(id, PageKey::NONE, 0, parts.to_vec(), &payload);
        let mut into = vec![0; payload.len()];
        copy_checked(&id, &meta, &payload, &mut into).unwrap();
        assert!(into == payload);
        for at in [0, 65_536, 149_999, 150_000, payload.len() - 1] {
            let mut bad = payload.clone();
            bad[at] ^= 1;
            assert!(matches!(copy_checked(&id, &meta, &bad, &mut into), Err(Mismatch::Crc { .. })), "byte {at}");
        }
        let other = PageId { key: PageKey([3; 32]), ..id };
        assert!(copy_checked(&other, &meta, &payload, &mut into).is_err());
        assert!(copy_checked(&id, &meta, &payload[1..], &mut into).is_err());
        assert!(copy_checked(&id, &meta, &payload, &mut into[1..]).is_err());
    }
}
