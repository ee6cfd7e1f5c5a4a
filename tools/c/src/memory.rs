//! The caller's memory during a call.
//!
//! Invariant: when a call returns, no transfer touches memory that the program may free. A get and
//! a follow return all targets first. A put copies its pages, because a transfer may outlive it,
//! into shared memory where a node on this machine reads them in place. Memory of an open buffer is
//! not copied: the transfer keeps the buffer.

use crate::call::{Failure, Result};
use crate::handles::{OpenBuffer, buffer_of};
use crate::types::{LarderKey, LarderMemory};
use bytes::Bytes;
use larder_bindings::{Holds, PageTarget, Span, check_distinct, targets_of_parts};
use larder_client::Client;
use larder_format::{PageGeometry, PageKey};
use std::ops::Range;
use std::sync::Arc;

type Target = larder_bindings::Target<Option<Arc<OpenBuffer>>>;

pub(crate) fn keys(keys: &[LarderKey]) -> Vec<PageKey> {
    keys.iter().map(|key| PageKey(key.bytes)).collect()
}

/// Number of memories of each page: one, or one for each part.
fn memories_per_page(geometry: &PageGeometry, pages: usize, memories: usize) -> Result<usize> {
    let parts = geometry.part_count();
    if memories == pages {
        return Ok(1);
    }
    if pages.checked_mul(parts) == Some(memories) {
        return Ok(parts);
    }
    Err(Failure::invalid(format!("{memories} memories for {pages} pages of {parts} parts")))
}

fn check(memory: LarderMemory, expected: usize) -> Result<()> {
    if memory.data.is_null() || memory.size == 0 {
        return Err(Failure::invalid("a memory is null or has no bytes"));
    }
    if memory.size != expected {
        return Err(Failure::invalid(format!("a memory has {} bytes instead of {expected}", memory.size)));
    }
    if memory.data.addr().checked_add(memory.size).is_none_or(|end| end > isize::MAX as usize) {
        return Err(Failure::invalid("a memory ends beyond the address space"));
    }
    Ok(())
}

/// Targets of a get: pages, or parts of them.
///
/// # Safety
/// The memories stay valid and are not accessed by others until `holds` announces their release.
pub(crate) unsafe fn targets(
    geometry: &PageGeometry,
    keys: &[PageKey],
    memories: &[LarderMemory],
    holds: &Arc<Holds>,
) -> Result<Vec<PageTarget<Target>>> {
    let per_page = memories_per_page(geometry, keys.len(), memories.len())?;
    let page_bytes = geometry.page_bytes();
    let part_table = if per_page == 1 { vec![page_bytes as u32] } else { geometry.part_table() };
    let target = |(&memory, &length): (&LarderMemory, &u32)| {
        check(memory, length as usize)?;
        // SAFETY: the caller's promise. An open buffer stays until the target is dropped.
        Ok(unsafe { Span::new(memory.data, memory.size, buffer_of(memory)?) }.into_target(holds))
    };
    let mut targets = Vec::with_capacity(memories.len());
    for (page, (&key, memories)) in keys.iter().zip(memories.chunks(per_page)).enumerate() {
        let mut parts = memories.iter().zip(&part_table).map(target).collect::<Result<Vec<_>>>()?;
        if per_page == 1 {
            let whole = parts.pop().into_iter();
            targets.extend(whole.map(|memory| PageTarget { page, key, range: 0..page_bytes as u32, memory }));
        } else {
            targets.extend(targets_of_parts(geometry, page, key, parts));
        }
    }
    check_distinct(targets.iter().map(|target| &target.memory))?;
    Ok(targets)
}

/// Memories of the pages of a put, checked. Open buffers among them stay.
pub(crate) struct Sources<'a> {
    memories: Vec<(LarderMemory, Option<Arc<OpenBuffer>>)>,
    per_page: usize,
    geometry: &'a PageGeometry,
}

impl Sources<'_> {
    pub(crate) fn new<'a>(geometry: &'a PageGeometry, pages: usize, memories: &[LarderMemory]) -> Result<Sources<'a>> {
        let per_page = memories_per_page(geometry, pages, memories.len())?;
        let lengths = if per_page == 1 { vec![geometry.page_bytes() as u32] } else { geometry.part_table() };
        let checked = |(&memory, &length): (&LarderMemory, &u32)| {
            check(memory, length as usize)?;
            Ok((memory, buffer_of(memory)?))
        };
        let memories = memories.iter().zip(lengths.iter().cycle()).map(checked).collect::<Result<_>>()?;
        Ok(Sources { memories, per_page, geometry })
    }

    /// Parts of each of these pages. They stay after the call.
    ///
    /// # Safety
    /// The memories are valid during this call.
    pub(crate) unsafe fn parts(&self, client: &Client, pages: Range<usize>) -> Vec<Vec<Bytes>> {
        let part_table = self.geometry.part_table();
        let page = |memories: &[(LarderMemory, Option<Arc<OpenBuffer>>)]| {
            // SAFETY: the caller's promise.
            let mut kept = memories.iter().map(|(memory, buffer)| unsafe { keep(client, *memory, buffer) });
            match self.per_page {
                1 => kept.next().map(|page| split(page, &part_table)).unwrap_or_default(),
                _ => kept.collect(),
            }
        };
        let memories = &self.memories[pages.start * self.per_page..pages.end * self.per_page];
        memories.chunks(self.per_page).map(page).collect()
    }
}

fn split(mut page: Bytes, part_table: &[u32]) -> Vec<Bytes> {
    part_table.iter().map(|&length| page.split_to(length as usize)).collect()
}

/// Bytes that stay after the call: those of an open buffer, or a copy.
///
/// # Safety
/// The memory is valid during this call. It lies in `buffer`, if that is set.
unsafe fn keep(client: &Client, memory: LarderMemory, buffer: &Option<Arc<OpenBuffer>>) -> Bytes {
    if let Some(buffer) = buffer {
        // SAFETY: the memory lies in the buffer, which stays until the span is dropped.
        let span = unsafe { Span::new(memory.data, memory.size, Some(buffer.clone())) };
        return span.into_bytes(&Arc::default());
    }
    let mut copy = client.buffer(memory.size);
    // SAFETY: the caller's promise.
    copy.copy_from_slice(unsafe { std::slice::from_raw_parts(memory.data, memory.size) });
    copy.freeze()
}
