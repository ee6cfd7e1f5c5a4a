//! Fields that several messages share, with their encodings.

use crate::codes::{MissReason, PinKind};
use crate::limits::{MAX_KEYS, MAX_RDMA_CHANNELS};
use larder_format::MAX_CHUNKS;
use larder_format::codec::{DecodeError, Put, Reader, Result};
use larder_format::{NamespaceFields, PageKey, PageMeta};
use std::ops::Range;

/// One of the pages that a request named: an open put, or a page that the node holds for the
/// client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Number of the request, which the client chose and does not reuse within the connection.
    pub request: u64,
    /// Index of the page in that request.
    pub index: u32,
}

/// A byte range of a page's payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRange {
    /// Key of the page.
    pub key: PageKey,
    /// Bytes. Both ends must be chunk boundaries, because CRCs cover whole chunks.
    pub bytes: Range<u32>,
}

/// Location of the bytes of a part that a client puts. The node accepts a part only if its bytes
/// match its CRCs, wherever they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartLocation {
    /// In the payload of this frame.
    Inline,
    /// In the memory that the client shared when it connected. The node copies the bytes and checks
    /// the copy. The client must not change them until the put has ended, or the part counts as
    /// damaged.
    SharedMemory {
        /// Offset from the start of the shared memory, in bytes.
        offset: u64,
        /// Length in bytes.
        bytes: u32,
    },
    /// In the node's memory: the client wrote them by RDMA through the part's grant. The node
    /// revokes the grant before it checks the bytes.
    Rdma,
}

/// Transport by which a client wants the bytes of pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delivery {
    /// As payloads of the responses.
    Inline,
    /// In place: the client has mapped the node's arena, and the node holds the pages there.
    InPlace,
    /// By RDMA reads of the client, over these channels. The page of index `i` uses channel `i`
    /// modulo their number.
    Rdma(Vec<u32>),
}

/// Location of the bytes of a page that a node serves. The client verifies the CRCs in every case,
/// because the bytes may be damaged on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadLocation {
    /// In the payload of this frame.
    Inline,
    /// At this byte offset of the node's arena. Valid until the client releases the page, or closes
    /// the arena session.
    Arena(u64),
    /// In a range of the node's memory that the client may read by RDMA. Valid until the client
    /// releases the page, or the channel ends.
    Rdma(GrantedRange),
}

/// One end of an RDMA channel, which is a pair of connected endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RdmaEndpoint {
    /// Number of the channel. The client chooses it and never reuses it within a connection.
    pub channel: u32,
    /// Address of this end. `larder-rdma` defines its layout.
    pub address: [u8; 32],
}

/// A range of the node's memory that a client may access by RDMA, over one channel. The remote key
/// is valid on that channel only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantedRange {
    /// Number of the channel.
    pub channel: u32,
    /// Virtual address on the node.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Remote key of the grant. The node invalidates it when it revokes the grant.
    pub key: u32,
}

/// An active pin of a page. The node ends it when its time is over, without notice to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagePin {
    /// Strength, never [`PinKind::None`].
    pub kind: PinKind,
    /// Time until the pin expires, in milliseconds.
    pub remaining_ms: u64,
}

/// Payload of a page in a file of L3. Part of [`Response::Extents`](crate::Response::Extents).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Position of the file's descriptor in the message on the arena session.
    pub file: u32,
    /// Start of the payload in the file, in bytes: a multiple of 4,096.
    pub offset: u64,
    /// Identity and CRCs of the page. They prove the bytes that the client reads: the node may
    /// reuse the extent after its hold.
    pub meta: PageMeta,
}

impl Extent {
    pub(crate) fn put(out: &mut Vec<u8>, extent: &Option<Extent>) {
        put_optional(out, extent.as_ref(), |out, extent| {
            out.put_u32(extent.file);
            out.put_u64(extent.offset);
            extent.meta.encode(out);
        });
    }

    /// Reads an extent in one of `files` files.
    pub(crate) fn read(reader: &mut Reader<'_>, files: u32) -> Result<Option<Extent>> {
        optional(reader, |r| {
            let (file, offset) = (r.u32("file of the extent")?, r.u64("offset of the extent")?);
            if file >= files {
                return Err(DecodeError::Invalid("file of the extent"));
            }
            Ok(Extent { file, offset, meta: PageMeta::decode(r)? })
        })
    }
}

/// Reason of a miss, with its circumstances. Part of
/// [`Response::Explained`](crate::Response::Explained).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Explanation {
    /// Reason.
    pub reason: MissReason,
    /// Time of the event, in milliseconds since 1970. 0 if the reason is no event, or if its time
    /// is unknown.
    pub at_unix_ms: u64,
    /// Fields in which the nearest namespace with the page differs. Empty unless the reason is
    /// [`MissReason::OtherNamespace`].
    pub differing: NamespaceFields,
}

impl Explanation {
    pub(crate) fn put(out: &mut Vec<u8>, explanation: &Explanation) {
        out.put_u8(explanation.reason.code());
        out.put_u64(explanation.at_unix_ms);
        out.put_u8(explanation.differing.bits());
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Explanation> {
        let reason = MissReason::from_code(reader.u8("miss reason")?)?;
        let at_unix_ms = reader.u64("time of the event")?;
        let differing = NamespaceFields::from_bits(reader.u8("differing fields")?)?;
        // Two namespaces differ in at least one field, and no other reason has any.
        if differing.is_empty() == (reason == MissReason::OtherNamespace) {
            return Err(DecodeError::Invalid("differing fields"));
        }
        Ok(Explanation { reason, at_unix_ms, differing })
    }
}

impl Delivery {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        match self {
            Delivery::Inline => out.put_u8(0),
            Delivery::InPlace => out.put_u8(1),
            Delivery::Rdma(channels) => {
                out.put_u8(2);
                put_channels(out, channels);
            }
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Delivery> {
        match reader.u8("delivery")? {
            0 => Ok(Delivery::Inline),
            1 => Ok(Delivery::InPlace),
            2 => Ok(Delivery::Rdma(channels(reader)?)),
            _ => Err(DecodeError::Invalid("delivery")),
        }
    }
}

impl PayloadLocation {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        match self {
            PayloadLocation::Inline => out.put_u8(0),
            PayloadLocation::Arena(offset) => {
                out.put_u8(1);
                out.put_u64(*offset);
            }
            PayloadLocation::Rdma(range) => {
                out.put_u8(2);
                range.put(out);
            }
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<PayloadLocation> {
        match reader.u8("payload location")? {
            0 => Ok(PayloadLocation::Inline),
            1 => Ok(PayloadLocation::Arena(reader.u64("arena offset")?)),
            2 => Ok(PayloadLocation::Rdma(GrantedRange::read(reader)?)),
            _ => Err(DecodeError::Invalid("payload location")),
        }
    }
}

impl PartLocation {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        match self {
            PartLocation::Inline => out.put_u8(0),
            PartLocation::SharedMemory { offset, bytes } => {
                out.put_u8(1);
                out.put_u64(*offset);
                out.put_u32(*bytes);
            }
            PartLocation::Rdma => out.put_u8(2),
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<PartLocation> {
        match reader.u8("part location")? {
            0 => Ok(PartLocation::Inline),
            1 => Ok(PartLocation::SharedMemory {
                offset: reader.u64("offset in shared memory")?,
                bytes: reader.u32("part length")?,
            }),
            2 => Ok(PartLocation::Rdma),
            _ => Err(DecodeError::Invalid("part location")),
        }
    }
}

impl RdmaEndpoint {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(self.channel);
        out.put(&self.address);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<RdmaEndpoint> {
        Ok(RdmaEndpoint { channel: reader.u32("channel")?, address: reader.array("endpoint address")? })
    }
}

impl GrantedRange {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(self.channel);
        out.put_u64(self.address);
        out.put_u64(self.len);
        out.put_u32(self.key);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<GrantedRange> {
        Ok(GrantedRange {
            channel: reader.u32("channel")?,
            address: reader.u64("grant address")?,
            len: reader.u64("grant length")?,
            key: reader.u32("grant key")?,
        })
    }
}

impl PagePin {
    /// Writes a page's pin. No pin is [`PinKind::None`] and no time.
    pub(crate) fn put(out: &mut Vec<u8>, pin: &Option<PagePin>) {
        debug_assert!(pin.is_none_or(|pin| pin.kind != PinKind::None), "no pin is `None`");
        out.put_u8(pin.map_or(PinKind::None, |pin| pin.kind).code());
        out.put_u64(pin.map_or(0, |pin| pin.remaining_ms));
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Option<PagePin>> {
        let kind = PinKind::from_code(reader.u8("pin kind")?)?;
        let remaining_ms = reader.u64("remaining pin time")?;
        match kind {
            // One encoding per message: a page without a pin has no remaining time.
            PinKind::None if remaining_ms != 0 => Err(DecodeError::Invalid("remaining pin time")),
            PinKind::None => Ok(None),
            kind => Ok(Some(PagePin { kind, remaining_ms })),
        }
    }
}

pub(crate) fn put_range(out: &mut Vec<u8>, bytes: &Range<u32>) {
    out.put_u32(bytes.start);
    out.put_u32(bytes.end);
}

pub(crate) fn range(reader: &mut Reader<'_>) -> Result<Range<u32>> {
    Ok(reader.u32("range start")?..reader.u32("range end")?)
}

pub(crate) fn put_channels(out: &mut Vec<u8>, channels: &[u32]) {
    out.put_list(channels, |out, &channel| out.put_u32(channel));
}

pub(crate) fn channels(reader: &mut Reader<'_>) -> Result<Vec<u32>> {
    reader.list(MAX_RDMA_CHANNELS, "channels", |r| r.u32("channel"))
}

pub(crate) fn put_keys(out: &mut Vec<u8>, keys: &[PageKey]) {
    out.put_list(keys, |out, key| out.put(&key.0));
}

pub(crate) fn key(reader: &mut Reader<'_>) -> Result<PageKey> {
    Ok(PageKey(reader.array("page key")?))
}

pub(crate) fn keys(reader: &mut Reader<'_>) -> Result<Vec<PageKey>> {
    reader.list(MAX_KEYS, "keys", key)
}

pub(crate) fn put_entry(out: &mut Vec<u8>, entry: &Entry) {
    out.put_u64(entry.request);
    out.put_u32(entry.index);
}

pub(crate) fn entry(reader: &mut Reader<'_>) -> Result<Entry> {
    Ok(Entry { request: reader.u64("request of an entry")?, index: reader.u32("index of an entry")? })
}

pub(crate) fn put_crcs(out: &mut Vec<u8>, crcs: &[u32]) {
    out.put_list(crcs, |out, &crc| out.put_u32(crc));
}

pub(crate) fn crcs(reader: &mut Reader<'_>) -> Result<Vec<u32>> {
    reader.list(MAX_CHUNKS, "chunk CRCs", |r| r.u32("chunk CRC"))
}

/// Reads a `u8` that is 0 or 1.
pub(crate) fn flag(reader: &mut Reader<'_>, field: &'static str) -> Result<bool> {
    match reader.u8(field)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Invalid(field)),
    }
}

pub(crate) fn put_optional<T>(out: &mut Vec<u8>, item: Option<&T>, put: impl FnOnce(&mut Vec<u8>, &T)) {
    out.put_u8(u8::from(item.is_some()));
    if let Some(item) = item {
        put(out, item);
    }
}

pub(crate) fn optional<T>(
    reader: &mut Reader<'_>,
    item: impl FnOnce(&mut Reader<'_>) -> Result<T>,
) -> Result<Option<T>> {
    match reader.u8("presence flag")? {
        0 => Ok(None),
        1 => item(reader).map(Some),
        _ => Err(DecodeError::Invalid("presence flag")),
    }
}
