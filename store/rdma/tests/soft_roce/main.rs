//! The whole crate on two soft-RoCE devices, inside the virtual machine of `tests/rdma`. Start it
//! with `tests/rdma/run`.
//!
//! Time limits are generous because an emulated machine is slow: nothing here measures speed. Tests
//! run one at a time, because some of them disturb the network.

mod support;

use larder_memory::{Arena, SlotMut};
use larder_rdma::{
    DisconnectReason, DmaBuf, DmaBufMut, DmaMemory, Endpoint, EndpointAddress, EndpointOptions, Error, GrantKind, Nic,
    NicOptions, Path, Region, RemoteGrant, RemoteRange, SLOW_CHUNK_BYTES, Span, devices, pairs,
};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::{NetworkFault, assert_bytes, pattern};
use tokio::time::{sleep, timeout};

const MIB: usize = 1 << 20;
const ARENA_BYTES: usize = 96 * MIB;
/// Time limit of every step, far above what an emulated machine needs.
const LONG: Duration = Duration::from_secs(60);
const KINDS: [GrantKind; 2] = [GrantKind::MemoryWindow, GrantKind::Registration];
/// `IBV_WC_REM_ACCESS_ERR`: the key does not allow the access.
const REFUSED: u32 = 10;

struct Whole {
    arena: Arc<Arena>,
    start: Span,
}

// SAFETY: an arena is one mapping, which lives as long as the `Arc`.
unsafe impl DmaMemory for Whole {
    fn span(&self) -> Span {
        Span::new(self.start.start(), self.arena.capacity())
    }
}

/// Exclusive memory that records its content when it is dropped, that is, when the crate releases
/// it.
struct Buffer {
    slot: SlotMut,
    recorder: Option<DropRecorder>,
}

#[derive(Clone, Default)]
struct DropRecorder(Arc<Mutex<Option<Vec<u8>>>>);

impl DropRecorder {
    fn released_bytes(&self) -> Option<Vec<u8>> {
        self.0.lock().unwrap().clone()
    }

    async fn wait(&self) -> Vec<u8> {
        let begin = Instant::now();
        loop {
            if let Some(bytes) = self.released_bytes() {
                return bytes;
            }
            assert!(begin.elapsed() < LONG, "the memory is never released");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(recorder) = &self.recorder {
            *recorder.0.lock().unwrap() = Some(self.slot.to_vec());
        }
    }
}

// SAFETY: the slot is the only access to its memory, which does not move.
unsafe impl DmaBuf for Buffer {
    fn span(&self) -> Span {
        Span::of(&self.slot)
    }
}
// SAFETY: as above.
unsafe impl DmaBufMut for Buffer {}

struct Side {
    nic: Arc<Nic>,
    arena: Arc<Arena>,
    region: Arc<Region>,
}

impl Side {
    async fn new(device: &str, windows: impl Into<Option<GrantKind>>, piece_bytes: usize) -> Side {
        let nic = Nic::open(device, &NicOptions { grant_kind: windows.into(), ..NicOptions::default() }).await.unwrap();
        let arena = Arena::new(ARENA_BYTES).unwrap();
        let mut first = arena.allocate(1).unwrap();
        assert_eq!(first.arena_offset(), 0);
        let start = Span::new(NonNull::new(first.whole().as_mut_ptr()).unwrap(), 1);
        let memory = Arc::new(Whole { arena: arena.clone(), start });
        let region = Region::register_in_pieces(&nic, memory, piece_bytes).unwrap();
        assert_eq!(region.len(), ARENA_BYTES);
        Side { nic, arena, region }
    }

    fn filled(&self, len: usize, seed: u64) -> Buffer {
        let mut slot = self.arena.allocate(len).unwrap();
        slot.copy_from_slice(&pattern(len, seed));
        Buffer { slot, recorder: None }
    }

    fn empty(&self, len: usize) -> Buffer {
        let mut slot = self.arena.allocate(len).unwrap();
        slot.fill(0);
        Buffer { slot, recorder: None }
    }

    fn recorded(&self, len: usize) -> (Buffer, DropRecorder) {
        let mut buffer = self.empty(len);
        let recorder = DropRecorder::default();
        buffer.recorder = Some(recorder.clone());
        (buffer, recorder)
    }
}

struct Pair {
    node: Side,
    client: Side,
    node_end: Endpoint,
    client_end: Endpoint,
}

async fn connected(node: &Side, client: &Side, options: &EndpointOptions) -> (Endpoint, Endpoint) {
    let node_end = Endpoint::new(&node.nic, options.clone()).unwrap();
    let client_end = Endpoint::new(&client.nic, options.clone()).unwrap();
    // Encoded and decoded, as they travel on an existing connection.
    let to_client = EndpointAddress::decode(&node_end.local().encode()).unwrap();
    let to_node = EndpointAddress::decode(&client_end.local().encode()).unwrap();
    node_end.connect(&to_node).await.unwrap();
    client_end.connect(&to_client).await.unwrap();
    (node_end, client_end)
}

fn slow() -> EndpointOptions {
    EndpointOptions {
        stall_timeout: LONG,
        connect_deadline: LONG,
        // 2 s: longer than the emulated machine ever stalls.
        retry_exponent: 19,
        ..EndpointOptions::default()
    }
}

async fn pair(windows: impl Into<Option<GrantKind>> + Copy, options: EndpointOptions) -> Pair {
    let node = Side::new("rxe0", windows, 1 << 30).await;
    let client = Side::new("rxe1", windows, 1 << 30).await;
    let (node_end, client_end) = connected(&node, &client, &options).await;
    Pair { node, client, node_end, client_end }
}

impl Pair {
    async fn rebuild(&mut self) {
        let (node_end, client_end) = connected(&self.node, &self.client, &slow()).await;
        let node_end = std::mem::replace(&mut self.node_end, node_end);
        let client_end = std::mem::replace(&mut self.client_end, client_end);
        assert!(node_end.close(LONG).await && client_end.close(LONG).await);
    }

    /// Closes both ends and checks that all memory was released and none leaked.
    async fn finish(self) {
        let Pair { node, client, node_end, client_end } = self;
        assert!(node_end.close(LONG).await && client_end.close(LONG).await);
        for side in [&node, &client] {
            let stats = side.nic.stats();
            assert_eq!((stats.grants, stats.endpoints, stats.leaked), (0, 0, 0), "{stats:?}");
            assert_eq!(side.arena.used(), 0, "all memory is released");
        }
    }
}

fn in_vm<F: Future<Output = ()>>(test: F) {
    assert!(
        std::env::var_os("LARDER_RDMA_VM").is_some(),
        "this test changes the network of its machine; run it with tests/rdma/run"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { timeout(5 * LONG, test).await.expect("the test ends in time") });
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Disconnected(DisconnectReason::Failed { status: REFUSED, .. }))
}

#[test]
fn devices_are_listed_and_paired() {
    in_vm(async {
        let found = devices().unwrap();
        assert_eq!(found.iter().map(|device| device.name.as_str()).collect::<Vec<_>>(), ["rxe0", "rxe1"]);
        for (device, ip) in found.iter().zip(["::ffff:10.77.0.1", "::ffff:10.77.1.1"]) {
            let port = &device.ports[0];
            assert!(device.guid != 0 && port.active && port.mtu_bytes == 4096, "{device:?}");
            assert_eq!(port.default_gid().unwrap().gid.to_string(), ip);
        }
        let paths: Vec<Path> = found.iter().map(|device| device.ports[0].path().unwrap()).collect();
        let sent: Vec<Path> = paths.iter().map(|path| Path::decode(&path.encode()).unwrap()).collect();
        assert_eq!(pairs(&paths, &sent).len(), 2);
        let missing = Nic::open("rxe7", &NicOptions::default()).await;
        assert!(matches!(missing, Err(Error::NotFound(_))), "{missing:?}");
        let no_gid = Nic::open("rxe0", &NicOptions { gid_index: Some(77), ..NicOptions::default() }).await;
        assert!(matches!(no_gid, Err(Error::NotFound(_))), "{no_gid:?}");
    });
}

/// The probe must agree with the device: if a read can leave a memory window, none is used.
#[test]
fn memory_windows_that_leak_are_not_used() {
    in_vm(async {
        let mut pair = pair(GrantKind::MemoryWindow, slow()).await;
        let neighbour = pair.node.filled(4096, 1);
        let grant = pair.node_end.grant_read(pair.node.filled(4096, 2), &pair.node.region).await.unwrap();
        let mut range = grant.remote();
        range.address = neighbour.span().start().as_ptr() as u64;
        let read = pair.client_end.read(pair.client.empty(4096), &pair.client.region, range).await;
        let restricted = match read {
            Ok(read) => {
                assert_bytes(&read.slot[..], pattern(4096, 1), "the read left the range of its grant");
                false
            }
            Err(error) => is_refusal(&error),
        };
        let nic = Nic::open("rxe0", &NicOptions::default()).await.unwrap();
        println!("memory windows of this device are restricted to their range: {restricted}");
        assert_eq!(nic.grant_kind(), if restricted { GrantKind::MemoryWindow } else { GrantKind::Registration });
        assert_eq!((nic.stats().disconnects, nic.is_alive()), (0, true), "the probe leaves no trace");
        drop(neighbour);
        grant.revoke().await.unwrap();
        pair.rebuild().await;
        pair.finish().await;
    });
}

async fn write_and_read_back(pair: &Pair, len: usize, seed: u64) {
    let (node, client) = (&pair.node, &pair.client);
    let grant = pair.node_end.grant_write(node.empty(len), &node.region).await.unwrap();
    let remote = RemoteRange::decode(&grant.remote().encode()).unwrap();
    pair.client_end.write(client.filled(len, seed), &client.region, remote).await.unwrap();
    let stored = grant.revoke().await.unwrap();
    assert_bytes(&stored.slot[..], pattern(len, seed), &format!("written: {len}"));

    let grant = pair.node_end.grant_read(stored, &node.region).await.unwrap();
    let read = pair.client_end.read(client.empty(len), &client.region, grant.remote()).await.unwrap();
    assert_bytes(&read.slot[..], pattern(len, seed), &format!("read: {len}"));
    grant.revoke().await.unwrap();
}

#[test]
fn written_bytes_are_read_back() {
    in_vm(async {
        for kind in KINDS {
            let pair = pair(kind, slow()).await;
            for (i, len) in [MIB, MIB, MIB, MIB, 1, 3, 4095, 4097, 65_537, 2 * MIB + 123].into_iter().enumerate() {
                write_and_read_back(&pair, len, i as u64).await;
            }
            let stats = pair.client.nic.stats();
            assert_eq!((stats.reads, stats.writes, stats.disconnects), (10, 10, 0));
            assert_eq!(stats.read_bytes, (6 * MIB + 123 + 1 + 3 + 4095 + 4097 + 65_537) as u64);
            assert_eq!(stats.read_bytes, stats.written_bytes);
            pair.finish().await;
        }
    });
}

#[test]
fn concurrent_transfers_of_many_parts_complete() {
    in_vm(async {
        // Far fewer requests than parts, so that transfers wait for permits.
        let options = EndpointOptions { transfers: 4, chunk_bytes: 10_000, ..slow() };
        let pair = pair(GrantKind::MemoryWindow, options).await;
        let sizes = [100_000, 1, 50_001, 9_999, 10_000, 10_001, 123, 70_000];
        let mut windows = Vec::new();
        for (i, len) in sizes.into_iter().enumerate() {
            let grant = pair.node_end.grant_read(pair.node.filled(len, i as u64), &pair.node.region).await.unwrap();
            windows.push(grant);
        }
        let parts = |range: std::ops::Range<usize>| -> Vec<(Buffer, RemoteRange)> {
            range.map(|i| (pair.client.empty(sizes[i]), windows[i].remote())).collect()
        };
        let (end, region) = (&pair.client_end, &pair.client.region);
        let (a, b, c) = tokio::join!(
            end.read_all(parts(0..8), region),
            end.read_all(parts(0..3), region),
            end.read_all(parts(5..8), region)
        );
        for (read, from) in [(a.unwrap(), 0), (b.unwrap(), 0), (c.unwrap(), 5)] {
            for (i, buffer) in read.iter().enumerate() {
                assert_bytes(&buffer.slot[..], pattern(sizes[from + i], (from + i) as u64), "");
            }
        }
        for grant in windows {
            grant.revoke().await.unwrap();
        }
        pair.finish().await;
    });
}

#[test]
fn transfers_work_in_every_direction_with_busy_polling() {
    in_vm(async {
        let options = EndpointOptions { spin: Duration::from_micros(200), ..slow() };
        let kind = GrantKind::MemoryWindow;
        for (node, client) in [("rxe0", "rxe1"), ("rxe1", "rxe0"), ("rxe0", "rxe0")] {
            let (node, client) = (Side::new(node, kind, 1 << 30).await, Side::new(client, kind, 1 << 30).await);
            let (node_end, client_end) = connected(&node, &client, &options).await;
            let pair = Pair { node, client, node_end, client_end };
            for len in [MIB, 77] {
                write_and_read_back(&pair, len, 5).await;
            }
            pair.finish().await;
        }
    });
}

#[test]
fn transfer_may_straddle_registrations() {
    in_vm(async {
        let node = Side::new("rxe0", GrantKind::MemoryWindow, 64 << 10).await;
        let client = Side::new("rxe1", GrantKind::MemoryWindow, 64 << 10).await;
        let (node_end, client_end) = connected(&node, &client, &slow()).await;
        let pair = Pair { node, client, node_end, client_end };
        write_and_read_back(&pair, 200_000, 8).await;
        pair.finish().await;
    });
}

/// A forbidden access kills the connection and changes no byte. A fresh connection works.
#[test]
fn grant_allows_one_direction_only() {
    in_vm(async {
        for kind in KINDS {
            let mut pair = pair(kind, slow()).await;
            let len = 10_000;

            let grant = pair.node_end.grant_read(pair.node.filled(len, 1), &pair.node.region).await.unwrap();
            let refused = pair.client_end.write(pair.client.filled(len, 2), &pair.client.region, grant.remote()).await;
            assert!(refused.as_ref().is_err_and(is_refusal), "{:?}", refused.err());
            assert!(pair.client_end.is_dead(), "the connection is dead after an error");
            let after = pair.client_end.write(pair.client.filled(len, 2), &pair.client.region, grant.remote()).await;
            assert!(after.as_ref().is_err_and(is_refusal), "it stays dead: {:?}", after.err());
            let kept = grant.revoke().await.unwrap();
            assert_bytes(&kept.slot[..], pattern(len, 1), "nothing was written");
            drop(kept);
            pair.rebuild().await;

            let grant = pair.node_end.grant_write(pair.node.filled(len, 1), &pair.node.region).await.unwrap();
            let (buffer, recorder) = pair.client.recorded(len);
            let refused = pair.client_end.read(buffer, &pair.client.region, grant.remote()).await;
            assert!(refused.as_ref().is_err_and(is_refusal), "{:?}", refused.err());
            assert_bytes(recorder.wait().await, vec![0; len], "nothing was read");
            grant.revoke().await.unwrap();

            pair.rebuild().await;
            write_and_read_back(&pair, len, 3).await;
            pair.finish().await;
        }
    });
}

/// The same for bytes beside the grant, with the kind of grant that the probe chose.
#[test]
fn grant_is_restricted_to_its_range() {
    in_vm(async {
        let mut pair = pair(None, slow()).await;
        let len = 10_000;
        // One byte in front of the grant, one behind it, and another key.
        for (shift, more, key) in [(-1, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)] {
            pair.rebuild().await;
            let grant = pair.node_end.grant_read(pair.node.filled(len, 1), &pair.node.region).await.unwrap();
            let range = grant.remote();
            let outside = RemoteRange {
                address: range.address.wrapping_add_signed(shift),
                len: range.len + more,
                key: range.key.wrapping_add(key),
            };
            let (buffer, recorder) = pair.client.recorded(outside.len as usize);
            let refused = pair.client_end.read(buffer, &pair.client.region, outside).await;
            assert!(refused.as_ref().is_err_and(is_refusal), "{shift} {more} {key}: {:?}", refused.err());
            assert!(recorder.wait().await.iter().all(|&byte| byte == 0), "nothing was read");
            grant.revoke().await.unwrap();
        }
        pair.rebuild().await;
        write_and_read_back(&pair, len, 3).await;
        pair.finish().await;
    });
}

#[test]
fn memory_window_is_valid_on_one_connection() {
    in_vm(async {
        let mut pair = pair(GrantKind::MemoryWindow, slow()).await;
        let (other_node_end, other_client_end) = connected(&pair.node, &pair.client, &slow()).await;
        let grant = pair.node_end.grant_read(pair.node.filled(5000, 1), &pair.node.region).await.unwrap();
        let foreign_read = other_client_end.read(pair.client.empty(5000), &pair.client.region, grant.remote()).await;
        assert!(foreign_read.as_ref().is_err_and(is_refusal), "{:?}", foreign_read.err());
        let read = pair.client_end.read(pair.client.empty(5000), &pair.client.region, grant.remote()).await.unwrap();
        assert_bytes(&read.slot[..], pattern(5000, 1), "");
        drop(read);
        grant.revoke().await.unwrap();
        assert!(other_node_end.close(LONG).await && other_client_end.close(LONG).await);
        pair.rebuild().await;
        pair.finish().await;
    });
}

#[test]
fn revoked_key_grants_no_access() {
    in_vm(async {
        for kind in KINDS {
            let mut pair = pair(kind, slow()).await;
            let len = 20_000;
            // Revoked by a call, and by dropping the grant.
            for dropped in [false, true] {
                let mut buffer = pair.node.filled(len, 1);
                let recorder = DropRecorder::default();
                buffer.recorder = Some(recorder.clone());
                let grant = pair.node_end.grant_read(buffer, &pair.node.region).await.unwrap();
                let old = grant.remote();
                let read = pair.client_end.read(pair.client.empty(len), &pair.client.region, old).await.unwrap();
                assert_bytes(&read.slot[..], pattern(len, 1), "the key is valid before the revocation");
                drop(read);
                if dropped {
                    drop(grant);
                    assert_bytes(recorder.wait().await, pattern(len, 1), "");
                } else {
                    drop(grant.revoke().await.unwrap());
                }
                // The same memory, reused for other bytes.
                let secret = pair.node.filled(len, 99);
                assert_eq!(secret.span().start().as_ptr() as u64, old.address, "the slot is reused");
                let (buffer, recorder) = pair.client.recorded(len);
                let refused = pair.client_end.read(buffer, &pair.client.region, old).await;
                assert!(refused.as_ref().is_err_and(is_refusal), "{:?}", refused.err());
                assert_bytes(recorder.wait().await, vec![0; len], "nothing was read");
                let refused = pair.client_end.write(pair.client.empty(len), &pair.client.region, old).await;
                assert!(refused.is_err());
                assert_bytes(&secret.slot[..], pattern(len, 99), "nothing was written");
                drop(secret);
                pair.rebuild().await;
            }
            pair.finish().await;
        }
    });
}

#[test]
fn grants_are_bounded_and_keys_do_not_repeat_soon() {
    in_vm(async {
        for kind in KINDS {
            let pair = pair(kind, EndpointOptions { grants: 2, ..slow() }).await;
            let open = |seed| pair.node_end.grant_read(pair.node.filled(64, seed), &pair.node.region);
            let (first, second) = (open(1).await.unwrap(), open(2).await.unwrap());
            assert_eq!(open(3).await.err(), Some(Error::TooManyGrants));
            assert_ne!(first.remote().key, second.remote().key);
            first.revoke().await.unwrap();
            let mut last = second;
            for i in 0..600 {
                let grant: RemoteGrant<Buffer> = open(i).await.unwrap();
                assert_ne!(grant.remote().key, last.remote().key);
                if i % 100 == 0 {
                    let read = pair.client_end.read(pair.client.empty(64), &pair.client.region, grant.remote()).await;
                    assert_bytes(&read.unwrap().slot[..], pattern(64, i), "");
                }
                last.revoke().await.unwrap();
                last = grant;
            }
            last.revoke().await.unwrap();
            pair.finish().await;
        }
    });
}

/// The memory of an abandoned transfer is released when the device has finished the requests that
/// it has. Those of a long transfer that were not posted yet never are.
#[test]
fn dropping_a_future_keeps_memory_until_completion() {
    in_vm(async {
        for (len, is_all_posted) in [(64 << 10, true), (MIB, false)] {
            let pair = pair(GrantKind::MemoryWindow, slow()).await;
            let grant = pair.node_end.grant_read(pair.node.filled(len, 4), &pair.node.region).await.unwrap();
            let (buffer, recorder) = pair.client.recorded(len);
            {
                let _fault = NetworkFault::new("delay 1500ms limit 100000"); // below the retransmission time
                let read = pair.client_end.read(buffer, &pair.client.region, grant.remote());
                assert!(timeout(Duration::from_millis(100), read).await.is_err(), "the transfer is in flight");
                assert!(recorder.released_bytes().is_none(), "the device still has the memory");
                assert_eq!(pair.client.nic.stats().reads, 0);
                let (released, expected) = (recorder.wait().await, pattern(len, 4));
                let arrived = released.iter().zip(&expected).take_while(|(left, right)| left == right).count();
                assert!(
                    arrived >= SLOW_CHUNK_BYTES as usize,
                    "the requests that were posted complete: {arrived} bytes"
                );
                assert_eq!(arrived == len, is_all_posted, "{arrived} of {len} bytes");
                assert_eq!(pair.client.nic.stats().reads, u64::from(is_all_posted));
            }
            assert!(!pair.client_end.is_dead());
            grant.revoke().await.unwrap();
            pair.finish().await;
        }
    });
}

#[test]
fn transfer_fails_in_time_when_the_peer_dies() {
    in_vm(async {
        // 33 ms, retransmitted six times.
        let options = EndpointOptions { retry_exponent: 13, ..slow() };
        let pair = pair(GrantKind::MemoryWindow, options).await;
        let Pair { node, client, node_end, client_end } = pair;
        let len = 32 * MIB;
        let grant = node_end.grant_read(node.filled(len, 4), &node.region).await.unwrap();
        let remote = grant.remote();
        let (buffer, recorder) = client.recorded(len);
        let begin = Instant::now();
        let end = Arc::new(client_end);
        let reader = tokio::spawn({
            let (end, region) = (end.clone(), client.region.clone());
            async move { end.read(buffer, &region, remote).await.map(drop) }
        });
        sleep(Duration::from_millis(50)).await;
        assert!(!reader.is_finished() && recorder.released_bytes().is_none(), "the transfer is in flight");
        assert!(node_end.close(LONG).await, "the node releases all memory");
        drop(grant.revoke().await.unwrap());
        let failed = reader.await.unwrap();
        assert!(matches!(failed, Err(Error::Disconnected(DisconnectReason::Failed { .. }))), "{failed:?}");
        assert!(begin.elapsed() < LONG, "before its deadline");
        recorder.wait().await;
        assert!(Arc::into_inner(end).unwrap().close(LONG).await);
        assert_eq!((node.arena.used(), client.arena.used()), (0, 0));
        assert_eq!((node.nic.stats().leaked, client.nic.stats().leaked), (0, 0));
    });
}

#[test]
fn stall_fails_the_transfer_and_the_connection() {
    in_vm(async {
        // The device itself would retransmit for a minute.
        let stall_timeout = Duration::from_millis(500);
        let options = EndpointOptions { retry_exponent: 21, stall_timeout, ..slow() };
        for waits in [true, false] {
            let pair = pair(GrantKind::MemoryWindow, options.clone()).await;
            let grant = pair.node_end.grant_read(pair.node.filled(MIB, 4), &pair.node.region).await.unwrap();
            let (buffer, recorder) = pair.client.recorded(MIB);
            let fault = NetworkFault::new("loss 100%");
            let begin = Instant::now();
            let read = pair.client_end.read(buffer, &pair.client.region, grant.remote());
            if waits {
                assert_eq!(read.await.err(), Some(Error::Disconnected(DisconnectReason::Deadline)));
                assert!(begin.elapsed() >= stall_timeout && begin.elapsed() < LONG);
            } else {
                // The time limit also applies to an abandoned transfer.
                assert!(timeout(stall_timeout / 5, read).await.is_err());
            }
            assert_bytes(recorder.wait().await, vec![0; MIB], "released without data");
            assert_eq!(pair.client_end.disconnect_reason(), Some(DisconnectReason::Deadline));
            drop(fault);
            grant.revoke().await.unwrap();
            pair.finish().await;
        }
    });
}

/// Each completed request is progress, so a transfer may take many times the stall timeout.
#[test]
fn slow_transfer_outlives_the_stall_timeout() {
    in_vm(async {
        let stall_timeout = Duration::from_secs(1);
        // The packets of a window wait in the queue of the slow link for a second. No
        // retransmission may come meanwhile.
        let options = EndpointOptions { retry_exponent: 21, stall_timeout, ..slow() };
        let pair = pair(GrantKind::MemoryWindow, options).await;
        let grant = pair.node_end.grant_read(pair.node.filled(MIB, 4), &pair.node.region).await.unwrap();
        let begin = Instant::now();
        {
            let _fault = NetworkFault::new("rate 2mbit limit 100000");
            let read = pair.client_end.read(pair.client.empty(MIB), &pair.client.region, grant.remote());
            let read = timeout(LONG, read).await.unwrap().unwrap();
            assert_bytes(&read.slot[..], pattern(MIB, 4), "");
        }
        assert!(begin.elapsed() >= 3 * stall_timeout, "the link was slow");
        grant.revoke().await.unwrap();
        pair.finish().await;
    });
}

#[test]
fn lost_packets_are_retransmitted() {
    in_vm(async {
        let pair = pair(GrantKind::MemoryWindow, slow()).await;
        {
            let fault = NetworkFault::new("loss 2%");
            let mut seed = 0;
            while seed < 2 || fault.packets_lost() == 0 {
                write_and_read_back(&pair, MIB / 4, seed).await;
                seed += 1;
            }
        }
        pair.finish().await;
    });
}

#[test]
fn invalid_requests_are_refused_without_harm() {
    in_vm(async {
        let pair = pair(GrantKind::MemoryWindow, slow()).await;
        let (node, client) = (&pair.node, &pair.client);
        let remote = RemoteRange { address: 4096, len: 100, key: 1 };
        let foreign = pair.client_end.read(node.empty(100), &client.region, remote).await;
        assert_eq!(foreign.err(), Some(Error::NotRegistered), "memory of another arena");
        let foreign = pair.client_end.read(node.empty(100), &node.region, remote).await;
        assert_eq!(foreign.err(), Some(Error::NotRegistered), "a region of another device");
        let foreign = pair.node_end.grant_read(client.empty(100), &node.region).await;
        assert_eq!(foreign.err(), Some(Error::NotRegistered));
        let longer = pair.client_end.read(client.empty(101), &client.region, remote).await;
        assert!(matches!(longer, Err(Error::Invalid(_))));
        let none = pair.client_end.read_all(Vec::<(Buffer, RemoteRange)>::new(), &client.region).await;
        assert!(matches!(none, Err(Error::Invalid(_))));

        let unconnected = Endpoint::new(&client.nic, slow()).unwrap();
        let early = unconnected.read(client.empty(100), &client.region, remote).await;
        assert_eq!(early.err(), Some(Error::NotConnected));
        assert_eq!(unconnected.grant_read(client.empty(100), &client.region).await.err(), Some(Error::NotConnected));
        assert!(!unconnected.is_dead() && unconnected.close(LONG).await);
        let twice = pair.client_end.connect(&pair.node_end.local()).await;
        assert!(matches!(twice, Err(Error::Invalid(_))));
        for options in [
            EndpointOptions { transfers: 0, ..slow() },
            EndpointOptions { transfers: u32::MAX, ..slow() },
            EndpointOptions { chunk_bytes: 0, ..slow() },
            EndpointOptions { retries: 8, ..slow() },
            EndpointOptions { retry_exponent: 32, ..slow() },
        ] {
            assert!(matches!(Endpoint::new(&client.nic, options), Err(Error::Invalid(_))));
        }
        assert!(!pair.client_end.is_dead() && !pair.node_end.is_dead(), "the connection survives every refusal");
        write_and_read_back(&pair, 100, 1).await;
        pair.finish().await;
    });
}

/// Shutting down a runtime closes its connections and releases their memory.
#[test]
fn runtime_shutdown_releases_all_memory() {
    in_vm(async {});
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let (arenas, recorder, stats) = runtime.block_on(async {
        let pair = pair(GrantKind::MemoryWindow, slow()).await;
        let grant = pair.node_end.grant_read(pair.node.filled(32 * MIB, 4), &pair.node.region).await.unwrap();
        let (buffer, recorder) = pair.client.recorded(32 * MIB);
        let arenas = [pair.node.arena.clone(), pair.client.arena.clone()];
        let nics = [pair.node.nic.clone(), pair.client.nic.clone()];
        let flag = ended.clone();
        tokio::spawn(async move {
            let _ = pair.client_end.read(buffer, &pair.client.region, grant.remote()).await;
            flag.store(true, Ordering::SeqCst);
            drop((pair, grant));
        });
        sleep(Duration::from_millis(50)).await;
        (arenas, recorder, nics)
    });
    assert!(!ended.load(Ordering::SeqCst), "the transfer is under way");
    runtime.shutdown_timeout(LONG);
    assert!(recorder.released_bytes().is_some());
    assert_eq!(arenas.map(|arena| arena.used()), [0, 0]);
    for nic in stats {
        assert_eq!((nic.stats().endpoints, nic.stats().grants, nic.stats().leaked), (0, 0, 0));
    }
}

/// The path of a page: one-sided writes, revocation of the grant, checksum, then one-sided reads
/// that are checked again.
#[test]
fn page_is_put_and_read_under_grants() {
    in_vm(async {
        for kind in KINDS {
            let pair = pair(kind, slow()).await;
            let part_bytes = 300_000;
            let parts = [pattern(part_bytes, 1), pattern(part_bytes, 2), pattern(part_bytes, 3)];
            let page: Vec<u8> = parts.concat();
            let checksum = crc32fast::hash(&page);

            // The node reserves a slot and sends its range and key: 20 bytes on the wire.
            let reserved = pair.node.empty(page.len());
            let put_grant = pair.node_end.grant_write(reserved, &pair.node.region).await.unwrap();
            let grant = put_grant.remote().encode();

            // The client writes the parts concurrently, in any order.
            let grant = RemoteRange::decode(&grant).unwrap();
            let writes = [2, 0, 1].map(|i| {
                let mut buffer = pair.client.empty(part_bytes);
                buffer.slot.copy_from_slice(&parts[i]);
                (buffer, grant.part((i * part_bytes) as u64, part_bytes as u64).unwrap())
            });
            pair.client_end.write_all(writes.into(), &pair.client.region).await.unwrap();

            // The client reports the checksum. The node revokes the grant before it checks, so that
            // the bytes are stable.
            let slot = put_grant.revoke().await.unwrap();
            assert_eq!(crc32fast::hash(&slot.slot), checksum, "sealed");

            // Two grants of the same page, revoked in the other order.
            let sealed = Arc::new(slot);
            let first = pair.node_end.grant_read(Sealed(sealed.clone()), &pair.node.region).await.unwrap();
            let second = pair.node_end.grant_read(Sealed(sealed.clone()), &pair.node.region).await.unwrap();
            for read_grant in [second, first] {
                let read =
                    pair.client_end.read(pair.client.empty(page.len()), &pair.client.region, read_grant.remote()).await;
                assert_eq!(crc32fast::hash(&read.unwrap().slot), checksum);
                read_grant.revoke().await.unwrap();
            }
            assert_eq!(Arc::strong_count(&sealed), 1, "no grant is left");
            drop(sealed);
            pair.finish().await;
        }
    });
}

struct Sealed(Arc<Buffer>);

// SAFETY: shared, never written, and the memory lives as long as this value.
unsafe impl DmaBuf for Sealed {
    fn span(&self) -> Span {
        self.0.span()
    }
}
