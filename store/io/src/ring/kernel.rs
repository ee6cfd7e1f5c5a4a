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

/// Kinds of completion, newest first. The kernel refuses a kind that it does not know with EINVAL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Completions {
    /// Task work runs when this thread waits (DEFER_TASKRUN, Linux 6.1).
    Deferred,
    /// Task work runs when this thread enters the kernel for any reason (COOP_TASKRUN, Linux 5.19).
    Cooperative,
    /// Task work interrupts this thread.
    Interrupting,
}

impl Completions {
    const ALL: [Completions; 3] = [Completions::Deferred, Completions::Cooperative, Completions::Interrupting];

    fn build(self, entries: u32) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        match self {
            Completions::Deferred => builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag(),
            Completions::Cooperative => builder.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag(),
            Completions::Interrupting => &mut builder,
        };
        builder.build(entries)
    }
}

/// Creates a ring with the first kind of completion that the kernel knows, from `best` on.
///
/// Decision records 0021 and 0042 tell what DEFER_TASKRUN, SQPOLL and IOPOLL cost.
pub(super) fn build(entries: u32, best: Completions) -> io::Result<IoUring> {
    first_known(best, |kind| kind.build(entries))
}

fn first_known<T>(best: Completions, build: impl Fn(Completions) -> io::Result<T>) -> io::Result<T> {
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for kind in Completions::ALL.into_iter().skip_while(|kind| *kind != best) {
        match build(kind) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            built => return built,
        }
    }
    Err(refused)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_of_each_kind_completes_a_request() {
        for kind in Completions::ALL {
            let mut ring = match kind.build(8) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => continue,
                built => built.unwrap(),
            };
            // SAFETY: the request names no memory.
            unsafe { ring.submission().push(&opcode::Nop::new().build().user_data(7)) }.unwrap();
            ring.submit_and_wait(1).unwrap();
            assert_eq!(ring.completion().next().map(|entry| entry.user_data()), Some(7), "{kind:?}");
        }
    }

    #[test]
    fn older_kernels_get_the_next_kind_and_other_errors_end_the_search() {
        use Completions::{Cooperative, Deferred, Interrupting};
        // Kinds that a kernel knows, by the error of the others.
        let found = |best, known: &[Completions], error| {
            first_known(best, |kind| match known.contains(&kind) {
                true => Ok(kind),
                false => Err(io::Error::from_raw_os_error(error)),
            })
            .map_err(|error| error.raw_os_error())
        };
        assert_eq!(found(Deferred, &Completions::ALL, libc::EINVAL), Ok(Deferred));
        assert_eq!(found(Deferred, &[Cooperative, Interrupting], libc::EINVAL), Ok(Cooperative));
        assert_eq!(found(Deferred, &[Interrupting], libc::EINVAL), Ok(Interrupting));
        assert_eq!(found(Cooperative, &Completions::ALL, libc::EINVAL), Ok(Cooperative));
        assert_eq!(found(Deferred, &[], libc::EINVAL), Err(Some(libc::EINVAL)));
        assert_eq!(found(Deferred, &[Interrupting], libc::ENOMEM), Err(Some(libc::ENOMEM)));
    }
}
