//! Functions that find and move pages.

use crate::call::{Failure, Output, Result, array, call, deadline, duration, read_optional};
use crate::types::*;
use crate::{handles, memory};
use larder_bindings::{Holds, new_pages, runtime};
use larder_client::{FollowEnd, GetOptions, NewPage, PutOptions, PutOutcome, Tier};
use larder_format::{MAX_TOKEN_IDS, PageKey};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Maximum bytes of the pages of one call that are copied and sent at a time, or one page.
const GROUP_BYTES: usize = 64 << 20;
/// Maximum time that a call which panicked waits for its memory.
const RELEASE_WAIT: Duration = Duration::from_secs(1);

fn tier(tier: Option<Tier>) -> LarderTier {
    match tier {
        None => LarderTier::Miss,
        Some(Tier::L2) => LarderTier::L2,
        Some(Tier::L3) => LarderTier::L3,
    }
}

fn outcome(outcome: PutOutcome) -> LarderPutOutcome {
    match outcome {
        PutOutcome::Stored => LarderPutOutcome::Stored,
        PutOutcome::AlreadyThere => LarderPutOutcome::AlreadyThere,
        PutOutcome::Refused => LarderPutOutcome::Refused,
        PutOutcome::Forgotten => LarderPutOutcome::Forgotten,
        PutOutcome::Retired => LarderPutOutcome::Retired,
        PutOutcome::InProgress => LarderPutOutcome::InProgress,
        PutOutcome::Busy { .. } => LarderPutOutcome::Busy,
        PutOutcome::Lost => LarderPutOutcome::Lost,
    }
}

fn follow_end(end: FollowEnd) -> LarderFollowEnd {
    match end {
        FollowEnd::Sealed => LarderFollowEnd::Sealed,
        FollowEnd::Aborted => LarderFollowEnd::Aborted,
        FollowEnd::Miss => LarderFollowEnd::Miss,
        FollowEnd::Busy => LarderFollowEnd::Busy,
    }
}

/// Waits for a transfer into memory of the caller. After a panic, waits for the memory too.
fn wait_for_memory<T>(released: Arc<Notify>, work: impl Future<Output = T>) -> Result<T> {
    let runtime = runtime()?;
    let ended = catch_unwind(AssertUnwindSafe(|| runtime.block_on(work)));
    let Err(panic) = ended else { return Ok(ended.unwrap_or_else(|panic| resume_unwind(panic))) };
    let wait = async { tokio::time::timeout(RELEASE_WAIT, released.notified()).await };
    if runtime.block_on(wait).is_ok() {
        resume_unwind(panic);
    }
    let text = "the library has a defect: a transfer may still write to the memory. Do not free it";
    Err(Failure { status: LarderStatus::Internal, text: text.into() })
}

/// Finds out which pages exist. `tiers` has `count` elements.
///
/// # Safety
/// The arrays have `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_exists(
    client: LarderClient,
    keys: *const LarderKey,
    count: usize,
    timeout_us: u64,
    tiers: *mut LarderTier,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below.
    call(|| unsafe {
        let tiers = Output::new(tiers, count, "tiers")?;
        let keys = memory::keys(array(keys, count, "keys")?);
        let ((client, _), deadline) = (handles::attached(client)?, deadline(timeout_us)?);
        let located = runtime()?.block_on(client.locate(&keys, deadline));
        tiers.write(located.into_iter().map(tier));
        Ok(())
    })
}

/// Finds the longest prefix of `keys` that the store can serve, and holds it for `hold_us`, at most
/// 60 s. 0 holds nothing.
///
/// `tiers` and `expected_us` may be null. Otherwise they have `count` elements, of which those of
/// the prefix are set: the tier of each page, and the expected time until it is in L2.
///
/// # Safety
/// The arrays have `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_lookup(
    client: LarderClient,
    keys: *const LarderKey,
    count: usize,
    hold_us: u64,
    timeout_us: u64,
    result: *mut LarderLookup,
    tiers: *mut LarderTier,
    expected_us: *mut u64,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below.
    call(|| unsafe {
        let result = Output::new(result, 1, "result")?;
        let tiers = Output::optional(tiers, count, "tiers")?;
        let expected_us = Output::optional(expected_us, count, "expected_us")?;
        let keys = memory::keys(array(keys, count, "keys")?);
        let ((client, _), hold) = (handles::attached(client)?, duration(hold_us, "hold_us")?);
        let lookup = runtime()?.block_on(client.lookup(&keys, hold, deadline(timeout_us)?));
        let is_empty = hold.is_zero() || lookup.tiers.is_empty();
        let lease = if is_empty { LarderLease { id: 0 } } else { handles::open_lease(lookup.lease)? };
        result.write([LarderLookup {
            pages: lookup.tiers.len(),
            held: lookup.held,
            answered: lookup.answered,
            retry_after_us: lookup.retry_after.map_or(0, microseconds),
            lease,
        }]);
        tiers.write(lookup.tiers.into_iter().map(|found| tier(Some(found))));
        expected_us.write(lookup.expected.into_iter().map(microseconds));
        Ok(())
    })
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Ends the hold of a lookup. The zero lease holds nothing.
#[unsafe(no_mangle)]
pub extern "C" fn larder_lease_release(lease: LarderLease) -> LarderStatus {
    call(|| if lease.id == 0 { Ok(()) } else { handles::release_lease(lease) })
}

/// Reads pages into the caller's memory. `tiers` has `count` elements.
///
/// `memories` has one element for each page, or one for each part of each page, page by page. Two
/// of them must not overlap. The content of a missed page's memory is undefined.
///
/// The call requests pages that a busy node refused once more, as long as each request brings
/// pages. `busy_retries` is the number of retries after requests that bring none. Each waits as the
/// node suggests, up to 10 s and within the timeout.
///
/// # Safety
/// The arrays have as many elements as stated. Nothing else accesses the memories during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_get_into(
    client: LarderClient,
    keys: *const LarderKey,
    count: usize,
    memories: *const LarderMemory,
    memory_count: usize,
    busy_retries: u32,
    timeout_us: u64,
    tiers: *mut LarderTier,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below. `wait_for_memory` ends after the transfers.
    call(|| unsafe {
        let output = Output::new(tiers, count, "tiers")?;
        let keys = memory::keys(array(keys, count, "keys")?);
        let memories = array(memories, memory_count, "memories")?;
        let ((client, namespace), deadline) = (handles::attached(client)?, deadline(timeout_us)?);
        let holds = Arc::new(Holds::default());
        let released = holds.released();
        let targets = memory::targets(&namespace.geometry, &keys, memories, &holds)?;
        drop(holds);
        let options = GetOptions { busy_retries, ..GetOptions::default() };
        let work = larder_bindings::get(client, keys.len(), targets, options, deadline);
        output.write(wait_for_memory(released, work)?.into_iter().map(tier));
        Ok(())
    })
}

/// Names of the pages with these keys, and the options of their put.
unsafe fn put_options(keys: Vec<PageKey>, options: *const LarderPutOptions) -> Result<(Vec<NewPage>, PutOptions)> {
    // SAFETY: the caller's promise.
    let Some(options) = (unsafe { read_optional(options, "options") })? else {
        return Ok((new_pages(keys, None, None, Vec::new()), PutOptions::default()));
    };
    // SAFETY: the caller's promise.
    let parent = unsafe { read_optional(options.parent, "parent") }?.map(|key| PageKey(key.bytes));
    let position = options.in_sequence.then_some(options.position);
    let ttl = (options.ttl_us > 0).then(|| Duration::from_micros(options.ttl_us));
    let page_token_ids = options.page_token_ids as usize;
    if page_token_ids > MAX_TOKEN_IDS {
        return Err(Failure::invalid(format!("page_token_ids is {page_token_ids}, at most {MAX_TOKEN_IDS}")));
    }
    // SAFETY: the caller's promise.
    let token_ids = unsafe { array(options.token_ids, keys.len().saturating_mul(page_token_ids), "token_ids") }?;
    let token_ids = token_ids.chunks(page_token_ids.max(1)).map(<[u32]>::to_vec).collect();
    let pages = new_pages(keys, parent, position, token_ids);
    Ok((pages, PutOptions { ttl, busy_retries: options.busy_retries }))
}

/// Puts pages from the caller's memory. `outcomes` has `count` elements.
///
/// `memories` is as for larder_get_into. `options` may be null. Memory that lies in a larder_buffer
/// is not copied: after LARDER_PUT_OUTCOME_LOST, a transfer may still read it. If the program
/// changes it then, the node refuses the page. Other memory is copied once, before the transfer, at
/// most 64 MiB at a time.
///
/// # Safety
/// The arrays have as many elements as stated. Nothing writes to the memories during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_put_from(
    client: LarderClient,
    keys: *const LarderKey,
    count: usize,
    memories: *const LarderMemory,
    memory_count: usize,
    options: *const LarderPutOptions,
    timeout_us: u64,
    outcomes: *mut LarderPutOutcome,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below.
    call(|| unsafe {
        let output = Output::new(outcomes, count, "outcomes")?;
        let keys = memory::keys(array(keys, count, "keys")?);
        let memories = array(memories, memory_count, "memories")?;
        let ((client, namespace), deadline) = (handles::attached(client)?, deadline(timeout_us)?);
        let sources = memory::Sources::new(&namespace.geometry, keys.len(), memories)?;
        let (pages, options) = put_options(keys, options)?;
        let group_pages = (GROUP_BYTES / namespace.geometry.page_bytes()).max(1);
        let mut outcomes = Vec::with_capacity(count);
        while outcomes.len() < count && Instant::now() < deadline {
            let group = outcomes.len()..count.min(outcomes.len() + group_pages);
            let parts = sources.parts(&client, group.clone());
            let pages = pages[group].iter().cloned().zip(parts).collect();
            let put = larder_bindings::put(client.clone(), pages, options, deadline);
            outcomes.extend(runtime()?.block_on(put).into_iter().map(outcome));
        }
        outcomes.resize(count, LarderPutOutcome::Lost);
        output.write(outcomes);
        Ok(())
    })
}

/// Reads pages into the caller's memory while another client writes them, or later. `ends` has
/// `count` elements.
///
/// `memories` has one element for each page.
///
/// # Safety
/// The arrays have `count` elements. Nothing else accesses the memories during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_follow(
    client: LarderClient,
    keys: *const LarderKey,
    count: usize,
    memories: *const LarderMemory,
    timeout_us: u64,
    ends: *mut LarderFollowEnd,
) -> LarderStatus {
    // SAFETY: the caller's promise, here and below. `wait_for_memory` ends after the transfers.
    call(|| unsafe {
        let output = Output::new(ends, count, "ends")?;
        let keys = memory::keys(array(keys, count, "keys")?);
        let memories = array(memories, count, "memories")?;
        let ((client, namespace), deadline) = (handles::attached(client)?, deadline(timeout_us)?);
        let holds = Arc::new(Holds::default());
        let released = holds.released();
        let targets = memory::targets(&namespace.geometry, &keys, memories, &holds)?;
        drop(holds);
        let ends = wait_for_memory(released, larder_bindings::follow(client, targets, deadline))?;
        output.write(ends.into_iter().map(follow_end));
        Ok(())
    })
}
