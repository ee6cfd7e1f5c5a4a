//! Setup of an io_uring, and the translation of requests into its entries.
//!
//! Invariant: the arena outlives its registration.

use super::files::Files;
use super::in_flight::{Action, InFlight};
use super::options::RingOptions;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use larder_memory::Arena;
use std::io;
use std::sync::Arc;

/// Maximum length of one registered buffer. The kernel accepts no longer one (1 GiB).
const PIECE_BYTES: usize = 1 << 30;

#[derive(Clone, Copy)]
pub(super) struct Registered {
    pub(super) buffers: bool,
    /// True if one entry can transfer several ranges of a registered buffer (Linux 6.15).
    vectored: bool,
}

/// Builds an entry for a registered file or for a plain descriptor, which are different types.
macro_rules! on_file {
    ($files:expr, $id:expr, |$fd:ident| $build:expr) => {
        if $files.registered {
            let $fd = types::Fixed($id.0);
            $build
        } else {
            let $fd = types::Fd($files.raw($id));
            $build
        }
    };
}

/// Creates a ring whose task work runs when this thread enters the kernel anyway, instead of
/// interrupting it. Older kernels do not know the flags and get a plain ring.
pub(super) fn build(entries: u32) -> io::Result<IoUring> {
    match IoUring::builder().setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        built => built,
    }
}

impl Registered {
    pub(super) fn new(ring: &IoUring, arena: &Arc<Arena>, options: &RingOptions) -> Registered {
        let mut probe = Probe::new();
        let probed = ring.submitter().register_probe(&mut probe).is_ok();
        let vectored =
            [opcode::ReadvFixed::CODE, opcode::WritevFixed::CODE].iter().all(|&code| probe.is_supported(code));
        let buffers = options.register_arena && register_arena(ring, arena, &options.name);
        Registered { buffers, vectored: probed && vectored }
    }

    /// Builds the entry for the rest of `inflight`. The entry points into its memory, so `inflight`
    /// must stay in place until it completes.
    pub(super) fn entry(self, arena: &Arena, files: &Files, inflight: &mut InFlight) -> squeue::Entry {
        let (file, action, offset) = (inflight.file(), inflight.action(), inflight.gather());
        let buffer = self.buffer(arena, &inflight.iovecs);
        match (action, inflight.iovecs.as_slice()) {
            (Action::Sync, _) | (_, []) => {
                let flags = types::FsyncFlags::DATASYNC;
                on_file!(files, file, |fd| opcode::Fsync::new(fd).flags(flags).build())
            }
            (action, &[piece]) => {
                let (start, len) = (piece.iov_base.cast::<u8>(), piece.iov_len as u32);
                match (action, buffer) {
                    (Action::Write, Some(index)) => on_file!(files, file, |fd| {
                        opcode::WriteFixed::new(fd, start, len, index).offset(offset).build()
                    }),
                    (Action::Write, None) => {
                        on_file!(files, file, |fd| opcode::Write::new(fd, start, len).offset(offset).build())
                    }
                    (_, Some(index)) => {
                        on_file!(files, file, |fd| opcode::ReadFixed::new(fd, start, len, index).offset(offset).build())
                    }
                    (_, None) => on_file!(files, file, |fd| opcode::Read::new(fd, start, len).offset(offset).build()),
                }
            }
            (action, iovecs) => {
                let (list, len) = (iovecs.as_ptr(), iovecs.len() as u32);
                match (action, buffer.filter(|_| self.vectored)) {
                    (Action::Write, Some(index)) => on_file!(files, file, |fd| {
                        opcode::WritevFixed::new(fd, list, len, index).offset(offset).build()
                    }),
                    (Action::Write, None) => {
                        on_file!(files, file, |fd| opcode::Writev::new(fd, list, len).offset(offset).build())
                    }
                    (_, Some(index)) => on_file!(files, file, |fd| {
                        opcode::ReadvFixed::new(fd, list, len, index).offset(offset).build()
                    }),
                    (_, None) => on_file!(files, file, |fd| opcode::Readv::new(fd, list, len).offset(offset).build()),
                }
            }
        }
    }

    /// Returns the index of the registered buffer that contains all ranges, if there is one.
    fn buffer(self, arena: &Arena, iovecs: &[libc::iovec]) -> Option<u16> {
        let start = arena.start();
        let len = arena.capacity();
        let index_of = |piece: &libc::iovec| {
            let from = (piece.iov_base as usize).checked_sub(start.as_ptr() as usize)?;
            let last = from + piece.iov_len.checked_sub(1)?;
            (last < len && from / PIECE_BYTES == last / PIECE_BYTES).then_some((from / PIECE_BYTES) as u16)
        };
        let first = index_of(iovecs.first()?)?;
        let same = self.buffers && iovecs[1..].iter().all(|piece| index_of(piece) == Some(first));
        same.then_some(first)
    }
}

fn register_arena(ring: &IoUring, arena: &Arc<Arena>, name: &str) -> bool {
    let start = arena.start();
    let len = arena.capacity();
    let iovecs: Vec<libc::iovec> = (0..len)
        .step_by(PIECE_BYTES)
        .map(|at| {
            // SAFETY: at < len, so the pointer stays inside the mapping.
            let base = unsafe { start.add(at) };
            libc::iovec { iov_base: base.as_ptr().cast(), iov_len: PIECE_BYTES.min(len - at) }
        })
        .collect();
    // SAFETY: the engine owns the arena and drops the ring first, so the mapping outlives the
    // registration.
    match unsafe { ring.submitter().register_buffers(&iovecs) } {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(ring = name, arena_bytes = len, %error, "the arena could not be registered with io_uring (raise RLIMIT_MEMLOCK); transfers cost more CPU");
            false
        }
    }
}
