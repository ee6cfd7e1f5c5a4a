//! Registered memory.
//!
//! Always true: the memory is alive while a device knows it; if a device does not let go of it, it is never freed. Peers can do
//! nothing with the keys of a region: it is registered for this side alone, and for opening windows in it.

use crate::error::Error;
use crate::memory::{Memory, Span};
use crate::nic::{Nic, WindowKind};
use crate::verbs::{Domain, Local, Registration, Remote};
use ibverbs_sys::ibv_access_flags as Access;
use std::sync::Arc;

/// Longest piece that is registered as one.
const PIECE_BYTES: usize = 1 << 30;

/// Memory that one device knows.
pub struct Region {
    // Above `memory`: registrations end first.
    pieces: Vec<Registration>,
    piece_bytes: usize,
    span: Span,
    nic: Arc<Nic>,
    memory: Option<Arc<dyn Memory>>,
}

impl Region {
    /// Registers all of `memory`. This pins it: seconds for many gigabytes, so not on a thread that has other things to do.
    pub fn register(nic: &Arc<Nic>, memory: Arc<dyn Memory>) -> Result<Arc<Region>, Error> {
        Region::register_in_pieces(nic, memory, PIECE_BYTES)
    }

    /// As [`Region::register`], in pieces of `piece_bytes`. Windows that straddle two of them are more costly.
    pub fn register_in_pieces(
        nic: &Arc<Nic>,
        memory: Arc<dyn Memory>,
        piece_bytes: usize,
    ) -> Result<Arc<Region>, Error> {
        let span = memory.span();
        if span.is_empty() || piece_bytes == 0 {
            return Err(Error::Invalid("no memory to register"));
        }
        let mut access = Access::IBV_ACCESS_LOCAL_WRITE;
        if nic.windows == WindowKind::Type2 {
            access |= Access::IBV_ACCESS_MW_BIND;
        }
        let mut region = Region { pieces: Vec::new(), piece_bytes, span, nic: nic.clone(), memory: Some(memory) };
        for at in (0..span.len()).step_by(piece_bytes) {
            // SAFETY: `at` lies inside the memory.
            let start = unsafe { span.start().add(at) };
            let piece = Span::new(start, piece_bytes.min(span.len() - at));
            // SAFETY: `memory` keeps it mapped, and is let go of after the registration has ended, or never.
            region.pieces.push(unsafe { Registration::new(&nic.domain, piece, access) }?);
        }
        Ok(Arc::new(region))
    }

    /// The device.
    pub fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// Never: there are no empty regions.
    pub fn is_empty(&self) -> bool {
        self.span.is_empty()
    }

    /// Whether these bytes, of which there are some, lie in it.
    pub fn contains(&self, bytes: &[u8]) -> bool {
        self.check(&self.nic, Span::of(bytes)).is_ok()
    }

    pub(crate) fn nic_domain(&self) -> &Arc<Domain> {
        &self.nic.domain
    }

    /// Checks that it is of that device, and the bytes are of it.
    pub(crate) fn check(&self, nic: &Arc<Nic>, span: Span) -> Result<(), Error> {
        if span.is_empty() {
            return Err(Error::Invalid("no bytes to transfer"));
        }
        let inside = span.address().checked_sub(self.span.address()).and_then(|offset| offset.checked_add(span.len()));
        match inside.is_some_and(|end| end <= self.span.len()) && Arc::ptr_eq(nic, &self.nic) {
            true => Ok(()),
            false => Err(Error::NotRegistered),
        }
    }

    /// The one registration that all these bytes are in, if there is one.
    pub(crate) fn piece(&self, span: Span) -> Option<&Registration> {
        let offset = span.address() - self.span.address();
        let piece = self.pieces.get(offset / self.piece_bytes)?;
        (offset % self.piece_bytes + span.len() <= piece.span().len()).then_some(piece)
    }

    /// Cuts a transfer between these bytes and those at `remote` into requests of at most `chunk_bytes`.
    pub(crate) fn cut(&self, span: Span, remote: Remote, chunk_bytes: u32, out: &mut Vec<(Local, Remote)>) {
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
                tracing::error!(device = self.nic.name(), %error, "a device does not let go of memory, which is not freed");
                self.nic.counters.stuck.add(1);
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
