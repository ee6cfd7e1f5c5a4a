//! Functions that steer the cache.

use crate::call::{Failure, Output, Result, array, call, deadline, read, set_error};
use crate::types::*;
use crate::{handles, memory};
use larder_bindings::runtime;
use larder_client::{Hint, PinKind};
use std::time::Duration;

/// Pins pages in L2 for `ttl_us`, from a millisecond to 30 days. Nodes first bring them from L3.
///
/// `kind` is one of larder_pin_kind. LARDER_PIN_KIND_NONE ends the pins, and ignores `ttl_us`.
///
/// # Safety
/// `keys` has `count` elements, and `result` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_pin(
    client: LarderClient,
    keys: *const LarderKey,
    count: usize,
    kind: u32,
    ttl_us: u64,
    timeout_us: u64,
    result: *mut LarderPinned,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below.
    call(|| unsafe {
        let result = Output::new(result, 1, "result")?;
        let keys = memory::keys(array(keys, count, "keys")?);
        let kind = pin_kind(kind)?;
        let ((client, _), deadline) = (handles::attached(client)?, deadline(timeout_us)?);
        let pinned = runtime()?.block_on(client.pin(&keys, kind, Duration::from_micros(ttl_us), deadline));
        if let Some(reason) = &pinned.refused {
            set_error(reason);
        }
        let refused = pinned.refused.is_some();
        result.write([LarderPinned { pages: pinned.pages, refused, complete: pinned.complete }]);
        Ok(())
    })
}

fn pin_kind(kind: u32) -> Result<PinKind> {
    const NONE: u32 = LarderPinKind::None as u32;
    const SOFT: u32 = LarderPinKind::Soft as u32;
    const HARD: u32 = LarderPinKind::Hard as u32;
    match kind {
        NONE => Ok(PinKind::None),
        SOFT => Ok(PinKind::Soft),
        HARD => Ok(PinKind::Hard),
        _ => Err(Failure::invalid(format!("{kind} is no kind of a pin"))),
    }
}

fn hint_of(hint: LarderHint) -> Result<Hint> {
    const NONE: u32 = LarderHintKind::None as u32;
    const RETAIN: u32 = LarderHintKind::Retain as u32;
    const DEMOTE: u32 = LarderHintKind::Demote as u32;
    const SESSION_ENDED: u32 = LarderHintKind::SessionEnded as u32;
    match (hint.kind, hint.retain_us) {
        (RETAIN, 1..) => Ok(Hint::Retain(Duration::from_micros(hint.retain_us))),
        (NONE, 0) => Ok(Hint::None),
        (DEMOTE, 0) => Ok(Hint::Demote),
        (SESSION_ENDED, 0) => Ok(Hint::SessionEnded),
        (kind, time) => Err(Failure::invalid(format!("a hint of kind {kind} does not have {time} us"))),
    }
}

/// Gives advice about the pages of a sequence, in its order. `pages` is set to the number that is
/// in L2 at the nodes that have answered.
///
/// # Safety
/// `keys` has `count` elements, and the other pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_hint(
    client: LarderClient,
    keys: *const LarderKey,
    count: usize,
    hint: *const LarderHint,
    timeout_us: u64,
    pages: *mut usize,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below.
    call(|| unsafe {
        let pages = Output::new(pages, 1, "pages")?;
        let keys = memory::keys(array(keys, count, "keys")?);
        let hint = read(hint, "hint")?;
        let generated = hint.has_generated.then_some(hint.generated_tokens);
        let hint = hint_of(hint)?;
        let ((client, _), deadline) = (handles::attached(client)?, deadline(timeout_us)?);
        pages.write([runtime()?.block_on(client.hint(&keys, generated, hint, deadline))]);
        Ok(())
    })
}

/// Brings pages from L3 to L2. `pages` is set to the number that is in L2 afterwards.
///
/// # Safety
/// `keys` has `count` elements, and `pages` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_warm(
    client: LarderClient,
    keys: *const LarderKey,
    count: usize,
    timeout_us: u64,
    pages: *mut usize,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below.
    call(|| unsafe {
        let pages = Output::new(pages, 1, "pages")?;
        let keys = memory::keys(array(keys, count, "keys")?);
        let ((client, _), deadline) = (handles::attached(client)?, deadline(timeout_us)?);
        pages.write([runtime()?.block_on(client.warm(&keys, deadline))]);
        Ok(())
    })
}

/// Forgets pages durably, at every node of the URL.
///
/// # Safety
/// `keys` has `count` elements, and `result` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_forget(
    client: LarderClient,
    keys: *const LarderKey,
    count: usize,
    timeout_us: u64,
    result: *mut LarderForgotten,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below.
    call(|| unsafe {
        let result = Output::new(result, 1, "result")?;
        let keys = memory::keys(array(keys, count, "keys")?);
        let ((client, _), deadline) = (handles::attached(client)?, deadline(timeout_us)?);
        let forgotten = runtime()?.block_on(client.forget(&keys, deadline));
        result.write([LarderForgotten { pages: forgotten.pages, complete: forgotten.complete }]);
        Ok(())
    })
}
