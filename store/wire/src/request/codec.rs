//! Encoding and decoding of requests.

use super::{Request, Reserved};
use crate::codes::{Hint, PinKind};
use crate::fields::{
    Delivery, PageRange, PartLocation, RdmaEndpoint, channels, crcs, entry, flag, key, keys, optional, put_channels,
    put_crcs, put_entry, put_keys, put_optional, put_range, range,
};
use crate::frame::{BODY_ROOM_BYTES, Frame, MAX_BODY_BYTES, Payload};
use crate::limits::{
    MAX_EXPLAINED, MAX_EXTENTS, MAX_INFO_BYTES, MAX_KEYS, MAX_NAME_BYTES, MAX_PUTS, MAX_RDMA_CHANNELS,
};
use crate::messages::{REQUESTS, RequestKind};
use crate::{PROTOCOL_VERSION, VERSION_COPIES, VERSION_EXTENTS, VERSION_SHARED_MEMORY_PUTS, VERSION_TOKEN_IDS};
use larder_format::codec::{Put, Reader, Result};
use larder_format::{MAX_CHUNKS, MAX_PARTS, MAX_TOKEN_IDS, NamespaceDescriptor, PageKey};

/// Maximum body of a request of an unknown kind, in bytes. The node reads it to answer with an
/// error.
const UNKNOWN_BODY_BYTES: usize = 4 << 10;

impl Request {
    /// Returns `true` if a node under overload may refuse requests of this kind without reading the
    /// body.
    ///
    /// Requests that end work are never shed: they free what the node lacks. Neither are those of
    /// members and status, by which an installation finds its nodes.
    pub fn is_sheddable(kind: u8) -> bool {
        REQUESTS.iter().any(|message| message.kind == kind && message.sheddable)
    }

    /// Maximum body of a request of this kind, in bytes. A node refuses a longer one by its header.
    /// Of requests that are never shed the bound is tight, because a node admits them without
    /// regard to its memory.
    pub fn max_body_bytes(kind: u8) -> usize {
        const ENTRY_BYTES: usize = 12;
        // Length of a list or text, and the fields beside it.
        const FIELDS_BYTES: usize = 32;
        let Ok(kind) = RequestKind::decode(PROTOCOL_VERSION, kind) else { return UNKNOWN_BODY_BYTES };
        match kind {
            RequestKind::Members | RequestKind::Status | RequestKind::Ping => 0,
            RequestKind::Cancel | RequestKind::Abort => ENTRY_BYTES,
            RequestKind::RdmaProgress => 2 * ENTRY_BYTES,
            RequestKind::Follow | RequestKind::Suspect => size_of::<PageKey>(),
            RequestKind::Withdraw => FIELDS_BYTES + MAX_NAME_BYTES,
            RequestKind::Register => FIELDS_BYTES + MAX_NAME_BYTES + MAX_INFO_BYTES,
            RequestKind::Release => FIELDS_BYTES + ENTRY_BYTES * MAX_KEYS,
            RequestKind::Commit => FIELDS_BYTES + ENTRY_BYTES * MAX_PUTS,
            RequestKind::Forget => FIELDS_BYTES + size_of::<PageKey>() * MAX_KEYS,
            RequestKind::Explain => FIELDS_BYTES + size_of::<PageKey>() * MAX_EXPLAINED,
            RequestKind::Extents => FIELDS_BYTES + size_of::<PageKey>() * MAX_EXTENTS,
            RequestKind::Part => 2 * FIELDS_BYTES + size_of::<u32>() * MAX_CHUNKS,
            RequestKind::Hello | RequestKind::RdmaChannels | RequestKind::GrantParts => MAX_NAME_BYTES << 6,
            RequestKind::Locate
            | RequestKind::Get
            | RequestKind::GetRanges
            | RequestKind::Reserve
            | RequestKind::Warm
            | RequestKind::Compare
            | RequestKind::Pin
            | RequestKind::Pins
            | RequestKind::Hint
            | RequestKind::Lookup => MAX_BODY_BYTES,
        }
    }

    /// A frame of this request for protocol version `version`, which must have this kind of
    /// message.
    pub fn frame(&self, version: u16, request: u64, deadline_ms: u32, payload: Option<Payload>) -> Frame {
        let kind = self.kind();
        debug_assert!(kind.since_version() <= version, "version {version} has no {kind:?}");
        Frame::new(kind as u8, request, deadline_ms, &self.encode(version), payload).for_version(version)
    }

    fn encode(&self, version: u16) -> Vec<u8> {
        let mut out = Vec::with_capacity(BODY_ROOM_BYTES);
        match self {
            Request::Hello { version_min, version_max, name, namespace } => {
                out.put_u16(*version_min);
                out.put_u16(*version_max);
                out.put_string(name);
                put_optional(&mut out, namespace.as_ref(), |out, namespace| namespace.encode(out));
            }
            Request::Locate(keys)
            | Request::Warm(keys)
            | Request::Forget(keys)
            | Request::Pins(keys)
            | Request::Explain(keys)
            | Request::Extents(keys) => put_keys(&mut out, keys),
            Request::Get { keys, by } => {
                put_keys(&mut out, keys);
                by.put(&mut out);
            }
            Request::GetRanges { ranges, by } => {
                out.put_list(ranges, |out, range| {
                    out.put(&range.key.0);
                    put_range(out, &range.bytes);
                });
                by.put(&mut out);
            }
            Request::Lookup { keys, hold_ms, load_l3 } => {
                put_keys(&mut out, keys);
                out.put_u32(*hold_ms);
                if version >= VERSION_EXTENTS {
                    out.put_u8(u8::from(*load_l3));
                }
            }
            Request::Release(entries) | Request::Commit(entries) => out.put_list(entries, put_entry),
            Request::Reserve(pages) => out.put_list(pages, |out, page| page.encode(version, out)),
            Request::Part { put, part, crcs, bytes } => {
                put_entry(&mut out, put);
                out.put_u32(*part);
                put_crcs(&mut out, crcs);
                if version >= VERSION_SHARED_MEMORY_PUTS {
                    bytes.put(&mut out);
                }
            }
            Request::Abort(put) => put_entry(&mut out, put),
            Request::Follow(key) | Request::Suspect(key) => out.put(&key.0),
            Request::Register { name, ttl_ms, info } => {
                out.put_string(name);
                out.put_u32(*ttl_ms);
                out.put_string(info);
            }
            Request::Withdraw(name) => out.put_string(name),
            Request::Members | Request::Status | Request::Ping => {}
            Request::Cancel(request) => out.put_u64(*request),
            Request::Compare { key, crcs } => {
                out.put(&key.0);
                put_crcs(&mut out, crcs);
            }
            Request::Pin { keys, kind, ttl_ms } => {
                put_keys(&mut out, keys);
                out.put_u8(kind.code());
                out.put_u64(*ttl_ms);
            }
            Request::RdmaChannels { closed, offered } => {
                put_channels(&mut out, closed);
                out.put_list(offered, |out, endpoint| endpoint.put(out));
            }
            Request::GrantParts { reserve, channels } => {
                out.put_u64(*reserve);
                put_channels(&mut out, channels);
            }
            Request::RdmaProgress { entry, part, bytes } => {
                put_entry(&mut out, entry);
                put_optional(&mut out, part.as_ref(), |out, part| out.put_u32(*part));
                out.put_u32(*bytes);
            }
            Request::Hint { keys, generated, hint, retain_ms } => {
                put_keys(&mut out, keys);
                put_optional(&mut out, generated.as_ref(), |out, tokens| out.put_u32(*tokens));
                out.put_u8(hint.code());
                out.put_u64(*retain_ms);
            }
        }
        out
    }

    /// Decodes the body of a message of kind `kind` in protocol version `version`.
    ///
    /// # Errors
    /// The version lacks this kind, a field is invalid or above its limit, or bytes are missing or
    /// left over.
    pub fn decode(version: u16, kind: u8, body: &[u8]) -> Result<Self> {
        let mut r = Reader::new(body);
        let message = match RequestKind::decode(version, kind)? {
            RequestKind::Hello => Request::Hello {
                version_min: r.u16("oldest version")?,
                version_max: r.u16("newest version")?,
                name: r.string(MAX_NAME_BYTES, "client name")?,
                namespace: optional(&mut r, NamespaceDescriptor::decode)?,
            },
            RequestKind::Locate => Request::Locate(keys(&mut r)?),
            RequestKind::Get => Request::Get { keys: keys(&mut r)?, by: Delivery::read(&mut r)? },
            RequestKind::GetRanges => Request::GetRanges {
                ranges: r.list(MAX_KEYS, "ranges", |r| Ok(PageRange { key: key(r)?, bytes: range(r)? }))?,
                by: Delivery::read(&mut r)?,
            },
            RequestKind::Lookup => Request::Lookup {
                keys: keys(&mut r)?,
                hold_ms: r.u32("hold time")?,
                load_l3: match version {
                    VERSION_EXTENTS.. => flag(&mut r, "pages of L3 in the hold")?,
                    _ => true,
                },
            },
            RequestKind::Release => Request::Release(r.list(MAX_KEYS, "pages to release", entry)?),
            RequestKind::Reserve => {
                Request::Reserve(r.list(MAX_PUTS, "pages to reserve", |r| Reserved::decode(version, r))?)
            }
            RequestKind::Part => Request::Part {
                put: entry(&mut r)?,
                part: r.u32("part")?,
                crcs: crcs(&mut r)?,
                bytes: match version {
                    VERSION_SHARED_MEMORY_PUTS.. => PartLocation::read(&mut r)?,
                    _ => PartLocation::Inline,
                },
            },
            RequestKind::Commit => Request::Commit(r.list(MAX_PUTS, "puts to seal", entry)?),
            RequestKind::Abort => Request::Abort(entry(&mut r)?),
            RequestKind::Follow => Request::Follow(key(&mut r)?),
            RequestKind::Warm => Request::Warm(keys(&mut r)?),
            RequestKind::Forget => Request::Forget(keys(&mut r)?),
            RequestKind::Suspect => Request::Suspect(key(&mut r)?),
            RequestKind::Register => Request::Register {
                name: r.string(MAX_NAME_BYTES, "member name")?,
                ttl_ms: r.u32("time to live")?,
                info: r.string(MAX_INFO_BYTES, "member info")?,
            },
            RequestKind::Withdraw => Request::Withdraw(r.string(MAX_NAME_BYTES, "member name")?),
            RequestKind::Members => Request::Members,
            RequestKind::Status => Request::Status,
            RequestKind::Ping => Request::Ping,
            RequestKind::Cancel => Request::Cancel(r.u64("request number")?),
            RequestKind::Compare => Request::Compare { key: key(&mut r)?, crcs: crcs(&mut r)? },
            RequestKind::Pin => Request::Pin {
                keys: keys(&mut r)?,
                kind: PinKind::from_code(r.u8("pin kind")?)?,
                ttl_ms: r.u64("time to live")?,
            },
            RequestKind::Pins => Request::Pins(keys(&mut r)?),
            RequestKind::RdmaChannels => Request::RdmaChannels {
                closed: channels(&mut r)?,
                offered: r.list(MAX_RDMA_CHANNELS, "RDMA endpoints", RdmaEndpoint::read)?,
            },
            RequestKind::GrantParts => {
                Request::GrantParts { reserve: r.u64("reserve request")?, channels: channels(&mut r)? }
            }
            RequestKind::RdmaProgress => Request::RdmaProgress {
                entry: entry(&mut r)?,
                part: optional(&mut r, |r| r.u32("part"))?,
                bytes: r.u32("bytes moved")?,
            },
            RequestKind::Hint => Request::Hint {
                keys: keys(&mut r)?,
                generated: optional(&mut r, |r| r.u32("generated tokens"))?,
                hint: Hint::from_code(r.u8("hint")?)?,
                retain_ms: r.u64("time to retain")?,
            },
            RequestKind::Explain => Request::Explain(r.list(MAX_EXPLAINED, "keys", key)?),
            RequestKind::Extents => Request::Extents(r.list(MAX_EXTENTS, "keys", key)?),
        };
        r.finish()?;
        Ok(message)
    }
}

impl Reserved {
    fn encode(&self, version: u16, out: &mut Vec<u8>) {
        out.put(&self.key.0);
        out.put(&self.parent.0);
        out.put_u32(self.position);
        out.put_u64(self.ttl_ms);
        out.put_list(&self.part_bytes, |out, &bytes| out.put_u32(bytes));
        if version >= VERSION_COPIES {
            put_optional(out, self.copy_of.as_ref(), |out, &generation| out.put_u64(generation));
        }
        if version >= VERSION_TOKEN_IDS {
            out.put_list(&self.token_ids, |out, &token| out.put_u32(token));
        }
    }

    fn decode(version: u16, reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Reserved {
            key: key(reader)?,
            parent: key(reader)?,
            position: reader.u32("position")?,
            ttl_ms: reader.u64("time to live")?,
            part_bytes: reader.list(MAX_PARTS, "part table", |r| r.u32("part length"))?,
            copy_of: match version {
                VERSION_COPIES.. => optional(reader, |r| r.u64("generation of the copy"))?,
                _ => None,
            },
            token_ids: match version {
                VERSION_TOKEN_IDS.. => reader.list(MAX_TOKEN_IDS, "token ids", |r| r.u32("token id"))?,
                _ => Vec::new(),
            },
        })
    }
}

#[cfg(test)]
mod tests;
