//! Messages from clients to nodes. Their numbers, versions and limits are in `messages.rs`, their
//! encoding is in `codec`.

mod codec;

use crate::codes::{Hint, PinKind};
use crate::fields::{Delivery, Entry, PageRange, PartLocation, RdmaEndpoint};
use larder_format::{NamespaceDescriptor, PageKey};

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
    /// Generation of the page of this node that the bytes are a copy of, 0 if unknown. The node
    /// refuses the put if the page was forgotten since that generation, or if it is unknown.
    /// `None`: the writer has computed the bytes, which needs no check.
    pub copy_of: Option<u64>,
    /// Ids of the page's tokens, in order, for indexers of KV events: at most
    /// [`MAX_TOKEN_IDS`](larder_format::MAX_TOKEN_IDS), and no more than the page has. Empty:
    /// unknown.
    pub token_ids: Vec<u32>,
}

impl Reserved {
    /// The first page of a sequence, which the writer has computed. It does not expire, and its
    /// token ids are unknown.
    pub fn first(key: PageKey, part_bytes: Vec<u32>) -> Reserved {
        Reserved {
            key,
            parent: PageKey::NONE,
            position: 0,
            ttl_ms: 0,
            part_bytes,
            copy_of: None,
            token_ids: Vec::new(),
        }
    }
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
        /// The hold includes pages on L3, which the node loads. `false`: only pages in L2 are held,
        /// and those on L3 stay there for [`Request::Extents`]. Versions before 10 have only
        /// `true`.
        load_l3: bool,
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
    /// Asks for a sign of life → [`Response::Pong`](crate::Response::Pong). Its cost does not
    /// depend on the state of the node.
    Ping,
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
    /// Reports the progress of a long transfer by RDMA, which the node cannot see. No response. A
    /// client sends it a few times per second.
    RdmaProgress {
        /// The put that is written, or the granted page that is read.
        entry: Entry,
        /// Index of the part that is written. `None`: the page is read.
        part: Option<u32>,
        /// Bytes that have moved since the transfer began.
        bytes: u32,
    },
    /// Reports the end of a generation, or gives advice about the further use of pages. A node
    /// ranks the pages by it → [`Response::Count`](crate::Response::Count) of pages that are in L2.
    Hint {
        /// Keys of one sequence, in its order.
        keys: Vec<PageKey>,
        /// Number of generated tokens, if the generation that used the pages has ended.
        generated: Option<u32>,
        /// Advice.
        hint: Hint,
        /// Time to retain the pages, in milliseconds. Unused for other advice.
        retain_ms: u64,
    },
    /// Asks why the node cannot serve pages, in the order of the keys. It counts neither hits nor
    /// misses → [`Response::Explained`](crate::Response::Explained).
    Explain(Vec<PageKey>),
    /// Asks for the extents of pages on L3, so that a client on the node's machine reads them by
    /// itself. The node holds them until the client cancels this request, but a few seconds at most
    /// → [`Response::Extents`](crate::Response::Extents). Only connections with an arena session
    /// get extents.
    Extents(Vec<PageKey>),
}
