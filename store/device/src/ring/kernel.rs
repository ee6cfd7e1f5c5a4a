//! The io_uring of a ring: what it was granted, and how requests become its entries.
//!
//! Always true: the arena outlives its registration.

use super::RingOptions;
use super::files::Files;
use super::table::{Action, InFlight};
use crate::arena::Arena;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use std::io;
use std::sync::Arc;

/// Most bytes of one registered buffer: the kernel takes no larger one.
const PIECE_BYTES: usize = 1 << 30;

/// What the kernel can do with the arena.
#[derive(Clone, Copy)]
pub(super) struct Registered {
    /// The arena is registered, in pieces.
    pub(super) buffers: bool,
    /// One entry can move several pieces of a registered buffer (Linux 6.15).
    vectored: bool,
}

/// Builds an entry for a registered file or a plain descriptor, which are different types.
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

/// Task work is run when we enter the kernel anyway, where it knows how; older kernels get a plain ring.
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

    /// The entry for what is left of `inflight`, whose memory it names.
    pub(super) fn entry(self, arena: &Arena, files: &Files, inflight: &mut InFlight) -> squeue::Entry {
        let (file, action, offset) = (inflight.file(), inflight.action(), inflight.gather());
        let buffer = self.buffer(arena, &inflight.pieces);
        match (action, inflight.pieces.as_slice()) {
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
            (action, pieces) => {
                let (list, len) = (pieces.as_ptr(), pieces.len() as u32);
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

    /// The registered buffer that all the pieces lie in, if there is one.
    fn buffer(self, arena: &Arena, pieces: &[libc::iovec]) -> Option<u16> {
        let (start, len) = arena.span();
        let index_of = |piece: &libc::iovec| {
            let from = (piece.iov_base as usize).checked_sub(start.as_ptr() as usize)?;
            let last = from + piece.iov_len.checked_sub(1)?;
            (last < len && from / PIECE_BYTES == last / PIECE_BYTES).then_some((from / PIECE_BYTES) as u16)
        };
        let first = index_of(pieces.first()?)?;
        let same = self.buffers && pieces[1..].iter().all(|piece| index_of(piece) == Some(first));
        same.then_some(first)
    }
}

fn register_arena(ring: &IoUring, arena: &Arc<Arena>, name: &str) -> bool {
    let (start, len) = arena.span();
    let pieces: Vec<libc::iovec> = (0..len)
        .step_by(PIECE_BYTES)
        .map(|at| {
            // SAFETY: at < len, so the pointer stays in the mapping.
            let base = unsafe { start.add(at) };
            libc::iovec { iov_base: base.as_ptr().cast(), iov_len: PIECE_BYTES.min(len - at) }
        })
        .collect();
    // SAFETY: the engine holds the arena, and drops the ring first, so the mapping outlives the registration.
    match unsafe { ring.submitter().register_buffers(&pieces) } {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(ring = name, arena_bytes = len, %error, "the arena is not registered with the device (a larger RLIMIT_MEMLOCK may allow it); transfers cost more CPU");
            false
        }
    }
}
