//! Bindings to libibverbs, which is loaded at the first call.
//!
//! Invariants:
//! - A program with this crate starts without libibverbs.
//! - If the library or one of its functions is missing, a call fails as that function does: it
//!   returns null or an error number, and `errno` is `ENOSYS`. Nothing panics.
//!
//! The functions are those that Larder and the crate `ibverbs` call. Inline functions of C
//! (posting, polling, memory windows) go through the table `ops` of an [`ibv_context`], as in C.

// The library prescribes the names.
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

/// Completion of a work request. Unless `status` is success, only `wr_id`, `status`, `qp_num` and
/// `vendor_err` are valid.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ibv_wc {
    /// Identifier that the request was posted with.
    pub wr_id: u64,
    pub status: ibv_wc_status::Type,
    pub opcode: ibv_wc_opcode::Type,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Immediate data, in network order, or the key that was invalidated.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    /// Flags, such as the presence of immediate data.
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

const _: () = {
    assert!(size_of::<ibv_wc>() == 48 && align_of::<ibv_wc>() == 8);
    assert!(std::mem::offset_of!(ibv_wc, vendor_err) == 16 && std::mem::offset_of!(ibv_wc, qp_num) == 28);
    assert!(std::mem::offset_of!(ibv_wc, pkey_index) == 40 && std::mem::offset_of!(ibv_wc, dlid_path_bits) == 45);
};

/// Returns the library, or the reason why it cannot be loaded. Tries once per process.
fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    // libloading wraps the loader's message as the source of its error.
    let words = |error: libloading::Error| error.source().map_or_else(|| error.to_string(), ToString::to_string);
    // SAFETY: libibverbs may be loaded at any time from any thread; its initializer sets up its own
    // tables only.
    let library = LIBRARY.get_or_init(|| unsafe { Library::new("libibverbs.so.1") }.map_err(words));
    library.as_ref().map_err(String::as_str)
}

type Symbols = fn(&str) -> Option<NonNull<c_void>>;

static REPLACEMENT: OnceLock<Symbols> = OnceLock::new();

/// Replaces libibverbs by functions from `symbols` until the process exits, for simulated devices.
/// Returns `false` if it was replaced already.
///
/// # Safety
/// `symbols` returns functions that behave as the manual page of their name says. No function of
/// this crate was called before.
pub unsafe fn replace_library(symbols: Symbols) -> bool {
    REPLACEMENT.set(symbols).is_ok()
}

/// Returns `true` if libibverbs is replaced. The replacement makes no system calls that block.
pub fn is_replaced() -> bool {
    REPLACEMENT.get().is_some()
}

/// Returns the reason why libibverbs is missing, or `None` if it is available.
pub fn missing() -> Option<&'static str> {
    if is_replaced() { None } else { library().err() }
}

fn set_errno(code: c_int) {
    // SAFETY: the address of this thread's errno, which is valid while the thread runs.
    unsafe { *libc::__errno_location() = code };
}

/// Defines functions of the library. Each looks up its symbol once, and returns the value after
/// `else` if there is none.
macro_rules! functions {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty, else $missing:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The caller meets the requirements of the manual page of this function.
        pub unsafe fn $name($($argument: $type),*) -> $result {
            type Function = unsafe extern "C" fn($($type),*) -> $result;
            static FUNCTION: OnceLock<Option<Function>> = OnceLock::new();
            let found = FUNCTION.get_or_init(|| {
                if let Some(symbols) = REPLACEMENT.get() {
                    // SAFETY: the caller of `replace_library` guarantees the types of its
                    // functions.
                    return symbols(stringify!($name)).map(|found| unsafe { transmute::<NonNull<c_void>, Function>(found) });
                }
                // SAFETY: the symbol of that name has this type (verbs.h), and the library is never
                // unloaded.
                unsafe { library().ok()?.get::<Function>(concat!(stringify!($name), "\0")) }.ok().map(|symbol| *symbol)
            });
            match found {
                // SAFETY: the caller meets the requirements of the manual page.
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
    /// Returns the list of devices, or null with `errno`.
    fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device, else null_mut();
    fn ibv_free_device_list(list: *mut *mut ibv_device) -> (), else ();
    fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char, else null_mut();
    /// Returns the GUID of a device in network order; zero if it has none.
    fn ibv_get_device_guid(device: *mut ibv_device) -> __be64, else 0;
    /// Returns the index of a device; -1 if it has none.
    fn ibv_get_device_index(device: *mut ibv_device) -> c_int, else -1;
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context, else null_mut();
    fn ibv_close_device(context: *mut ibv_context) -> c_int, else libc::ENOSYS;
    fn ibv_query_device(context: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int, else libc::ENOSYS;
    /// Queries the state of a port. The exported function does not fill the last fields, so the
    /// caller zeroes them.
    fn ibv_query_port(context: *mut ibv_context, port: u8, attributes: *mut ibv_port_attr) -> c_int, else libc::ENOSYS;
    /// Reads the GIDs of all ports. Returns their number, or a negative error number.
    fn _ibv_query_gid_table(
        context: *mut ibv_context, entries: *mut ibv_gid_entry, entries_max: usize, flags: u32, entry_bytes: usize
    ) -> isize, else -(libc::ENOSYS as isize);
    fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int, else -1;
    fn ibv_ack_async_event(event: *mut ibv_async_event) -> (), else ();
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd, else null_mut();
    fn ibv_dealloc_pd(domain: *mut ibv_pd) -> c_int, else libc::ENOSYS;
    fn ibv_reg_mr(domain: *mut ibv_pd, start: *mut c_void, bytes: usize, access: c_int) -> *mut ibv_mr, else null_mut();
    fn ibv_dereg_mr(registration: *mut ibv_mr) -> c_int, else libc::ENOSYS;
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel, else null_mut();
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int, else libc::ENOSYS;
    fn ibv_create_cq(
        context: *mut ibv_context, entries: c_int, user: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int
    ) -> *mut ibv_cq, else null_mut();
    fn ibv_destroy_cq(queue: *mut ibv_cq) -> c_int, else libc::ENOSYS;
    fn ibv_get_cq_event(channel: *mut ibv_comp_channel, queue: *mut *mut ibv_cq, user: *mut *mut c_void) -> c_int, else -1;
    fn ibv_ack_cq_events(queue: *mut ibv_cq, count: c_uint) -> (), else ();
    fn ibv_create_qp(domain: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> *mut ibv_qp, else null_mut();
    fn ibv_modify_qp(pair: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int, else libc::ENOSYS;
    fn ibv_destroy_qp(pair: *mut ibv_qp) -> c_int, else libc::ENOSYS;
}
