//! Batches of KV events in the encoding of vLLM and SGLang.
//!
//! A batch is a msgpack array: seconds since 1970, the events, and a rank, which is 0. An event is
//! a map with its name under `type`. Names and fields are those of `distributed/kv_events.py` in
//! vLLM from 0.26, and of `srt/disaggregation/kv_events.py` in SGLang 0.5.23. The field `namespace`
//! is Larder's own; indexers skip fields that they do not know.
//!
//! The encoding of msgpack: <https://github.com/msgpack/msgpack/blob/master/spec.md>.

use crate::event_limits::{BATCH_EVENTS, BATCH_EVENTS_BYTES, EVENT_BYTES_MAX, TOKEN_ID_BYTES_MAX};
use crate::page_changes::{ChangeKind, Medium, PageChange};
use crate::token_ids::TokenIds;

/// Name of a tier, as SGLang has it.
fn medium(change: &PageChange) -> &'static str {
    match change.medium {
        Medium::L2 => "CPU_PINNED",
        Medium::L3 => "DISK",
    }
}

const NIL: u8 = 0xc0;
const INT_64: u8 = 0xd3;
const FLOAT_64: u8 = 0xcb;

/// Size of a batch that changes are added to.
#[derive(Default)]
pub(super) struct BatchSize {
    events: usize,
    bytes: usize,
}

impl BatchSize {
    /// Adds a change, unless the batch is full. Returns `true` if it was added.
    pub(super) fn add(&mut self, change: &PageChange) -> bool {
        let has_room = !self.is_full();
        if has_room {
            self.events += 1;
            self.bytes += bytes_max(change);
        }
        has_room
    }

    pub(super) fn is_full(&self) -> bool {
        self.events >= BATCH_EVENTS || self.bytes >= BATCH_EVENTS_BYTES
    }
}

/// Number of the first changes that fit into one batch: at least one, if there are any.
pub(super) fn fitting(changes: &[PageChange]) -> usize {
    let mut size = BatchSize::default();
    changes.iter().take_while(|change| size.add(change)).count()
}

/// Upper bound of the encoding of an event, in bytes.
fn bytes_max(change: &PageChange) -> usize {
    EVENT_BYTES_MAX + token_ids(change).len() * TOKEN_ID_BYTES_MAX
}

fn token_ids(change: &PageChange) -> &[u32] {
    match &change.kind {
        ChangeKind::Stored { token_ids, .. } => token_ids.as_deref().map_or(&[][..], TokenIds::as_slice),
        ChangeKind::Removed => &[],
    }
}

/// Encodes a batch with an event per change. `is_cleared` puts the end of all pages before them.
pub(super) fn batch(unix_ms: u64, is_cleared: bool, changes: &[PageChange]) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + changes.iter().map(bytes_max).sum::<usize>());
    array(&mut out, 3);
    out.push(FLOAT_64);
    out.extend_from_slice(&(unix_ms as f64 / 1e3).to_be_bytes());
    array(&mut out, changes.len() + usize::from(is_cleared));
    if is_cleared {
        map(&mut out, 1);
        text_field(&mut out, "type", "AllBlocksCleared");
    }
    changes.iter().for_each(|change| event(&mut out, change));
    out.push(0);
    out.shrink_to_fit();
    out
}

fn event(out: &mut Vec<u8>, change: &PageChange) {
    match &change.kind {
        ChangeKind::Stored { parent, .. } => {
            map(out, 9);
            text_field(out, "type", "BlockStored");
            hash_field(out, change.hash);
            text(out, "parent_block_hash");
            match parent {
                Some(parent) => integer(out, *parent),
                None => out.push(NIL),
            }
            let ids = token_ids(change);
            text(out, "token_ids");
            array(out, ids.len());
            ids.iter().for_each(|&id| unsigned(out, id));
            text(out, "block_size");
            unsigned(out, ids.len() as u32);
            text(out, "lora_id");
            out.push(NIL);
            text_field(out, "medium", medium(change));
            text(out, "lora_name");
            out.push(NIL);
        }
        ChangeKind::Removed => {
            map(out, 4);
            text_field(out, "type", "BlockRemoved");
            hash_field(out, change.hash);
            text_field(out, "medium", medium(change));
        }
    }
    text_field(out, "namespace", &change.namespace.to_string());
}

fn hash_field(out: &mut Vec<u8>, hash: i64) {
    text(out, "block_hashes");
    array(out, 1);
    integer(out, hash);
}

fn text_field(out: &mut Vec<u8>, name: &str, value: &str) {
    text(out, name);
    text(out, value);
}

/// Begins a map of at most 15 fields.
fn map(out: &mut Vec<u8>, fields: u8) {
    out.push(0x80 | fields);
}

/// Begins an array of at most 65,535 elements.
fn array(out: &mut Vec<u8>, elements: usize) {
    if elements < 16 {
        out.push(0x90 | elements as u8);
    } else {
        out.push(0xdc);
        out.extend_from_slice(&(elements as u16).to_be_bytes());
    }
}

/// Appends a text of at most 255 bytes.
fn text(out: &mut Vec<u8>, text: &str) {
    let length = text.len() as u8;
    if length < 32 {
        out.push(0xa0 | length);
    } else {
        out.extend_from_slice(&[0xd9, length]);
    }
    out.extend_from_slice(text.as_bytes());
}

/// Appends a number in as few bytes as possible.
fn unsigned(out: &mut Vec<u8>, value: u32) {
    match value {
        0..0x80 => out.push(value as u8),
        0x80..0x100 => out.extend_from_slice(&[0xcc, value as u8]),
        0x100..0x1_0000 => {
            out.push(0xcd);
            out.extend_from_slice(&(value as u16).to_be_bytes());
        }
        _ => {
            out.push(0xce);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}

/// Appends a number in 8 bytes, also where fewer would do.
fn integer(out: &mut Vec<u8>, value: i64) {
    out.push(INT_64);
    out.extend_from_slice(&value.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event_limits::BATCH_BYTES_MAX;
    use crate::token_ids::test_memory;
    use larder_format::{MAX_TOKEN_IDS, NamespaceId};

    fn change(kind: ChangeKind) -> PageChange {
        let hash = 0x8102_0304_0506_0708_u64.cast_signed();
        PageChange { namespace: NamespaceId([0xab; 32]), hash, kind, medium: Medium::L2 }
    }

    fn stored(parent: Option<i64>, token_ids: Vec<u32>) -> PageChange {
        let token_ids = test_memory().keep(&NamespaceId([7; 32]), token_ids);
        change(ChangeKind::Stored { parent, token_ids })
    }

    /// Bytes that msgspec, which vLLM and SGLang use, has for the same events.
    #[test]
    fn batch_has_the_bytes_of_msgspec() {
        let stored = stored(Some(0x9090_9090_9090_9090_u64.cast_signed()), Vec::new());
        let hash = b"\xacblock_hashes\x91\xd3\x81\x02\x03\x04\x05\x06\x07\x08".as_slice();
        let namespace = [b"\xa9namespace\xd9\x40".to_vec(), b"ab".repeat(32)].concat();
        let expected = [
            b"\x93\xcb\x41\xd9\x54\xfc\x40\x20\x00\x00\x93\x81\xa4type\xb0AllBlocksCleared".as_slice(),
            b"\x89\xa4type\xabBlockStored",
            hash,
            b"\xb1parent_block_hash\xd3\x90\x90\x90\x90\x90\x90\x90\x90\xa9token_ids\x90\xaablock_size\x00",
            b"\xa7lora_id\xc0\xa6medium\xaaCPU_PINNED\xa9lora_name\xc0",
            &namespace[..],
            b"\x84\xa4type\xacBlockRemoved",
            hash,
            b"\xa6medium\xaaCPU_PINNED",
            &namespace[..],
            b"\x00",
        ];
        let encoded = batch(1_700_000_000_500, true, &[stored, change(ChangeKind::Removed)]);
        assert_eq!(encoded, expected.concat());
    }

    #[test]
    fn token_ids_have_the_shortest_form_and_give_the_block_size() {
        let encoded = batch(0, false, &[stored(None, vec![0x7f, 0x80, 0xff, 0x100, 0xffff, 0x1_0000, u32::MAX])]);
        let field = [
            b"\xa9token_ids\x97\x7f\xcc\x80\xcc\xff\xcd\x01\x00\xcd\xff\xff".as_slice(),
            b"\xce\x00\x01\x00\x00\xce\xff\xff\xff\xff\xaablock_size\x07",
        ]
        .concat();
        assert!(encoded.windows(field.len()).any(|bytes| bytes == field));
        let encoded = batch(0, false, &[stored(None, vec![1; 256])]);
        let field = [b"\xa9token_ids\xdc\x01\x00".as_slice(), &[1; 256], b"\xaablock_size\xcd\x01\x00"].concat();
        assert!(encoded.windows(field.len()).any(|bytes| bytes == field));
    }

    #[test]
    fn pages_on_l3_have_the_medium_disk() {
        let removed = PageChange { medium: Medium::L3, ..change(ChangeKind::Removed) };
        let encoded = batch(0, false, &[removed, PageChange { medium: Medium::L3, ..stored(None, vec![7]) }]);
        let field = b"\xa6medium\xa4DISK";
        assert_eq!(encoded.windows(field.len()).filter(|bytes| bytes == field).count(), 2);
    }

    #[test]
    fn first_page_has_no_parent() {
        let encoded = batch(0, false, &[stored(None, Vec::new())]);
        let field = b"parent_block_hash\xc0";
        assert!(encoded.windows(field.len()).any(|bytes| bytes == field));
    }

    #[test]
    fn largest_batch_keeps_within_its_bound() {
        let changes = vec![stored(Some(1), Vec::new()); BATCH_EVENTS + 1];
        assert_eq!(fitting(&changes), BATCH_EVENTS);
        let encoded = batch(1, true, &changes[..BATCH_EVENTS]);
        assert_eq!(encoded[10..13], [0xdc, 1, 1], "257 events");
        assert!(encoded.len() <= BATCH_BYTES_MAX, "{}", encoded.len());
        let one = batch(1, false, &changes[..1]);
        assert!(one.len() - batch(1, false, &[]).len() <= EVENT_BYTES_MAX);
        assert_eq!(fitting(&[]), 0);
    }

    #[test]
    fn token_ids_leave_room_for_fewer_events() {
        for count in [1, 16, 100, MAX_TOKEN_IDS] {
            let changes = vec![stored(Some(1), vec![u32::MAX; count]); BATCH_EVENTS];
            let fitting = fitting(&changes);
            assert!((1..BATCH_EVENTS).contains(&fitting), "{fitting}");
            let encoded = batch(1, true, &changes[..fitting]);
            assert!(encoded.len() <= BATCH_BYTES_MAX, "{} bytes with {count} token ids", encoded.len());
            let more = batch(1, true, &changes[..=fitting]);
            assert!(more.len() > encoded.len() && bytes_max(&changes[0]) >= more.len() - encoded.len());
        }
    }
}
