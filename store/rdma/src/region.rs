//! Registered memory.
//!
//! Invariants:
//! - The memory lives while a device knows it. If the device does not release it, it is never
//!   freed.
//! - The keys of a region give a peer no access. It is registered for local use and for binding
//!   memory windows.

use crate::error::Error;
use crate::nic::{GrantKind, Nic};
use crate::verbs::{Domain, Local, Registration, Remote};
use ibverbs_sys::ibv_access_flags as Access;
use larder_memory::span::{DmaMemory, Span};
use std::sync::Arc;

/// Maximum length of one registration: 1 GiB, which every device supports.
const PIECE_BYTES: usize = 1 << 30;

/// Memory that one device knows. It stays pinned until it is deregistered. Memory that the device
/// fails to release is leaked.
pub struct Region {
    // Declared before `memory`: registrations end before the memory is freed.
    pieces: Vec<Registration>,
    piece_bytes: usize,
    span: Span,
    nic: Arc<Nic>,
    memory: Option<Arc<dyn DmaMemory>>,
}

impl Region {
    /// Registers all of `memory`. This pins it and takes seconds for many gigabytes, so it must run
    /// on a thread that may block.
    pub fn register(nic: &Arc<Nic>, memory: Arc<dyn DmaMemory>) -> Result<Arc<Region>, Error> {
        Region::register_in_pieces(nic, memory, PIECE_BYTES)
    }

    /// Registers `memory` in pieces of `piece_bytes`. Grants that straddle two pieces cost an extra
    /// registration.
    pub fn register_in_pieces(
        nic: &Arc<Nic>,
        memory: Arc<dyn DmaMemory>,
        piece_bytes: usize,
    ) -> Result<Arc<Region>, Error> {
        let span = memory.span();
        if span.is_empty() || piece_bytes == 0 {
            return Err(Error::Invalid("the memory to register is empty"));
        }
        let mut access = Access::IBV_ACCESS_LOCAL_WRITE;
        if nic.grant_kind == GrantKind::MemoryWindow {
            access |= Access::IBV_ACCESS_MW_BIND;
        }
        let mut region = Region { pieces: Vec::new(), piece_bytes, span, nic: nic.clone(), memory: Some(memory) };
        for at in (0..span.len()).step_by(piece_bytes) {
            // SAFETY: `at` is less than the length of the memory.
            let start = unsafe { span.start().add(at) };
            let piece = Span::new(start, piece_bytes.min(span.len() - at));
            // SAFETY: `memory` keeps the mapping. It is dropped after the registration has ended,
            // or leaked.
            region.pieces.push(unsafe { Registration::new(&nic.domain, piece, access) }?);
        }
        Ok(Arc::new(region))
    }

    pub fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// Always returns `false`: empty memory is not registered.
    pub fn is_empty(&self) -> bool {
        self.span.is_empty()
    }

    pub fn contains(&self, bytes: &[u8]) -> bool {
        self.check(&self.nic, Span::of(bytes)).is_ok()
    }

    pub(crate) fn nic_domain(&self) -> &Arc<Domain> {
        &self.nic.domain
    }

    /// Fails unless the region is of this device and contains the span.
    pub(crate) fn check(&self, nic: &Arc<Nic>, span: Span) -> Result<(), Error> {
        if span.is_empty() {
            return Err(Error::Invalid("the transfer is empty"));
        }
        let inside = span.address().checked_sub(self.span.address()).and_then(|offset| offset.checked_add(span.len()));
        match inside.is_some_and(|end| end <= self.span.len()) && Arc::ptr_eq(nic, &self.nic) {
            true => Ok(()),
            false => Err(Error::NotRegistered),
        }
    }

    /// Returns the one registration that contains the whole span, if there is one.
    pub(crate) fn registration_of(&self, span: Span) -> Option<&Registration> {
        let offset = span.address() - self.span.address();
        let piece = self.pieces.get(offset / self.piece_bytes)?;
        (offset % self.piece_bytes + span.len() <= piece.span().len()).then_some(piece)
    }

    /// Splits a transfer between `span` and `remote` into requests of at most `chunk_bytes`. No
    /// request crosses a registration.
    pub(crate) fn split(&self, span: Span, remote: Remote, chunk_bytes: u32, out: &mut Vec<(Local, Remote)>) {
        let mut done = 0;
        while done < span.len() {
            let offset = span.address() + done - self.span.address();
            let piece = &self.pieces[offset / self.piece_bytes];
            let left = piece.span().len() - offset % self.piece_bytes;
            let len = left.min(span.len() - done).min(chunk_bytes as usize);
            let local = Local { address: (span.address() + done) as u64, len: len as u32, key: piece.local_key() };
            out.push((local, Remote { address: remote.address.wrapping_add(done as u64), key: remote.key }));
            done += len;
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        for piece in &mut self.pieces {
            if let Err(error) = piece.close() {
                tracing::error!(device = self.nic.name(), %error, "the device failed to deregister memory; the memory is leaked until the process exits");
                self.nic.counters.leaked.add(1);
                std::mem::forget(self.memory.take());
            }
        }
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("len", &self.len()).field("pieces", &self.pieces.len()).finish()
    }
}
