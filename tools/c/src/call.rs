//! The boundary: panics, errors, and pointers of the caller.

use crate::types::{LarderStatus, LarderText};
use larder_bindings::InvalidArgument;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Maximum number of elements of an array argument.
const COUNT_MAX: usize = 1 << 20;

thread_local! {
    static ERROR: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Reason of a call that was not made.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: LarderStatus,
    pub(crate) text: String,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub(crate) fn invalid(text: impl Into<String>) -> Failure {
        Failure { status: LarderStatus::InvalidArgument, text: text.into() }
    }

    pub(crate) fn exhausted(text: impl Into<String>) -> Failure {
        Failure { status: LarderStatus::Exhausted, text: text.into() }
    }
}

impl From<InvalidArgument> for Failure {
    fn from(error: InvalidArgument) -> Self {
        Failure::invalid(error.0)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Failure::exhausted(format!("cannot start the threads of the client: {error}"))
    }
}

/// Runs `body`, and turns its failure or panic into a status and the text of this thread.
pub(crate) fn call(body: impl FnOnce() -> Result<()>) -> LarderStatus {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return LarderStatus::Ok,
        Ok(Err(failure)) => failure,
        Err(_) => Failure {
            status: LarderStatus::Internal,
            text: "the library has a defect: it panicked, see standard error".into(),
        },
    };
    set_error(&failure.text);
    failure.status
}

pub(crate) fn set_error(text: &str) {
    let text: Vec<u8> = text.bytes().filter(|&byte| byte != 0).collect();
    // Fails only in a thread that ends.
    let _ = ERROR.try_with(|error| error.replace(CString::new(text).ok()));
}

/// Text of this thread's last call that failed, or last pin that a node refused, with a NUL at its
/// end. Empty if there was none.
///
/// Valid until the next such call of this thread, or its end. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn larder_error() -> *const c_char {
    let text = |error: &RefCell<Option<CString>>| error.borrow().as_ref().map(|text| text.as_ptr());
    ERROR.try_with(text).ok().flatten().unwrap_or(c"".as_ptr())
}

fn check_pointer<T>(pointer: *const T, name: &str) -> Result<()> {
    if pointer.is_null() {
        return Err(Failure::invalid(format!("{name} is null")));
    }
    if !pointer.is_aligned() {
        return Err(Failure::invalid(format!("{name} is not aligned")));
    }
    Ok(())
}

/// The structure at `pointer`.
///
/// # Safety
/// If it is neither null nor misaligned, a `T` is there.
pub(crate) unsafe fn read<T: Copy>(pointer: *const T, name: &str) -> Result<T> {
    check_pointer(pointer, name)?;
    // SAFETY: checked above, and the caller's promise.
    Ok(unsafe { pointer.read() })
}

/// Like [`read`], but null is `None`.
///
/// # Safety
/// As for [`read`].
pub(crate) unsafe fn read_optional<T: Copy>(pointer: *const T, name: &str) -> Result<Option<T>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { read(pointer, name) }.map(Some)
}

/// The `count` elements at `pointer`. Null is allowed for 0 elements.
///
/// # Safety
/// If the pointer is neither null nor misaligned, so many elements are there during `'a`.
pub(crate) unsafe fn array<'a, T>(pointer: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check_pointer(pointer, name)?;
    if count > COUNT_MAX {
        return Err(Failure::invalid(format!("{name} has {count} elements, at most {COUNT_MAX}")));
    }
    // SAFETY: checked above, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Output of the caller. It is written once the call has succeeded, and may hold anything before.
pub(crate) struct Output<T> {
    start: *mut T,
    count: usize,
}

impl<T> Output<T> {
    /// # Safety
    /// If the pointer is neither null nor misaligned, `count` elements may be written there during
    /// the call.
    pub(crate) unsafe fn new(start: *mut T, count: usize, name: &str) -> Result<Output<T>> {
        if count > 0 {
            check_pointer(start, name)?;
        }
        Ok(Output { start, count })
    }

    /// Like [`Output::new`], but null means that the caller does not want the output.
    ///
    /// # Safety
    /// As for [`Output::new`].
    pub(crate) unsafe fn optional(start: *mut T, count: usize, name: &str) -> Result<Output<T>> {
        // SAFETY: the caller's promise.
        unsafe { Self::new(start, if start.is_null() { 0 } else { count }, name) }
    }

    /// Writes the values, as far as there is room.
    pub(crate) fn write(self, values: impl IntoIterator<Item = T>) {
        for (index, value) in values.into_iter().take(self.count).enumerate() {
            // SAFETY: `index` is below the number of elements that the caller has promised.
            unsafe { self.start.add(index).write(value) };
        }
    }
}

/// Text of the caller.
///
/// # Safety
/// If its pointer is not null, its bytes are there during `'a`.
pub(crate) unsafe fn text<'a>(text: LarderText, name: &str) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { text_bytes(text, name) }?;
    std::str::from_utf8(bytes).map_err(|_| Failure::invalid(format!("{name} is not UTF-8")))
}

/// Bytes of a text of the caller.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn text_bytes<'a>(text: LarderText, name: &str) -> Result<&'a [u8]> {
    // SAFETY: the caller's promise.
    unsafe { array(text.data.cast(), text.size, name) }
}

pub(crate) fn duration(microseconds: u64, name: &str) -> Result<Duration> {
    Ok(larder_bindings::bounded(Some(Duration::from_micros(microseconds)), name)?)
}

pub(crate) fn deadline(timeout_us: u64) -> Result<Instant> {
    Ok(Instant::now() + duration(timeout_us, "timeout_us")?)
}
