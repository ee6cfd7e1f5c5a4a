//! What several messages are made of.

use crate::limits::MAX_KEYS;
use larder_format::PageKey;
use larder_format::codec::{DecodeError, Put, Reader, Result};
use larder_format::page::MAX_CHUNKS;
use std::ops::Range;

/// One of the pages that a request named: a put that it reserved, or a page that is held for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Number of the request.
    pub request: u64,
    /// Index in that request.
    pub index: u32,
}

/// Bytes of a page's payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRange {
    /// Page key.
    pub key: PageKey,
    /// From the start of a chunk to the end of one.
    pub bytes: Range<u32>,
}

pub(crate) fn put_range(out: &mut Vec<u8>, bytes: &Range<u32>) {
    out.put_u32(bytes.start);
    out.put_u32(bytes.end);
}

pub(crate) fn range(reader: &mut Reader<'_>) -> Result<Range<u32>> {
    Ok(reader.u32("start of a range")?..reader.u32("end of a range")?)
}

pub(crate) fn put_keys(out: &mut Vec<u8>, keys: &[PageKey]) {
    out.put_list(keys, |out, key| out.put(&key.0));
}

pub(crate) fn put_entry(out: &mut Vec<u8>, put: &Entry) {
    out.put_u64(put.request);
    out.put_u32(put.index);
}

pub(crate) fn entry(reader: &mut Reader<'_>) -> Result<Entry> {
    Ok(Entry { request: reader.u64("put")?, index: reader.u32("index of a put")? })
}

pub(crate) fn key(reader: &mut Reader<'_>) -> Result<PageKey> {
    Ok(PageKey(reader.array("page key")?))
}

pub(crate) fn keys(reader: &mut Reader<'_>) -> Result<Vec<PageKey>> {
    reader.list(MAX_KEYS, "keys", key)
}

pub(crate) fn crcs(reader: &mut Reader<'_>) -> Result<Vec<u32>> {
    reader.list(MAX_CHUNKS, "crcs", |r| r.u32("crc"))
}

pub(crate) fn flag(reader: &mut Reader<'_>) -> Result<bool> {
    match reader.u8("flag")? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Invalid("flag")),
    }
}

pub(crate) fn optional<T>(
    reader: &mut Reader<'_>,
    item: impl FnOnce(&mut Reader<'_>) -> Result<T>,
) -> Result<Option<T>> {
    match reader.u8("presence")? {
        0 => Ok(None),
        1 => item(reader).map(Some),
        _ => Err(DecodeError::Invalid("presence")),
    }
}
