//! Messages from clients to nodes. Their numbers, versions and limits are in `messages.rs`.

use crate::VERSION_SHARED_MEMORY_PUTS;
use crate::codes::PinKind;
use crate::fields::{
    Delivery, Entry, PageRange, PartLocation, RdmaEndpoint, channels, crcs, entry, key, keys, optional, put_channels,
    put_crcs, put_entry, put_keys, put_optional, put_range, range,
};
use crate::frame::{Frame, Payload};
use crate::limits::{MAX_INFO_BYTES, MAX_KEYS, MAX_NAME_BYTES, MAX_PUTS, MAX_RDMA_CHANNELS};
use crate::messages::{REQUESTS, RequestKind};
use larder_format::codec::{Put, Reader, Result};
use larder_format::{MAX_PARTS, NamespaceDescriptor, PageKey};

/// A page that a client wants to put. Part of [`Request::Reserve`]. The node reserves memory for
/// all of its parts at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// Key of the page in the connection's namespace.
    pub key: PageKey,
    /// Key of the preceding page in the sequence, [`PageKey::NONE`] for the first.
    pub parent: PageKey,
    /// Position in the sequence, in pages from 0.
    pub position: u32,
    /// Time to live from the commit on, in milliseconds. 0: the page does not expire.
    pub ttl_ms: u64,
    /// Length of each part, in bytes. They must be those of the namespace's geometry.
    pub part_bytes: Vec<u32>,
}

/// A message from a client to a node. An arrow names the response. Responses may arrive in another
/// order than the requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Handshake: the first frame of every connection. It fixes version and namespace →
    /// [`Response::Hello`](crate::Response::Hello).
    Hello {
        /// Oldest protocol version that the client speaks.
        version_min: u16,
        /// Newest protocol version that the client speaks.
        version_max: u16,
        /// Name of the client, for the node's log.
        name: String,
        /// Namespace of all pages on this connection. Administrative connections have none.
        namespace: Option<NamespaceDescriptor>,
    },
    /// Asks which tier holds each page, without loading or holding it →
    /// [`Response::Located`](crate::Response::Located).
    Locate(Vec<PageKey>),
    /// Reads whole pages → per page [`Response::Page`](crate::Response::Page) or
    /// [`Response::Miss`](crate::Response::Miss), in any order, then
    /// [`Response::End`](crate::Response::End).
    Get {
        /// Keys of the pages.
        keys: Vec<PageKey>,
        /// Preferred transport. The node sends inline what it cannot deliver so.
        by: Delivery,
    },
    /// Reads byte ranges of pages → per range [`Response::Range`](crate::Response::Range) or
    /// [`Response::Miss`](crate::Response::Miss), in any order, then
    /// [`Response::End`](crate::Response::End). A range that does not consist of whole chunks of
    /// the page is a miss.
    GetRanges {
        /// Ranges to read. Several may be of one page, and each gets its own response.
        ranges: Vec<PageRange>,
        /// Preferred transport, as in [`Request::Get`].
        by: Delivery,
    },
    /// Finds the longest servable prefix of a sequence, and holds its pages for a while so that the
    /// client can read them → [`Response::LookedUp`](crate::Response::LookedUp).
    Lookup {
        /// Keys from the first page of the sequence on.
        keys: Vec<PageKey>,
        /// Time to hold the pages, in milliseconds, at most [`MAX_HOLD_MS`](crate::MAX_HOLD_MS). 0:
        /// no hold.
        hold_ms: u32,
    },
    /// Ends holds of pages: those of a Lookup, and those of a Get that delivers pages in place or
    /// by RDMA. No response.
    Release(Vec<Entry>),
    /// Reserves memory for pages → [`Response::Reserved`](crate::Response::Reserved).
    ///
    /// This request's number names the puts. So the client can send parts, or abort, before it has
    /// the response. The node drops parts of pages that it did not grant.
    Reserve(Vec<Reserved>),
    /// Sends one part of a put. No response: a part that is refused or damaged makes the Commit
    /// incomplete.
    Part {
        /// The put.
        put: Entry,
        /// Index of the part.
        part: u32,
        /// CRC of each chunk of the part.
        crcs: Vec<u32>,
        /// Location of the part's bytes. Version 1 has inline parts only.
        bytes: PartLocation,
    },
    /// Seals puts, which makes their pages visible. One outcome per put →
    /// [`Response::Committed`](crate::Response::Committed).
    Commit(Vec<Entry>),
    /// Aborts a put and frees its memory. No response. Memory that the client may still write by
    /// RDMA is freed later.
    Abort(Entry),
    /// Reads a page while its writer still sends it; waits for the writer if there is none yet →
    /// [`Response::Part`](crate::Response::Part) per part, then
    /// [`Response::FollowEnd`](crate::Response::FollowEnd).
    Follow(PageKey),
    /// Loads pages from L3 into L2, for reads that come soon →
    /// [`Response::Count`](crate::Response::Count) of pages in L2.
    Warm(Vec<PageKey>),
    /// Deletes pages durably, from all tiers of this node →
    /// [`Response::Count`](crate::Response::Count) of pages that existed.
    Forget(Vec<PageKey>),
    /// Reports that a page failed its CRC at the reader. The node checks its copies →
    /// [`Response::Count`](crate::Response::Count) of copies dropped.
    Suspect(PageKey),
    /// Registers a member, or renews its lease → [`Response::Count`](crate::Response::Count).
    Register {
        /// Unique name of the member.
        name: String,
        /// Lease in milliseconds. The node forgets a member that does not renew in time.
        ttl_ms: u32,
        /// JSON description, opaque to the node.
        info: String,
    },
    /// Removes a member before its lease ends → [`Response::Count`](crate::Response::Count): 1 if
    /// it was registered, else 0.
    Withdraw(String),
    /// Lists all members whose lease has not ended →
    /// [`Response::Members`](crate::Response::Members).
    Members,
    /// Asks for the node's state → [`Response::Status`](crate::Response::Status).
    Status,
    /// Cancels the request with this number: ends its work, its holds and its open puts. No
    /// response. A client sends it when its caller stops waiting.
    Cancel(u64),
    /// Compares the node's copy of a page with chunk CRCs →
    /// [`Response::Committed`](crate::Response::Committed) with one outcome: already there, refused
    /// if the CRCs differ, incomplete if the node has no copy.
    Compare {
        /// Key of the page.
        key: PageKey,
        /// CRC of each chunk, part by part.
        crcs: Vec<u32>,
    },
    /// Pins pages in L2, or ends their pins → [`Response::Count`](crate::Response::Count) of pages
    /// pinned now. Without room for hard pins the node answers Busy and adds no pin.
    Pin {
        /// Keys of the pages.
        keys: Vec<PageKey>,
        /// New strength of the pins.
        kind: PinKind,
        /// Time to live in milliseconds: 1 to [`MAX_PIN_MS`](crate::MAX_PIN_MS). Unused for
        /// [`PinKind::None`].
        ttl_ms: u64,
    },
    /// Asks for the pins of pages, in the order of the keys →
    /// [`Response::Pins`](crate::Response::Pins).
    Pins(Vec<PageKey>),
    /// Reports closed RDMA channels and offers new ones →
    /// [`Response::RdmaChannels`](crate::Response::RdmaChannels).
    RdmaChannels {
        /// Numbers of channels that the client has closed.
        closed: Vec<u32>,
        /// The client's ends of new channels.
        offered: Vec<RdmaEndpoint>,
    },
    /// Asks for RDMA write access to the parts of granted puts →
    /// [`Response::PartGrants`](crate::Response::PartGrants) for parts without data so far. The
    /// node may grant fewer.
    GrantParts {
        /// Number of the Reserve, which must have come before.
        reserve: u64,
        /// Channels to use in turn.
        channels: Vec<u32>,
    },
}

impl Request {
    /// Returns `true` if a node under overload may refuse requests of this kind without reading the
    /// body.
    ///
    /// Requests that end work are never shed: they free what the node lacks. Neither are those of
    /// members and status, by which an installation finds its nodes.
    pub fn is_sheddable(kind: u8) -> bool {
        REQUESTS.iter().any(|message| message.kind == kind && message.sheddable)
    }

    /// A frame of this request for protocol version `version`, which must have this kind of
    /// message.
    pub fn frame(&self, version: u16, request: u64, deadline_ms: u32, payload: Option<Payload>) -> Frame {
        let kind = self.kind();
        debug_assert!(kind.since_version() <= version, "version {version} has no {kind:?}");
        Frame::new(kind as u8, request, deadline_ms, &self.encode(version), payload).for_version(version)
    }

    fn encode(&self, version: u16) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Request::Hello { version_min, version_max, name, namespace } => {
                out.put_u16(*version_min);
                out.put_u16(*version_max);
                out.put_string(name);
                put_optional(&mut out, namespace.as_ref(), |out, namespace| namespace.encode(out));
            }
            Request::Locate(keys) | Request::Warm(keys) | Request::Forget(keys) | Request::Pins(keys) => {
                put_keys(&mut out, keys);
            }
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
            Request::Lookup { keys, hold_ms } => {
                put_keys(&mut out, keys);
                out.put_u32(*hold_ms);
            }
            Request::Release(entries) | Request::Commit(entries) => out.put_list(entries, put_entry),
            Request::Reserve(pages) => out.put_list(pages, |out, page| page.encode(out)),
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
            Request::Members | Request::Status => {}
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
            RequestKind::Lookup => Request::Lookup { keys: keys(&mut r)?, hold_ms: r.u32("hold time")? },
            RequestKind::Release => Request::Release(r.list(MAX_KEYS, "pages to release", entry)?),
            RequestKind::Reserve => Request::Reserve(r.list(MAX_PUTS, "pages to reserve", Reserved::decode)?),
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
        };
        r.finish()?;
        Ok(message)
    }
}

impl Reserved {
    fn encode(&self, out: &mut Vec<u8>) {
        out.put(&self.key.0);
        out.put(&self.parent.0);
        out.put_u32(self.position);
        out.put_u64(self.ttl_ms);
        out.put_list(&self.part_bytes, |out, &bytes| out.put_u32(bytes));
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Reserved {
            key: key(reader)?,
            parent: key(reader)?,
            position: reader.u32("position")?,
            ttl_ms: reader.u64("time to live")?,
            part_bytes: reader.list(MAX_PARTS, "part table", |r| r.u32("part length"))?,
        })
    }
}

#[cfg(test)]
mod tests;
