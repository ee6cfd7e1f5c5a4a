//! libibverbs, loaded when one of its functions is first called.
//!
//! Always true: a program with this crate starts without libibverbs. Where the library, or a function of it, is missing, a call
//! fails as a failing call of that function does: a null pointer, or an error number; `errno` is `ENOSYS`. Nothing panics.
//!
//! The functions are those that Larder and the crate `ibverbs` call. What C programs have as inline functions (posting, polling,
//! memory windows) goes through the table `ops` of an [`ibv_context`], as it does there.

// Names are the library's.
#![allow(non_camel_case_types, non_upper_case_globals, non_snake_case)]

use libloading::Library;
use std::error::Error as _;
use std::mem::transmute;
use std::os::raw::{c_char, c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod bindings;
pub use bindings::*;

/// A completion of a work request. If it is no success, only `wr_id`, `status`, `qp_num` and `vendor_err` mean something.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ibv_wc {
    /// What the request was posted with.
    pub wr_id: u64,
    /// How it ended.
    pub status: ibv_wc_status::Type,
    /// What it was.
    pub opcode: ibv_wc_opcode::Type,
    /// The vendor's word for an error.
    pub vendor_err: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data, in network order, or the key that was invalidated.
    pub imm_data: u32,
    /// Local queue pair.
    pub qp_num: u32,
    /// Remote queue pair.
    pub src_qp: u32,
    /// What else there is.
    pub wc_flags: c_uint,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Source LID.
    pub slid: u16,
    /// Service level.
    pub sl: u8,
    /// Bits of the destination path.
    pub dlid_path_bits: u8,
}

const _: () = {
    assert!(size_of::<ibv_wc>() == 48 && align_of::<ibv_wc>() == 8);
    assert!(std::mem::offset_of!(ibv_wc, vendor_err) == 16 && std::mem::offset_of!(ibv_wc, qp_num) == 28);
    assert!(std::mem::offset_of!(ibv_wc, pkey_index) == 40 && std::mem::offset_of!(ibv_wc, dlid_path_bits) == 45);
};

/// The library, or why there is none.
fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    // What the loader said is the error behind the error.
    let words = |error: libloading::Error| error.source().map_or_else(|| error.to_string(), ToString::to_string);
    // SAFETY: libibverbs may be loaded at any time from any thread; its initialiser sets up tables of its own.
    let library = LIBRARY.get_or_init(|| unsafe { Library::new("libibverbs.so.1") }.map_err(words));
    library.as_ref().map_err(String::as_str)
}

/// What is asked for functions by their names.
type Symbols = fn(&str) -> Option<NonNull<c_void>>;

static STAND_IN: OnceLock<Symbols> = OnceLock::new();

/// Takes functions from `symbols` for as long as the process lives, and not from libibverbs: a simulation's devices. `false` if
/// something stands in already.
///
/// # Safety
/// What `symbols` answers is a function that does what the manual page of that name says. No function of this crate was called
/// before.
pub unsafe fn stand_in(symbols: Symbols) -> bool {
    STAND_IN.set(symbols).is_ok()
}

/// Whether something stands in for libibverbs. Its functions make no calls into the kernel that take time.
pub fn has_stand_in() -> bool {
    STAND_IN.get().is_some()
}

/// Why there is no libibverbs; `None` if there is.
pub fn missing() -> Option<&'static str> {
    if has_stand_in() { None } else { library().err() }
}

fn set_errno(code: c_int) {
    // SAFETY: the address of this thread's errno, valid as long as the thread is.
    unsafe { *libc::__errno_location() = code };
}

/// Functions of the library: each looks for its symbol once, and answers the value behind `else` if there is none.
macro_rules! functions {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty, else $missing:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the manual page of this function says.
        pub unsafe fn $name($($argument: $type),*) -> $result {
            type Function = unsafe extern "C" fn($($type),*) -> $result;
            static FUNCTION: OnceLock<Option<Function>> = OnceLock::new();
            let found = FUNCTION.get_or_init(|| {
                if let Some(symbols) = STAND_IN.get() {
                    // SAFETY: whoever stands in vouches for its functions' types.
                    return symbols(stringify!($name)).map(|found| unsafe { transmute::<NonNull<c_void>, Function>(found) });
                }
                // SAFETY: the symbol of that name has this type (verbs.h), and the library is never unloaded.
                unsafe { library().ok()?.get::<Function>(concat!(stringify!($name), "\0")) }.ok().map(|symbol| *symbol)
            });
            match found {
                // SAFETY: the caller keeps to the manual.
                Some(function) => unsafe { function($($argument),*) },
                None => {
                    set_errno(libc::ENOSYS);
                    $missing
                }
            }
        }
    )*};
}

functions! {
    /// The devices; null and `errno` if there are none to be had.
    fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device, else null_mut();
    /// Frees a list of devices.
    fn ibv_free_device_list(list: *mut *mut ibv_device) -> (), else ();
    /// A device's name.
    fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char, else null_mut();
    /// A device's GUID, in network order; zero if it has none.
    fn ibv_get_device_guid(device: *mut ibv_device) -> __be64, else 0;
    /// A device's number; -1 if it has none.
    fn ibv_get_device_index(device: *mut ibv_device) -> c_int, else -1;
    /// Opens a device.
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context, else null_mut();
    /// Closes a device.
    fn ibv_close_device(context: *mut ibv_context) -> c_int, else libc::ENOSYS;
    /// What a device can do.
    fn ibv_query_device(context: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int, else libc::ENOSYS;
    /// State of a port. The exported function fills in all but the last fields, which must be zero before.
    fn ibv_query_port(context: *mut ibv_context, port: u8, attributes: *mut ibv_port_attr) -> c_int, else libc::ENOSYS;
    /// The GIDs of all ports; a negative error number, or how many.
    fn _ibv_query_gid_table(
        context: *mut ibv_context, entries: *mut ibv_gid_entry, entries_max: usize, flags: u32, entry_bytes: usize
    ) -> isize, else -(libc::ENOSYS as isize);
    /// The next asynchronous event.
    fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int, else -1;
    /// Says that an event was dealt with.
    fn ibv_ack_async_event(event: *mut ibv_async_event) -> (), else ();
    /// Makes a protection domain.
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd, else null_mut();
    /// Frees a protection domain.
    fn ibv_dealloc_pd(domain: *mut ibv_pd) -> c_int, else libc::ENOSYS;
    /// Registers memory.
    fn ibv_reg_mr(domain: *mut ibv_pd, start: *mut c_void, bytes: usize, access: c_int) -> *mut ibv_mr, else null_mut();
    /// Ends a registration.
    fn ibv_dereg_mr(registration: *mut ibv_mr) -> c_int, else libc::ENOSYS;
    /// Makes a channel for completion events.
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel, else null_mut();
    /// Ends a channel.
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int, else libc::ENOSYS;
    /// Makes a completion queue.
    fn ibv_create_cq(
        context: *mut ibv_context, entries: c_int, user: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int
    ) -> *mut ibv_cq, else null_mut();
    /// Ends a completion queue.
    fn ibv_destroy_cq(queue: *mut ibv_cq) -> c_int, else libc::ENOSYS;
    /// The next completion event.
    fn ibv_get_cq_event(channel: *mut ibv_comp_channel, queue: *mut *mut ibv_cq, user: *mut *mut c_void) -> c_int, else -1;
    /// Says that completion events were dealt with.
    fn ibv_ack_cq_events(queue: *mut ibv_cq, count: c_uint) -> (), else ();
    /// Makes a queue pair.
    fn ibv_create_qp(domain: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> *mut ibv_qp, else null_mut();
    /// Changes a queue pair's state.
    fn ibv_modify_qp(pair: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int, else libc::ENOSYS;
    /// Ends a queue pair.
    fn ibv_destroy_qp(pair: *mut ibv_qp) -> c_int, else libc::ENOSYS;
}
