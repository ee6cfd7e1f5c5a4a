//! Clients of a node's ZeroMQ sockets, and a decoder of the KV events that they receive.
//!
//! The sockets are those of the crate `zeromq`, so that a mistake in `larder-zmtp` shows.

use crate::PATIENCE;
use std::net::SocketAddr;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage, ZmqResult};

/// Number that ends a replay: -1.
const END_OF_REPLAY: u64 = u64::MAX;

/// Connects a subscriber. A subscription has no answer: the node may take it later.
pub async fn subscriber(address: SocketAddr, prefix: &str) -> SubSocket {
    let mut socket = SubSocket::new();
    in_time(socket.connect(&format!("tcp://{address}"))).await;
    in_time(socket.subscribe(prefix)).await;
    socket
}

/// Connects a client to the socket for replays.
pub async fn replay_client(address: SocketAddr) -> DealerSocket {
    let mut socket = DealerSocket::new();
    in_time(socket.connect(&format!("tcp://{address}"))).await;
    socket
}

/// Receives a message of three frames: the topic or an empty frame, the number of a batch, and the
/// batch. Dropping the future loses no message.
///
/// # Panics
/// If none arrives in time, or the message has another form.
pub async fn batch(socket: &mut impl SocketRecv) -> (Vec<u8>, u64, Vec<u8>) {
    let frames = in_time(socket.recv()).await.into_vec();
    let [first, number, batch] = frames.as_slice() else { panic!("not three frames: {frames:?}") };
    let number = u64::from_be_bytes(number[..].try_into().expect("a number of 8 bytes"));
    (first.to_vec(), number, batch.to_vec())
}

/// Asks for all batches from a number on. Returns those up to the end of the replay.
///
/// # Panics
/// If the replay does not end in time, or has another form.
pub async fn replay(socket: &mut DealerSocket, number: u64) -> Vec<(u64, Vec<u8>)> {
    let mut request = ZmqMessage::from(Vec::<u8>::new());
    request.push_back(number.to_be_bytes().to_vec().into());
    in_time(socket.send(request)).await;
    let mut batches = Vec::new();
    loop {
        let (delimiter, number, events) = batch(socket).await;
        assert!(delimiter.is_empty(), "{delimiter:?}");
        if number == END_OF_REPLAY {
            assert!(events.is_empty(), "{events:?}");
            return batches;
        }
        batches.push((number, events));
    }
}

async fn in_time<T>(step: impl Future<Output = ZmqResult<T>>) -> T {
    let done = tokio::time::timeout(PATIENCE, step).await.expect("the node answers in time");
    done.expect("the connection works")
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvent {
    AllBlocksCleared,
    BlockStored { hash: i64, parent: Option<i64>, token_ids: Vec<u32>, namespace: String, is_on_l3: bool },
    BlockRemoved { hash: i64, namespace: String, is_on_l3: bool },
}

/// Decodes a batch of events.
///
/// # Panics
/// If the bytes are not a batch as `docs/attach/kv-events.md` has it.
pub fn decode_events(batch: &[u8]) -> Vec<KvEvent> {
    let mut rest = batch;
    let Value::Array(batch) = decode(&mut rest) else { panic!("a batch is an array: {batch:?}") };
    assert!(rest.is_empty(), "bytes behind the batch: {rest:?}");
    let [Value::Float(seconds), Value::Array(events), Value::Integer(0)] = batch.as_slice() else {
        panic!("not time, events and rank: {batch:?}")
    };
    assert!(*seconds > 1.7e9, "{seconds} is long ago");
    events.iter().map(event).collect()
}

fn event(event: &Value) -> KvEvent {
    let Value::Map(fields) = event else { panic!("an event is a map: {event:?}") };
    let field = |name: &str| {
        let found = fields.iter().find(|(field, _)| field == name);
        &found.unwrap_or_else(|| panic!("no field {name}: {fields:?}")).1
    };
    let text = |name: &str| match field(name) {
        Value::Text(text) => text.clone(),
        other => panic!("{name} is no text: {other:?}"),
    };
    let kind = text("type");
    if kind == "AllBlocksCleared" {
        return KvEvent::AllBlocksCleared;
    }
    let medium = text("medium");
    assert!(["CPU_PINNED", "DISK"].contains(&medium.as_str()), "{medium}");
    let is_on_l3 = medium == "DISK";
    let Value::Array(hashes) = field("block_hashes") else { panic!("{fields:?}") };
    let [Value::Integer(hash)] = hashes.as_slice() else { panic!("not one hash: {hashes:?}") };
    let (hash, namespace) = (*hash, text("namespace"));
    if kind == "BlockRemoved" {
        return KvEvent::BlockRemoved { hash, namespace, is_on_l3 };
    }
    assert_eq!(kind, "BlockStored");
    let parent = match field("parent_block_hash") {
        Value::Integer(parent) => Some(*parent),
        Value::Nil => None,
        other => panic!("no hash: {other:?}"),
    };
    let Value::Array(token_ids) = field("token_ids") else { panic!("{fields:?}") };
    let id = |value: &Value| match value {
        Value::Integer(id) => u32::try_from(*id).expect("a token id"),
        other => panic!("no token id: {other:?}"),
    };
    let token_ids: Vec<u32> = token_ids.iter().map(id).collect();
    assert!(matches!(field("block_size"), Value::Integer(size) if *size == token_ids.len() as i64), "{fields:?}");
    KvEvent::BlockStored { hash, parent, token_ids, namespace, is_on_l3 }
}

/// A value of msgpack, as far as batches have it.
#[derive(Debug)]
enum Value {
    Nil,
    Integer(i64),
    Float(f64),
    Text(String),
    Array(Vec<Value>),
    Map(Vec<(String, Value)>),
}

/// Decodes a value and takes its bytes.
fn decode(rest: &mut &[u8]) -> Value {
    let kind = take::<1>(rest)[0];
    match kind {
        0..=0x7f => Value::Integer(kind.into()),
        0x80..=0x8f => Value::Map((0..kind & 15).map(|_| (text(rest), decode(rest))).collect()),
        0x90..=0x9f => Value::Array((0..kind & 15).map(|_| decode(rest)).collect()),
        0xa0..=0xbf => Value::Text(string(rest, usize::from(kind & 31))),
        0xc0 => Value::Nil,
        0xcb => Value::Float(f64::from_be_bytes(take(rest))),
        0xcc => Value::Integer(take::<1>(rest)[0].into()),
        0xcd => Value::Integer(u16::from_be_bytes(take(rest)).into()),
        0xce => Value::Integer(u32::from_be_bytes(take(rest)).into()),
        0xd3 => Value::Integer(i64::from_be_bytes(take(rest))),
        0xd9 => {
            let length = take::<1>(rest)[0];
            Value::Text(string(rest, length.into()))
        }
        0xdc => {
            let elements = u16::from_be_bytes(take(rest));
            Value::Array((0..elements).map(|_| decode(rest)).collect())
        }
        _ => panic!("unexpected kind {kind:#x} of a value"),
    }
}

fn text(rest: &mut &[u8]) -> String {
    match decode(rest) {
        Value::Text(text) => text,
        other => panic!("the name of a field is no text: {other:?}"),
    }
}

fn string(rest: &mut &[u8], length: usize) -> String {
    let (bytes, behind) = rest.split_at(length);
    *rest = behind;
    String::from_utf8(bytes.to_vec()).expect("valid UTF-8")
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (bytes, behind) = rest.split_first_chunk().expect("the value goes on");
    *rest = behind;
    *bytes
}
