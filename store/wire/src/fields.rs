//! What several messages are made of.

use crate::limits::{MAX_KEYS, MAX_LINES};
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

/// Where the bytes of a part are that a client puts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartBytes {
    /// In the payload.
    Payload,
    /// In the memory that this client lent when it came in. The node copies them from there and checks what it copied: what does
    /// not stay as it is until the put has ended is damaged.
    Lent {
        /// From the start of the memory.
        offset: u64,
        /// How many.
        bytes: u32,
    },
    /// Where the part's window let the client write them. The window is withdrawn before they are looked at.
    Window,
}

/// How the bytes of pages come to the client that asks for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delivery {
    /// As payload.
    Sent,
    /// They lie in the node's arena, which the client has mapped, and are held there.
    InPlace,
    /// The client reads them by RDMA, through windows on these lines of its in turn: the page of index `i` on number `i`
    /// modulo how many there are.
    Read(Vec<u32>),
}

/// Where the bytes of a page are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the payload.
    Payload,
    /// At this offset of the node's arena, until the page is released, or nobody has the arena any more.
    Arena(u64),
    /// Behind a window, until the page is released, or the line is gone.
    Window(LineWindow),
}

/// One end of an RDMA line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineEnd {
    /// Number of the line, which the client chose; no other line of the connection ever has it.
    pub line: u32,
    /// Its address, as RDMA has it.
    pub address: [u8; 32],
}

/// Bytes of the node's memory that a client can reach by RDMA, on one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineWindow {
    /// Number of the line.
    pub line: u32,
    /// Where they lie, in the node's terms.
    pub address: u64,
    /// How many.
    pub len: u64,
    /// Their key.
    pub key: u32,
}

impl Delivery {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        match self {
            Delivery::Sent => out.put_u8(0),
            Delivery::InPlace => out.put_u8(1),
            Delivery::Read(lines) => {
                out.put_u8(2);
                put_lines(out, lines);
            }
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Delivery> {
        match reader.u8("delivery")? {
            0 => Ok(Delivery::Sent),
            1 => Ok(Delivery::InPlace),
            2 => Ok(Delivery::Read(lines(reader)?)),
            _ => Err(DecodeError::Invalid("delivery")),
        }
    }
}

impl Place {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        match self {
            Place::Payload => out.put_u8(0),
            Place::Arena(offset) => {
                out.put_u8(1);
                out.put_u64(*offset);
            }
            Place::Window(window) => {
                out.put_u8(2);
                window.put(out);
            }
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Place> {
        match reader.u8("place")? {
            0 => Ok(Place::Payload),
            1 => Ok(Place::Arena(reader.u64("offset in the arena")?)),
            2 => Ok(Place::Window(LineWindow::read(reader)?)),
            _ => Err(DecodeError::Invalid("place")),
        }
    }
}

impl LineEnd {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(self.line);
        out.put(&self.address);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<LineEnd> {
        Ok(LineEnd { line: reader.u32("line")?, address: reader.array("address of a line")? })
    }
}

impl LineWindow {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(self.line);
        out.put_u64(self.address);
        out.put_u64(self.len);
        out.put_u32(self.key);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<LineWindow> {
        let (line, address) = (reader.u32("line")?, reader.u64("address of a window")?);
        Ok(LineWindow { line, address, len: reader.u64("length of a window")?, key: reader.u32("key of a window")? })
    }
}

pub(crate) fn put_lines(out: &mut Vec<u8>, lines: &[u32]) {
    out.put_list(lines, |out, &line| out.put_u32(line));
}

pub(crate) fn lines(reader: &mut Reader<'_>) -> Result<Vec<u32>> {
    reader.list(MAX_LINES, "lines", |r| r.u32("line"))
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

pub(crate) fn put_part_bytes(out: &mut Vec<u8>, bytes: &PartBytes) {
    match bytes {
        PartBytes::Payload => out.put_u8(0),
        PartBytes::Lent { offset, bytes } => {
            out.put_u8(1);
            out.put_u64(*offset);
            out.put_u32(*bytes);
        }
        PartBytes::Window => out.put_u8(2),
    }
}

pub(crate) fn part_bytes(reader: &mut Reader<'_>) -> Result<PartBytes> {
    match reader.u8("where a part is")? {
        0 => Ok(PartBytes::Payload),
        1 => Ok(PartBytes::Lent { offset: reader.u64("offset of a part")?, bytes: reader.u32("bytes of a part")? }),
        2 => Ok(PartBytes::Window),
        _ => Err(DecodeError::Invalid("where a part is")),
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
