//! Structures and codes of the header. All of them are plain data.

use std::ffi::c_char;

/// Result of a call.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LarderStatus {
    /// The call was made. Its outputs tell what the store did.
    Ok = 0,
    /// An argument is null, misaligned, out of range or not UTF-8.
    InvalidArgument = 1,
    /// The handle is not open.
    InvalidHandle = 2,
    /// The memory lies in a buffer of the process that forked this one.
    Forked = 3,
    /// Too many handles are open, or the machine refuses threads.
    Exhausted = 4,
    /// A defect of the library. Please report it, with the text of larder_error.
    Internal = 5,
}

/// Tier of a store node that has a page. All but LARDER_TIER_MISS are hits.
#[repr(u8)]
#[derive(Clone, Copy)]
pub enum LarderTier {
    /// The page does not exist, or its node did not answer in time.
    Miss = 0,
    /// DRAM of a node.
    L2 = 2,
    /// NVMe of a node.
    L3 = 3,
}

/// Result of a put. A page that is not stored is a later miss.
#[repr(u8)]
#[derive(Clone, Copy)]
pub enum LarderPutOutcome {
    /// No node was connected, or its answer did not arrive in time. The node may hold the page.
    Lost = 0,
    /// The node holds the page.
    Stored = 1,
    /// The node already had the page with the same bytes.
    AlreadyThere = 2,
    /// The node has other bytes under this key, and keeps them.
    Refused = 3,
    /// The page was forgotten meanwhile.
    Forgotten = 4,
    /// Another client is putting this key now.
    InProgress = 5,
    /// The node has no room now.
    Busy = 6,
    /// An operator has retired the namespace. Puts are refused until the rollback.
    Retired = 7,
}

/// Result of a follow. Only LARDER_FOLLOW_END_SEALED allows the use of the memory's content.
#[repr(u8)]
#[derive(Clone, Copy)]
pub enum LarderFollowEnd {
    /// No put began or ended in time, or no node is connected.
    Miss = 0,
    /// The whole page has arrived and is verified.
    Sealed = 1,
    /// The writer aborted its put, or died.
    Aborted = 2,
    /// The node has no memory for another follow now. It has some again when another one ends. A
    /// caller that cannot wait treats it as a miss.
    Busy = 3,
}

/// Kind of a pin.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum LarderPinKind {
    /// Ends the pins.
    None = 0,
    /// Evicted only when nothing else is left.
    Soft = 1,
    /// Never evicted before its time.
    Hard = 2,
}

/// Kind of a hint.
#[repr(u32)]
#[derive(Clone, Copy)]
pub enum LarderHintKind {
    /// No advice.
    None = 0,
    /// The pages return within `retain_us`.
    Retain = 1,
    /// The pages are not expected to return.
    Demote = 2,
    /// The session has ended.
    SessionEnded = 3,
}

/// UTF-8 text of `size` bytes. It needs no NUL at the end. Null is allowed if `size` is 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderText {
    pub data: *const c_char,
    pub size: usize,
}

/// Key of a page.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderKey {
    pub bytes: [u8; 32],
}

/// Memory of a page, or of a part of one.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderMemory {
    pub data: *mut u8,
    /// Length in bytes. It must be exactly that of the page or part.
    pub size: usize,
}

/// Layout of the pages of Larder's own engines.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderKvLayout {
    /// "float32", "float16" or "bfloat16".
    pub dtype: LarderText,
    pub layers: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub page_tokens: u32,
    pub layers_per_part: u32,
    pub head_groups: u32,
    /// Fingerprint of the weights that these engines compute.
    pub weights: [u8; 32],
}

/// Pages that may be shared. Clients with equal namespaces share pages; no others do.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderNamespace {
    /// Length of a page in bytes, at most 16 MiB. 0 if `kv` is set.
    pub page_bytes: u32,
    /// Number of equal parts of a page, 1 to 128. 0 if `kv` is set.
    pub parts: u32,
    /// Any bytes. They must differ whenever the bytes of a page would mean something else: weights,
    /// dtype, layout, tokens per page, rank. Empty if `kv` is set.
    pub identity: LarderText,
    /// Name of the model, for people only. At most 256 bytes.
    pub model: LarderText,
    /// Owner of the pages. At most 256 bytes; empty means "default".
    pub tenant: LarderText,
    /// Null for pages whose layout only the caller knows.
    pub kv: *const LarderKvLayout,
}

/// Settings of a client. Zero means the default, except for `url`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderOptions {
    /// "larder://host:port[,host:port...]/[?transport=auto|tcp|rdma|shm]".
    pub url: LarderText,
    /// Name of this client in the nodes' logs, at most 256 bytes. Default: "c".
    pub name: LarderText,
    /// Shared memory for larder_buffer_open and for pages on their way out, in bytes. Default:
    /// 256 MiB. It is address space until it is used, except with RDMA, which pins it.
    pub memory_bytes: u64,
    /// Limit for each step of connecting. Default: 1 s.
    pub connect_timeout_us: u64,
}

/// Settings of larder_put_from. All zero is the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderPutOptions {
    /// If true, the pages follow each other in one sequence, and the first has index `position`.
    /// Eviction prefers pages that none follow.
    pub in_sequence: bool,
    pub position: u32,
    /// Key of the page before the first one in the sequence, or null.
    pub parent: *const LarderKey,
    /// Time after which the pages become misses. 0: never.
    pub ttl_us: u64,
    /// Retries at a busy node, each after the pause that it suggests: up to 10 s, and within the
    /// timeout.
    pub busy_retries: u32,
    /// Number of token ids of each page, at most 256. 0: they are unknown.
    pub page_token_ids: u32,
    /// Ids of the tokens of all pages, one page after the other, for indexers of KV events.
    pub token_ids: *const u32,
}

/// Advice about the further use of pages.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderHint {
    /// One of larder_hint_kind.
    pub kind: u32,
    /// If true, a generation of `generated_tokens` tokens has ended, which used the pages.
    pub has_generated: bool,
    pub generated_tokens: u32,
    /// Time within which the pages return, for LARDER_HINT_KIND_RETAIN only.
    pub retain_us: u64,
}

/// Facts about an open client.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderClientInfo {
    pub page_bytes: usize,
    pub parts: usize,
    /// Length of the first part. Opaque pages have equal parts.
    pub part_bytes: usize,
    /// Nodes that are connected now.
    pub nodes_connected: usize,
    /// Identity of the namespace.
    pub namespace_id: [u8; 32],
}

/// Counters of a client since it was opened, or since the fork.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderStats {
    /// Pages that were read and verified. Parts that were read on their own count one by one.
    pub get_hits: u64,
    /// Pages that were requested and not read, for any reason. Parts count as above.
    pub get_misses: u64,
    /// Misses because a node was busy. Included in `get_misses`.
    pub gets_busy: u64,
    /// Pages that did not match their checksums or identity. They count as misses.
    pub corrupt: u64,
    /// Pages that a node stored. Pages that a node already had are not among them.
    pub puts: u64,
    /// Pages that could not be put, because a node was unreachable, too slow or busy.
    pub puts_lost: u64,
    /// Pages that a busy node refused. Included in `puts_lost`.
    pub puts_busy: u64,
}

/// Longest prefix of some keys that the store can serve.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderLookup {
    /// Length of the prefix in pages.
    pub pages: usize,
    /// Leading pages that are in L2 and held there.
    pub held: usize,
    /// True if every node that owns one of the keys answered in time. Otherwise an empty prefix
    /// does not mean that the pages do not exist.
    pub answered: bool,
    /// Longest pause that a busy node suggests, or 0.
    pub retry_after_us: u64,
    /// Keeps the pages readable until larder_lease_release, or until the requested time is over.
    /// Release it in either case.
    pub lease: LarderLease,
}

/// Result of larder_pin.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderPinned {
    /// Pages that are pinned now, or whose pins have ended.
    pub pages: usize,
    /// True if a node refused. Its reason is then the text of larder_error.
    pub refused: bool,
    /// True if every node that the call needs has answered.
    pub complete: bool,
}

/// Result of larder_forget.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LarderForgotten {
    /// Pages that existed.
    pub pages: usize,
    /// True if every node of the URL has durably forgotten the pages. Otherwise try again.
    pub complete: bool,
}

/// Handle of a client.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LarderClient {
    pub id: u64,
}

/// Handle of a buffer.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LarderBuffer {
    pub id: u64,
}

/// Handle of a lease. The zero handle is a lease that holds nothing.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LarderLease {
    pub id: u64,
}
