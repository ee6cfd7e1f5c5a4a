//! Objects of libibverbs, each owned by one Rust value.
//!
//! Invariants:
//! - An object outlives everything created from it, because each value holds its parent.
//! - Functions of the library are called on existing objects only.
//!
//! Posting requests hands addresses to a device and is `unsafe` for that reason alone.

use crate::error::Error;
use ibverbs_sys as ffi;
use larder_memory::span::Span;
use larder_runtime::lock::RwLock;
use libc::c_int;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

pub(crate) const POLL_MAX: usize = 16;

fn check(code: c_int, call: &'static str) -> Result<(), Error> {
    match code {
        0 => Ok(()),
        code => Err(Error::Refused { call, code: code.abs() }),
    }
}

fn non_null<T>(object: *mut T, call: &'static str) -> Result<NonNull<T>, Error> {
    NonNull::new(object).ok_or_else(|| Error::last(call))
}

fn log_failure(result: Result<(), Error>) {
    if let Err(error) = result {
        tracing::warn!(%error, "an RDMA object could not be destroyed; it stays until the process exits");
    }
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), Error> {
    let fd = fd.as_raw_fd();
    // SAFETY: fcntl on an open descriptor passes no memory.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    match flags >= 0 && unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } == 0 {
        true => Ok(()),
        false => Err(Error::last("fcntl")),
    }
}

pub(crate) struct Context {
    raw: NonNull<ffi::ibv_context>,
}

// SAFETY: libibverbs objects may be used from any thread; the library locks internally.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// An asynchronous event of a device: its kind, and the address of the object it concerns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) kind: u32,
    pub(crate) object: usize,
}

impl Context {
    pub(crate) fn open(name: &str) -> Result<Arc<Context>, Error> {
        let mut count = 0;
        // SAFETY: the list is read, and the device opened, before the list is freed.
        let raw = unsafe {
            let list = non_null(ffi::ibv_get_device_list(&mut count), "ibv_get_device_list")?.as_ptr();
            let devices = std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0));
            let is_it = |&&device: &&*mut ffi::ibv_device| {
                let theirs = ffi::ibv_get_device_name(device);
                !theirs.is_null() && CStr::from_ptr(theirs).to_bytes() == name.as_bytes()
            };
            let found =
                devices.iter().find(is_it).map(|&device| non_null(ffi::ibv_open_device(device), "ibv_open_device"));
            ffi::ibv_free_device_list(list);
            found.ok_or_else(|| Error::NotFound(format!("RDMA device {name}")))??
        };
        let context = Context { raw };
        set_nonblocking(context.event_fd())?;
        Ok(Arc::new(context))
    }

    fn ops(&self) -> &ffi::ibv_context_ops {
        // SAFETY: the context is open. Its table is written when it is opened and never again.
        unsafe { &(*self.raw.as_ptr()).ops }
    }

    pub(crate) fn attributes(&self) -> Result<ffi::ibv_device_attr, Error> {
        let mut attributes = ffi::ibv_device_attr::default();
        // SAFETY: the context is open, and the library fills the whole structure.
        check(unsafe { ffi::ibv_query_device(self.raw.as_ptr(), &mut attributes) }, "ibv_query_device")?;
        Ok(attributes)
    }

    pub(crate) fn port(&self, port: u8) -> Result<ffi::ibv_port_attr, Error> {
        let mut attributes = ffi::ibv_port_attr::default();
        // SAFETY: the context is open. The structure is zeroed and at least as large as the
        // library's.
        check(unsafe { ffi::ibv_query_port(self.raw.as_ptr(), port, &mut attributes) }, "ibv_query_port")?;
        Ok(attributes)
    }

    pub(crate) fn gids(&self, most: usize) -> Result<Vec<ffi::ibv_gid_entry>, Error> {
        let mut entries = vec![ffi::ibv_gid_entry::default(); most];
        let entry_bytes = size_of::<ffi::ibv_gid_entry>();
        // SAFETY: the context is open, and there is room for `most` entries of that size.
        let count = unsafe { ffi::_ibv_query_gid_table(self.raw.as_ptr(), entries.as_mut_ptr(), most, 0, entry_bytes) };
        let code = libc::c_int::try_from(count.unsigned_abs()).unwrap_or(libc::EIO);
        let count = usize::try_from(count).map_err(|_| Error::Refused { call: "ibv_query_gid_table", code })?;
        entries.truncate(count);
        Ok(entries)
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the context.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).async_fd) }
    }

    pub(crate) fn next_event(&self) -> Option<Event> {
        let mut event = ffi::ibv_async_event::default();
        // SAFETY: the context is open. The event is acknowledged after its object's address was
        // read.
        unsafe {
            if ffi::ibv_get_async_event(self.raw.as_ptr(), &mut event) != 0 {
                return None;
            }
            // All object variants of the union are pointers. A port event carries a port number,
            // which is no object's address.
            let taken = Event { kind: event.event_type, object: event.element.qp as usize };
            ffi::ibv_ack_async_event(&mut event);
            Some(taken)
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it is open, and everything created from it is gone, because it would hold the
        // context.
        log_failure(check(unsafe { ffi::ibv_close_device(self.raw.as_ptr()) }, "ibv_close_device"));
    }
}

/// A protection domain: queue pairs and registrations work together only within one.
pub(crate) struct Domain {
    raw: NonNull<ffi::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Domain {}
// SAFETY: as for `Context`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(crate) fn new(context: Arc<Context>) -> Result<Arc<Domain>, Error> {
        // SAFETY: the context is open.
        let raw = non_null(unsafe { ffi::ibv_alloc_pd(context.raw.as_ptr()) }, "ibv_alloc_pd")?;
        Ok(Arc::new(Domain { raw, context }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: it exists, and everything created from it is gone.
        log_failure(check(unsafe { ffi::ibv_dealloc_pd(self.raw.as_ptr()) }, "ibv_dealloc_pd"));
    }
}

/// A registered range of memory. The device may access it until the registration ends.
pub(crate) struct Registration {
    raw: Option<NonNull<ffi::ibv_mr>>,
    span: Span,
    keys: (u32, u32),
    _domain: Arc<Domain>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Registration {}
// SAFETY: as for `Context`.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers memory.
    ///
    /// # Safety
    /// The memory stays mapped until [`Registration::close`] returns `Ok`.
    pub(crate) unsafe fn new(
        domain: &Arc<Domain>,
        span: Span,
        access: ffi::ibv_access_flags,
    ) -> Result<Registration, Error> {
        let start = span.start().as_ptr().cast();
        // SAFETY: the domain exists, and the caller guarantees the memory.
        let raw = unsafe { ffi::ibv_reg_mr(domain.raw.as_ptr(), start, span.len(), access.0 as c_int) };
        let raw = non_null(raw, "ibv_reg_mr")?;
        // SAFETY: it was just created.
        let keys = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Ok(Registration { raw: Some(raw), span, keys, _domain: domain.clone() })
    }

    pub(crate) fn span(&self) -> Span {
        self.span
    }

    pub(crate) fn local_key(&self) -> u32 {
        self.keys.0
    }

    pub(crate) fn remote_key(&self) -> u32 {
        self.keys.1
    }

    /// Ends the registration. After `Ok`, the device does not access the memory any more.
    pub(crate) fn close(&mut self) -> Result<(), Error> {
        let Some(raw) = self.raw else { return Ok(()) };
        // SAFETY: it exists, as `raw` is cleared only below.
        check(unsafe { ffi::ibv_dereg_mr(raw.as_ptr()) }, "ibv_dereg_mr")?;
        self.raw = None;
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        log_failure(self.close());
    }
}

/// A memory window of type 2. Requests on a queue pair bind and invalidate its key.
pub(crate) struct MemoryWindow {
    raw: NonNull<ffi::ibv_mw>,
    /// Remaining binds. Each changes the last byte of the key, and a key must not repeat: an old
    /// holder could use it again.
    binds_left: u8,
    _domain: Arc<Domain>,
}

// SAFETY: as for `Context`.
unsafe impl Send for MemoryWindow {}

impl MemoryWindow {
    pub(crate) fn new(domain: &Arc<Domain>) -> Result<MemoryWindow, Error> {
        let call = "ibv_alloc_mw";
        let allocate = domain.context.ops().alloc_mw.ok_or(Error::Refused { call, code: libc::EOPNOTSUPP })?;
        // SAFETY: the domain exists.
        let raw = non_null(unsafe { allocate(domain.raw.as_ptr(), ffi::IBV_MW_TYPE_2) }, call)?;
        Ok(MemoryWindow { raw, binds_left: u8::MAX, _domain: domain.clone() })
    }

    pub(crate) fn key(&self) -> u32 {
        // SAFETY: it exists, and only `rebound` writes its key.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    /// Returns the key of the next bind, or `None` if it would repeat an earlier one.
    pub(crate) fn next_key(&self) -> Option<u32> {
        let key = self.key();
        (self.binds_left > 0).then_some(key & !0xff | key.wrapping_add(1) & 0xff)
    }

    fn rebound(&mut self, key: u32) {
        // `next_key` returned a key, so a bind was left.
        self.binds_left -= 1;
        // SAFETY: it exists, and `&mut self` is the only access.
        unsafe { (*self.raw.as_ptr()).rkey = key };
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        // SAFETY: it exists until it is deallocated below.
        let deallocate = unsafe { (*(*self.raw.as_ptr()).context).ops.dealloc_mw };
        if let Some(deallocate) = deallocate {
            // SAFETY: as above; it is not used again.
            log_failure(check(unsafe { deallocate(self.raw.as_ptr()) }, "ibv_dealloc_mw"));
        }
    }
}

pub(crate) struct CompletionQueue {
    raw: NonNull<ffi::ibv_cq>,
    channel: Channel,
}

struct Channel {
    raw: NonNull<ffi::ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for CompletionQueue {}
// SAFETY: as for `Context`.
unsafe impl Sync for CompletionQueue {}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: it exists, and its completion queue is gone.
        log_failure(check(unsafe { ffi::ibv_destroy_comp_channel(self.raw.as_ptr()) }, "ibv_destroy_comp_channel"));
    }
}

impl CompletionQueue {
    pub(crate) fn new(context: &Arc<Context>, entries: u32) -> Result<CompletionQueue, Error> {
        // SAFETY: the context is open.
        let raw = non_null(unsafe { ffi::ibv_create_comp_channel(context.raw.as_ptr()) }, "ibv_create_comp_channel")?;
        let channel = Channel { raw, context: context.clone() };
        let entries =
            c_int::try_from(entries).map_err(|_| Error::Invalid("too many requests for one completion queue"))?;
        // SAFETY: context and channel exist.
        let raw = unsafe { ffi::ibv_create_cq(context.raw.as_ptr(), entries, null_mut(), channel.raw.as_ptr(), 0) };
        let queue = CompletionQueue { raw: non_null(raw, "ibv_create_cq")?, channel };
        set_nonblocking(queue.event_fd())?;
        Ok(queue)
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.channel.raw.as_ptr()).fd) }
    }

    /// Returns the address by which device events name this queue.
    pub(crate) fn object(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    /// Requests an event at the next completion. Completions before this call raise none.
    pub(crate) fn arm(&self) -> Result<(), Error> {
        let call = "ibv_req_notify_cq";
        let notify = self.channel.context.ops().req_notify_cq.ok_or(Error::Refused { call, code: libc::EOPNOTSUPP })?;
        // SAFETY: the queue exists.
        check(unsafe { notify(self.raw.as_ptr(), 0) }, call)
    }

    pub(crate) fn take_events(&self) {
        let (mut queue, mut user) = (null_mut(), null_mut());
        // SAFETY: channel and queue exist. Each event is acknowledged, without which destroying the
        // queue would block.
        unsafe {
            while ffi::ibv_get_cq_event(self.channel.raw.as_ptr(), &mut queue, &mut user) == 0 {
                ffi::ibv_ack_cq_events(queue, 1);
            }
        }
    }

    pub(crate) fn poll<'a>(&self, room: &'a mut [ibverbs::ibv_wc; POLL_MAX]) -> Result<&'a [ibverbs::ibv_wc], Error> {
        let call = "ibv_poll_cq";
        let poll = self.channel.context.ops().poll_cq.ok_or(Error::Refused { call, code: libc::EOPNOTSUPP })?;
        // SAFETY: the queue exists, and `room` has that many entries.
        let count = unsafe { poll(self.raw.as_ptr(), POLL_MAX as c_int, room.as_mut_ptr()) };
        usize::try_from(count).ok().and_then(|count| room.get(..count)).ok_or(Error::Refused { call, code: libc::EIO })
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: it exists, its queue pair is gone, and its events are acknowledged.
        log_failure(check(unsafe { ffi::ibv_destroy_cq(self.raw.as_ptr()) }, "ibv_destroy_cq"));
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Local {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) key: u32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Remote {
    pub(crate) address: u64,
    pub(crate) key: u32,
}

pub(crate) enum Request<'a> {
    Read(Local, Remote),
    Write(Local, Remote),
    /// Binds a window to these bytes of a registration, under the window's next key.
    Bind(&'a mut MemoryWindow, &'a Registration, Span, ffi::ibv_access_flags),
    Invalidate(&'a MemoryWindow),
}

pub(crate) struct QueuePair {
    /// `None` once destroyed. Calls hold the read lock; destruction takes the write lock and thus
    /// waits for them.
    raw: RwLock<Option<NonNull<ffi::ibv_qp>>>,
    number: u32,
    object: usize,
    pub(crate) completions: CompletionQueue,
    _domain: Arc<Domain>,
}

// SAFETY: as for `Context`.
unsafe impl Send for QueuePair {}
// SAFETY: as for `Context`.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    pub(crate) fn new(domain: &Arc<Domain>, requests: u32) -> Result<QueuePair, Error> {
        let completions = CompletionQueue::new(&domain.context, requests)?;
        let queue = completions.raw.as_ptr();
        let cap = ffi::ibv_qp_cap { max_send_wr: requests, max_send_sge: 1, max_recv_sge: 1, ..Default::default() };
        let mut attributes = ffi::ibv_qp_init_attr {
            send_cq: queue,
            recv_cq: queue,
            cap,
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 1,
            ..Default::default()
        };
        // SAFETY: domain and completion queue exist.
        let raw = non_null(unsafe { ffi::ibv_create_qp(domain.raw.as_ptr(), &mut attributes) }, "ibv_create_qp")?;
        // SAFETY: it was just created.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let object = raw.as_ptr() as usize;
        Ok(QueuePair { raw: RwLock::new(Some(raw)), number, object, completions, _domain: domain.clone() })
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Returns the address by which device events name this queue pair.
    pub(crate) fn object(&self) -> usize {
        self.object
    }

    pub(crate) fn modify(&self, mut to: ffi::ibv_qp_attr, mask: ffi::ibv_qp_attr_mask) -> Result<(), Error> {
        let call = "ibv_modify_qp";
        // Calls share the read lock: verbs are thread-safe, and only destruction must be alone.
        let raw = self.raw.read();
        let pair = raw.ok_or(Error::Refused { call, code: libc::ENOTCONN })?;
        let mask = (mask | ffi::ibv_qp_attr_mask::IBV_QP_STATE).0 as c_int;
        // SAFETY: the read lock keeps the queue pair from being destroyed.
        check(unsafe { ffi::ibv_modify_qp(pair.as_ptr(), &mut to, mask) }, call)
    }

    /// Posts requests in order, numbered from `first`. On an error, the device may have accepted
    /// some of them.
    ///
    /// # Safety
    /// Local memory, windows and registrations of these requests live until the requests complete
    /// or the queue pair is destroyed.
    pub(crate) unsafe fn post(&self, first: u64, requests: &mut [Request<'_>]) -> Result<(), Error> {
        let call = "ibv_post_send";
        let raw = self.raw.read();
        let pair = raw.ok_or(Error::Refused { call, code: libc::ENOTCONN })?;
        let mut pieces = vec![ffi::ibv_sge::default(); requests.len()];
        let mut chain: Vec<ffi::ibv_send_wr> = Vec::with_capacity(requests.len());
        for (i, (request, piece)) in requests.iter_mut().zip(&mut pieces).enumerate() {
            let mut entry = ffi::ibv_send_wr { wr_id: first + i as u64, ..Default::default() };
            let transfer = |opcode, local: &Local, remote: &Remote| {
                *piece = ffi::ibv_sge { addr: local.address, length: local.len, lkey: local.key };
                (entry.opcode, entry.sg_list, entry.num_sge) = (opcode, piece, 1);
                entry.wr.rdma.remote_addr = remote.address;
                entry.wr.rdma.rkey = remote.key;
            };
            match request {
                Request::Read(local, remote) => transfer(ffi::ibv_wr_opcode::IBV_WR_RDMA_READ, local, remote),
                Request::Write(local, remote) => transfer(ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE, local, remote),
                Request::Bind(window, registration, span, access) => {
                    let mr = registration.raw.ok_or(Error::NotRegistered)?.as_ptr();
                    let rkey = window.next_key().ok_or(Error::Refused { call, code: libc::EOVERFLOW })?;
                    entry.opcode = ffi::ibv_wr_opcode::IBV_WR_BIND_MW;
                    entry.__bindgen_anon_2.bind_mw = ffi::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
                        mw: window.raw.as_ptr(),
                        rkey,
                        bind_info: ffi::ibv_mw_bind_info {
                            mr,
                            addr: span.address() as u64,
                            length: span.len() as u64,
                            mw_access_flags: access.0,
                        },
                    };
                }
                Request::Invalidate(window) => {
                    entry.opcode = ffi::ibv_wr_opcode::IBV_WR_LOCAL_INV;
                    entry.__bindgen_anon_1.invalidate_rkey = window.key();
                }
            }
            chain.push(entry);
        }
        for i in 1..chain.len() {
            let next: *mut ffi::ibv_send_wr = &mut chain[i];
            chain[i - 1].next = next;
        }
        let Some(head) = chain.first_mut() else { return Ok(()) };
        let mut refused = null_mut();
        // SAFETY: the read lock keeps the queue pair from being destroyed. The chain and its lists
        // live through the call; the caller guarantees the memory that they name.
        let posted = unsafe {
            let post =
                (*(*pair.as_ptr()).context).ops.post_send.ok_or(Error::Refused { call, code: libc::EOPNOTSUPP })?;
            check(post(pair.as_ptr(), head, &mut refused), call)
        };
        // Even after an error the device may have bound some windows, so all keys advance.
        for request in requests {
            if let Request::Bind(window, ..) = request
                && let Some(key) = window.next_key()
            {
                window.rebound(key);
            }
        }
        posted
    }

    /// Destroys the queue pair. After `Ok`, the device accesses no memory on its behalf, neither
    /// for us nor for the peer.
    pub(crate) fn close(&self) -> Result<(), Error> {
        let mut raw = self.raw.write();
        let Some(pair) = *raw else { return Ok(()) };
        // SAFETY: it exists, and the write lock excludes all other calls.
        check(unsafe { ffi::ibv_destroy_qp(pair.as_ptr()) }, "ibv_destroy_qp")?;
        *raw = None;
        Ok(())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        log_failure(self.close());
    }
}
