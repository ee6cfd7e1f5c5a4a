//! Bounds on KV events: connections, batches and memory.

use crate::page_changes::{PageChange, QUEUE_BYTES};
use larder_format::MAX_TOKEN_IDS;
use larder_zmtp::FRAME_BYTES_MAX;
use std::time::Duration;

/// Maximum number of subscribers. One address may have three quarters of them, and the last eighth
/// is for known peers.
pub(crate) const SUBSCRIBERS_MAX: usize = 64;
/// Maximum number of connections to the socket for replays, shared in the same way.
pub(crate) const REPLAYS_MAX: usize = 16;
/// Maximum time of a connection without a subscription to the topic or a request for a replay.
pub(crate) const UNUSED_TIMEOUT: Duration = Duration::from_secs(60);
/// Minimum pause between two snapshots of one connection. It is longer if the walk over L2 took
/// longer.
pub(crate) const SNAPSHOT_PAUSE_MIN: Duration = Duration::from_secs(1);
/// Maximum length of the topic in bytes.
pub(crate) const TOPIC_BYTES_MAX: usize = 255;
/// Maximum number of events of a batch.
pub(crate) const BATCH_EVENTS: usize = 256;
/// Maximum encoding of an event without token ids, in bytes.
pub(crate) const EVENT_BYTES_MAX: usize = 232;
/// Maximum encoding of a token id in bytes.
pub(crate) const TOKEN_ID_BYTES_MAX: usize = 5;
/// Maximum encoding of a batch in bytes. The end of all pages may come before its events. Token ids
/// lower the number of events: a batch takes another one while the encoding of the others is below
/// [`BATCH_EVENTS_BYTES`].
pub(crate) const BATCH_BYTES_MAX: usize =
    64 + BATCH_EVENTS_BYTES + EVENT_BYTES_MAX + MAX_TOKEN_IDS * TOKEN_ID_BYTES_MAX;
/// Encoding of the most events without token ids, in bytes.
pub(crate) const BATCH_EVENTS_BYTES: usize = BATCH_EVENTS * EVENT_BYTES_MAX;
/// Maximum memory of the batches that are kept for subscribers, in bytes: some 75,000 events
/// without token ids.
pub(crate) const KEPT_BYTES_MAX: usize = 16 << 20;
/// Room for the input of a connection in bytes: the longest frame, and more bytes behind it.
pub(crate) const INPUT_BYTES: usize = 2 * FRAME_BYTES_MAX;
/// Output in bytes above which a connection reads nothing. Without it, a client that sends
/// heartbeats and takes no answers would make the output grow.
pub(crate) const OUTPUT_PAUSE_BYTES: usize = 4 << 10;

/// Memory of a connection's task and socket in bytes, beside its buffers.
const TASK_BYTES: usize = 8 << 10;
/// Maximum memory of a connection in bytes: its task, its input, a batch of a snapshot before and
/// after its encoding, and the output. That has one message and the answers to heartbeats, in a
/// buffer with twice the room at most.
const CONNECTION_BYTES: usize = TASK_BYTES
    + INPUT_BYTES
    + BATCH_EVENTS * size_of::<PageChange>()
    + BATCH_BYTES_MAX
    + 2 * (BATCH_BYTES_MAX + TOPIC_BYTES_MAX + OUTPUT_PAUSE_BYTES + INPUT_BYTES);

/// Upper bound of the memory for events with so many connections, in bytes.
pub(crate) fn memory_bytes(connections: usize) -> u64 {
    QUEUE_BYTES + (KEPT_BYTES_MAX + BATCH_BYTES_MAX + connections * CONNECTION_BYTES) as u64
}
