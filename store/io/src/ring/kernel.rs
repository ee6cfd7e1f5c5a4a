//! Setup of an io_uring, and the translation of requests into its entries.
//!
//! Invariant: the arena outlives its registration.

use super::files::Files;
use super::in_flight::{Action, InFlight};
use super::options::RingOptions;
use crate::stats::Counters;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use larder_memory::Arena;
use larder_memory::span::Span;
use std::io;
use std::sync::Arc;

#[derive(Clone, Copy)]
pub(super) struct Registered {
    pub(super) buffers: bool,
    /// True if one entry can transfer several ranges of a registered buffer (Linux 6.15).
    pub(super) vectored: bool,
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
///
/// Decision record 0021 tells what DEFER_TASKRUN, SQPOLL and IOPOLL cost.
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
        Registered { buffers, vectored: buffers && options.vectored && probed && vectored }
    }

    /// Builds the entry for the rest of `inflight`. The entry points into its memory, so `inflight`
    /// must stay in place until it completes.
    ///
    /// With several ranges, a kernel before 6.15 pins them for the transfer. That costs less than
    /// an entry for each range of registered memory, see decision record 0021.
    pub(super) fn entry(
        self,
        arena: &Arc<Arena>,
        files: &Files,
        inflight: &mut InFlight,
        counters: &Counters,
    ) -> squeue::Entry {
        if self.vectored {
            inflight.stage(arena);
        }
        let (file, action, offset) = (inflight.file(), inflight.action(), inflight.gather());
        let ranges = inflight.iovecs.as_slice();
        let buffer = self.buffer(arena, ranges).filter(|_| self.vectored || ranges.len() == 1);
        counters.registered.add(usize::from(buffer.is_some()));
        match (action, ranges) {
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
                match (action, buffer) {
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
        if !self.buffers {
            return None;
        }
        let region_of = |range: &libc::iovec| arena.region_of(range.iov_base as usize, range.iov_len);
        let first = region_of(iovecs.first()?)?;
        let same = iovecs[1..].iter().all(|range| region_of(range) == Some(first));
        if same { u16::try_from(first).ok() } else { None }
    }
}

fn register_arena(ring: &IoUring, arena: &Arc<Arena>, name: &str) -> bool {
    let region = |span: Span| libc::iovec { iov_base: span.start().as_ptr().cast(), iov_len: span.len() };
    let iovecs: Vec<libc::iovec> = arena.regions().map(region).collect();
    // SAFETY: the engine owns the arena and drops the ring first, so the mapping outlives the
    // registration.
    match unsafe { ring.submitter().register_buffers(&iovecs) } {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(ring = name, arena_bytes = arena.capacity(), %error, "the arena could not be registered with io_uring (raise RLIMIT_MEMLOCK); transfers cost more CPU");
            false
        }
    }
}
