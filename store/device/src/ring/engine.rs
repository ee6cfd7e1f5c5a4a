//! The thread of a ring: takes requests, hands them to the kernel, and answers them.

use super::table::{InFlight, Piece, Table};
use super::{RingFacts, RingOptions};
use crate::arena::Arena;
use crate::file::DeviceFile;
use crate::inbox::{Completion, Inbox, Message};
use crate::request::{Done, FileId, Operation, Request};
use io_uring::{IoUring, opcode, squeue, types};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Most bytes of one registered buffer: the kernel takes no larger one.
const PIECE_BYTES: usize = 1 << 30;
/// Times a request is tried again when the kernel moved nothing and said that it might.
const RETRIES_MAX: u32 = 8;
/// Marks the completion of the poll on the bell.
const BELL: u64 = u64::MAX;
const DEPTH_MAX: u32 = 1024;
/// Pause when the kernel is out of resources for a new submission.
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// Fields are dropped in this order: the ring before the memory it may use.
pub(super) struct Engine {
    ring: IoUring,
    table: Table,
    files: Files,
    inbox: Inbox,
    listening: bool,
    registered_buffers: bool,
    arena: Arc<Arena>,
}

struct Files {
    open: Vec<Option<DeviceFile>>,
    registered: bool,
    /// Detached while requests on them were with the kernel.
    leaving: Vec<FileId>,
}

/// Builds an entry for a registered file or a plain descriptor, which are different types.
macro_rules! on_file {
    ($files:expr, $id:expr, $raw:expr, |$fd:ident| $build:expr) => {
        if $files.registered {
            let $fd = types::Fixed($id.0);
            $build
        } else {
            let $fd = types::Fd($raw);
            $build
        }
    };
}

impl Engine {
    pub(super) fn new(arena: Arc<Arena>, inbox: Inbox, options: &RingOptions) -> io::Result<Engine> {
        let depth = options.queue_depth.clamp(1, DEPTH_MAX);
        let ring = build((depth + 1).next_power_of_two())?;
        let registered_buffers = options.register_arena && register_arena(&ring, &arena, &options.name);
        let registered = register_files(&ring, options);
        let open = (0..options.files_max).map(|_| None).collect();
        let files = Files { open, registered, leaving: Vec::new() };
        let table = Table::new(depth as usize);
        Ok(Engine { ring, table, files, inbox, listening: false, registered_buffers, arena })
    }

    pub(super) fn facts(&self) -> RingFacts {
        RingFacts { registered_buffers: self.registered_buffers, registered_files: self.files.registered }
    }

    /// Works until the ring is closed and everything asked for before is answered.
    pub(super) fn run(&mut self) {
        loop {
            while self.table.has_room() {
                let Some(message) = self.inbox.take() else { break };
                self.handle(message);
            }
            if self.inbox.bell.closing() && self.table.is_empty() && self.inbox.is_empty() {
                return;
            }
            if let Err(error) = self.wait() {
                // The requests with the kernel keep their memory (see `Table`); their askers meet their deadlines.
                tracing::error!(%error, "device ring failed and stops");
                return;
            }
            self.reap();
        }
    }

    /// Submits, and sleeps until something is answered or asked for.
    fn wait(&mut self) -> io::Result<()> {
        self.listen();
        if self.table.has_room() {
            self.inbox.bell.fall_asleep();
            // Whoever sent before it could see that we sleep did not ring.
            if !self.inbox.is_empty() || self.inbox.bell.closing() && self.table.is_empty() {
                self.inbox.bell.awake();
                return Ok(());
            }
        }
        let waited = self.ring.submit_and_wait(1);
        self.inbox.bell.awake();
        match waited {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => Ok(()),
                Some(libc::EAGAIN | libc::EBUSY) => {
                    std::thread::sleep(BUSY_PAUSE);
                    Ok(())
                }
                _ => Err(error),
            },
        }
    }

    fn listen(&mut self) {
        if !self.listening {
            let descriptor = types::Fd(self.inbox.bell.descriptor());
            let poll = opcode::PollAdd::new(descriptor, libc::POLLIN as u32).build().user_data(BELL);
            self.push(&poll);
            self.listening = true;
        }
    }

    fn reap(&mut self) {
        while let Some(answer) = { self.ring.completion().next() } {
            match answer.user_data() {
                BELL => {
                    self.inbox.bell.clear();
                    self.listening = false;
                }
                place => self.answered(place as usize, answer.result()),
            }
        }
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Submit(request, completion) => self.begin(request, completion),
            Message::Attach(file, reply) => {
                // If nobody waits for the number, nobody can use the file: it stays until the ring ends.
                let _ = reply.send(self.attach(file));
            }
            Message::Detach(file) if self.table.uses(file) => self.files.leaving.push(file),
            Message::Detach(file) => self.detach(file),
        }
    }

    fn attach(&mut self, file: DeviceFile) -> io::Result<FileId> {
        let free = self.files.open.iter().position(Option::is_none);
        let index = free.ok_or_else(|| io::Error::other("the ring has no room for another file"))?;
        if self.files.registered {
            self.ring.submitter().register_files_update(index as u32, &[file.raw()])?;
        }
        self.files.open[index] = Some(file);
        Ok(FileId(index as u32))
    }

    fn detach(&mut self, file: FileId) {
        let Some(open) = self.files.open.get_mut(file.0 as usize) else { return };
        if open.take().is_some() && self.files.registered {
            let cleared = self.ring.submitter().register_files_update(file.0, &[-1]);
            if let Err(error) = cleared {
                tracing::warn!(%error, "a closed file stays registered with the ring");
            }
        }
    }

    fn begin(&mut self, request: Request, completion: Completion) {
        let known = self.files.open.get(request.file.0 as usize).is_some_and(Option::is_some);
        let leaving = self.files.leaving.contains(&request.file);
        let refused = match known && !leaving {
            true => request.operation.check().err(),
            false => Some(io::Error::new(io::ErrorKind::NotFound, "no such file on this ring")),
        };
        if let Some(error) = refused {
            return complete(completion, Done { operation: request.operation, result: Err(error) });
        }
        let place = self.table.insert(InFlight::new(request, completion));
        self.start(place);
    }

    /// Hands what is left of a request to the kernel.
    fn start(&mut self, place: usize) {
        let Some(inflight) = self.table.get(place) else { return };
        let file = inflight.request.file;
        let raw = self.files.open[file.0 as usize].as_ref().map_or(-1, DeviceFile::raw);
        let writing = matches!(inflight.request.operation, Operation::Write { .. });
        let entry = match inflight.remaining() {
            ([None, None], _) => {
                let flags = types::FsyncFlags::DATASYNC;
                on_file!(self.files, file, raw, |fd| opcode::Fsync::new(fd).flags(flags).build())
            }
            ([Some(first), Some(second)], offset) => {
                inflight.pieces = [first, second].map(|p| libc::iovec { iov_base: p.start.cast(), iov_len: p.len });
                let pieces = inflight.pieces.as_ptr();
                on_file!(self.files, file, raw, |fd| opcode::Writev::new(fd, pieces, 2).offset(offset).build())
            }
            ([Some(piece), None] | [None, Some(piece)], offset) => {
                let len = piece.len as u32;
                match (registered_index(self.registered_buffers, &self.arena, piece), writing) {
                    (Some(index), false) => {
                        on_file!(self.files, file, raw, |fd| opcode::ReadFixed::new(fd, piece.start, len, index)
                            .offset(offset)
                            .build())
                    }
                    (None, false) => {
                        on_file!(self.files, file, raw, |fd| opcode::Read::new(fd, piece.start, len)
                            .offset(offset)
                            .build())
                    }
                    (Some(index), true) => {
                        on_file!(self.files, file, raw, |fd| opcode::WriteFixed::new(fd, piece.start, len, index)
                            .offset(offset)
                            .build())
                    }
                    (None, true) => {
                        on_file!(self.files, file, raw, |fd| opcode::Write::new(fd, piece.start, len)
                            .offset(offset)
                            .build())
                    }
                }
            }
        };
        self.push(&entry.user_data(place as u64));
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the memory an entry names is owned by its request in `table`, which keeps it until the kernel has
            // answered, and leaks it if the engine ends before. The bell's poll names no memory.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            // The queue has a place for every request in flight and the bell; it is full only of unsubmitted entries.
            if self.ring.submit().is_err() {
                std::thread::sleep(BUSY_PAUSE);
            }
        }
    }

    fn answered(&mut self, place: usize, result: i32) {
        let Some(inflight) = self.table.get(place) else { return };
        let total = inflight.request.operation.bytes();
        let result = match result {
            error if error < 0 => {
                let again = matches!(-error, libc::EINTR | libc::EAGAIN) && inflight.retries < RETRIES_MAX;
                inflight.retries += 1;
                if again {
                    return self.start(place);
                }
                Err(io::Error::from_raw_os_error(-error))
            }
            0 if total > 0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends inside the request")),
            moved => {
                inflight.moved += moved as usize;
                if inflight.moved < total {
                    return self.start(place);
                }
                Ok(())
            }
        };
        let Some(inflight) = self.table.remove(place) else { return };
        let InFlight { request, completion, .. } = *inflight;
        complete(completion, Done { operation: request.operation, result });
        self.let_go(request.file);
    }

    fn let_go(&mut self, file: FileId) {
        if let Some(at) = self.files.leaving.iter().position(|&leaving| leaving == file)
            && !self.table.uses(file)
        {
            self.files.leaving.swap_remove(at);
            self.detach(file);
        }
    }
}

/// A completion that panics is a defect of its author; the device's thread must outlive it.
fn complete(completion: Completion, done: Done) {
    if catch_unwind(AssertUnwindSafe(|| completion(done))).is_err() {
        tracing::error!("a completion panicked on the device thread");
    }
}

/// Task work is run when we enter the kernel anyway, where it knows how; older kernels get a plain ring.
fn build(entries: u32) -> io::Result<IoUring> {
    match IoUring::builder().setup_single_issuer().setup_coop_taskrun().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        built => built,
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

/// The registered buffer that a piece lies in, if it lies in one.
fn registered_index(registered: bool, arena: &Arena, piece: Piece) -> Option<u16> {
    let (start, len) = arena.span();
    let from = (piece.start as usize).checked_sub(start.as_ptr() as usize)?;
    let last = from + piece.len.checked_sub(1)?;
    let fits = registered && last < len && from / PIECE_BYTES == last / PIECE_BYTES;
    fits.then_some((from / PIECE_BYTES) as u16)
}

fn register_files(ring: &IoUring, options: &RingOptions) -> bool {
    raise_descriptor_limit(u64::from(options.files_max));
    match ring.submitter().register_files_sparse(options.files_max) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(ring = options.name, files = options.files_max, %error, "files are not registered with the device");
            false
        }
    }
}

/// The kernel bounds registered files by the soft limit of open files; sockets need some as well.
fn raise_descriptor_limit(files: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live rlimit.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 || limit.rlim_cur >= 2 * files + 4096 {
        return;
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above. Refusal is fine: `register_files` then says what it means.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
}
