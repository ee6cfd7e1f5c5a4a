//! The whole crate on two soft-RoCE devices, in the virtual machine of `tests/rdma` (run it by `tests/rdma/run`).
//!
//! Bounds are generous, as an emulated machine is slow; nothing here measures speed. One test at a time: some change the network.

use larder_device::{Arena, SlotMut};
use larder_rdma::{
    Bytes, BytesMut, Death, Endpoint, EndpointAddress, EndpointOptions, Error, Memory, Nic, NicOptions, Path, Region,
    RemoteRange, Span, Window, WindowKind, devices, pairs,
};
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

const MIB: usize = 1 << 20;
const ARENA_BYTES: usize = 96 * MIB;
/// No step of a test takes longer; what does is broken.
const LONG: Duration = Duration::from_secs(30);
const KINDS: [WindowKind; 2] = [WindowKind::Type2, WindowKind::Registration];
/// `ibv_wc_status`: the peer does not allow that.
const REFUSED: u32 = 10;

struct Whole {
    arena: Arc<Arena>,
    start: Span,
}

// SAFETY: an arena is one mapping, which lives as long as the `Arc`.
unsafe impl Memory for Whole {
    fn span(&self) -> Span {
        Span::new(self.start.start(), self.arena.capacity())
    }
}

/// Memory that only its owner touches, and that tells what was in it when it was let go of.
struct Buffer {
    slot: SlotMut,
    witness: Option<Witness>,
}

#[derive(Clone, Default)]
struct Witness(Arc<Mutex<Option<Vec<u8>>>>);

impl Witness {
    fn last_words(&self) -> Option<Vec<u8>> {
        self.0.lock().unwrap().clone()
    }

    async fn wait(&self) -> Vec<u8> {
        let begin = Instant::now();
        loop {
            if let Some(bytes) = self.last_words() {
                return bytes;
            }
            assert!(begin.elapsed() < LONG, "memory is never let go of");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(witness) = &self.witness {
            *witness.0.lock().unwrap() = Some(self.slot.to_vec());
        }
    }
}

// SAFETY: the slot is the only way to its memory, and stays where it is.
unsafe impl Bytes for Buffer {
    fn span(&self) -> Span {
        Span::of(&self.slot)
    }
}
// SAFETY: as above.
unsafe impl BytesMut for Buffer {}

/// One machine's share: a device, and memory that is registered with it.
struct Side {
    nic: Arc<Nic>,
    arena: Arc<Arena>,
    region: Arc<Region>,
}

impl Side {
    async fn new(device: &str, windows: impl Into<Option<WindowKind>>, piece_bytes: usize) -> Side {
        let nic = Nic::open(device, &NicOptions { windows: windows.into(), ..NicOptions::default() }).await.unwrap();
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
        Buffer { slot, witness: None }
    }

    fn empty(&self, len: usize) -> Buffer {
        let mut slot = self.arena.allocate(len).unwrap();
        slot.fill(0);
        Buffer { slot, witness: None }
    }

    fn watched(&self, len: usize) -> (Buffer, Witness) {
        let (mut buffer, witness) = (self.empty(len), Witness::default());
        buffer.witness = Some(witness.clone());
        (buffer, witness)
    }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
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
    // As they would travel on a connection that is there already.
    let to_client = EndpointAddress::decode(&node_end.local().encode()).unwrap();
    let to_node = EndpointAddress::decode(&client_end.local().encode()).unwrap();
    node_end.connect(&to_node).await.unwrap();
    client_end.connect(&to_client).await.unwrap();
    (node_end, client_end)
}

fn slow() -> EndpointOptions {
    EndpointOptions {
        deadline: LONG,
        connect_deadline: LONG,
        // 2 s: longer than this machine ever sleeps.
        retry_exponent: 19,
        ..EndpointOptions::default()
    }
}

async fn pair(windows: impl Into<Option<WindowKind>> + Copy, options: EndpointOptions) -> Pair {
    let node = Side::new("rxe0", windows, 1 << 30).await;
    let client = Side::new("rxe1", windows, 1 << 30).await;
    let (node_end, client_end) = connected(&node, &client, &options).await;
    Pair { node, client, node_end, client_end }
}

impl Pair {
    /// Replaces the dead endpoints by fresh ones.
    async fn rebuild(&mut self) {
        let (node_end, client_end) = connected(&self.node, &self.client, &slow()).await;
        let node_end = std::mem::replace(&mut self.node_end, node_end);
        let client_end = std::mem::replace(&mut self.client_end, client_end);
        assert!(node_end.close(LONG).await && client_end.close(LONG).await);
    }

    /// Everything is let go of, and nothing got stuck.
    async fn finish(self) {
        let Pair { node, client, node_end, client_end } = self;
        assert!(node_end.close(LONG).await && client_end.close(LONG).await);
        for side in [&node, &client] {
            let stats = side.nic.stats();
            assert_eq!((stats.windows, stats.endpoints, stats.stuck), (0, 0, 0), "{stats:?}");
            assert_eq!(side.arena.used(), 0, "all memory is back");
        }
    }
}

fn in_guest<F: Future<Output = ()>>(test: F) {
    assert!(
        std::env::var_os("LARDER_RDMA_VM").is_some(),
        "this changes the network of its machine: use tests/rdma/run"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { timeout(Duration::from_secs(120), test).await.expect("the test ends") });
}

fn tc(arguments: &str) {
    for device in ["ve0", "ve1"] {
        let arguments = arguments.replace("DEV", device);
        let status = Command::new("tc").args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "tc {arguments}");
    }
}

/// A network that behaves badly until this is dropped.
struct Weather;

impl Weather {
    fn new(netem: &str) -> Weather {
        tc(&format!("qdisc add dev DEV root netem {netem}"));
        Weather
    }

    fn packets_lost(&self) -> u64 {
        let output = Command::new("tc").args(["-s", "qdisc", "show"]).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let mut words = said.split_whitespace();
        let mut lost = 0;
        while words.any(|word| word == "(dropped") {
            lost += words.next().unwrap().trim_end_matches(',').parse::<u64>().unwrap();
        }
        lost
    }
}

impl Drop for Weather {
    fn drop(&mut self) {
        tc("qdisc del dev DEV root");
    }
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Dead(Death::Failed { status: REFUSED, .. }))
}

#[test]
fn devices_are_found_and_pair_up() {
    in_guest(async {
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

/// Windows are made as the device deserves: if a window of type 2 can be left, none is used.
#[test]
fn windows_that_are_not_narrow_are_not_used() {
    in_guest(async {
        let mut pair = pair(WindowKind::Type2, slow()).await;
        let neighbour = pair.node.filled(4096, 1);
        let window = pair.node_end.readable(pair.node.filled(4096, 2), &pair.node.region).await.unwrap();
        let mut range = window.remote();
        range.address = neighbour.span().start().as_ptr() as u64;
        let had = pair.client_end.read(pair.client.empty(4096), &pair.client.region, range).await;
        let narrow = match had {
            Ok(had) => {
                assert_eq!(&had.slot[..], pattern(4096, 1), "it left its window");
                false
            }
            Err(error) => is_refusal(&error),
        };
        let nic = Nic::open("rxe0", &NicOptions::default()).await.unwrap();
        println!("windows of type 2 are narrow here: {narrow}");
        assert_eq!(nic.windows(), if narrow { WindowKind::Type2 } else { WindowKind::Registration });
        assert_eq!((nic.stats().deaths, nic.is_alive()), (0, true), "what was tried leaves no trace");
        drop(neighbour);
        window.withdraw().await.unwrap();
        pair.rebuild().await;
        pair.finish().await;
    });
}

async fn write_and_read_back(pair: &Pair, len: usize, seed: u64) {
    let (node, client) = (&pair.node, &pair.client);
    let window = pair.node_end.writable(node.empty(len), &node.region).await.unwrap();
    let remote = RemoteRange::decode(&window.remote().encode()).unwrap();
    pair.client_end.write(client.filled(len, seed), &client.region, remote).await.unwrap();
    let stored = window.withdraw().await.unwrap();
    assert_eq!(&stored.slot[..], pattern(len, seed), "written: {len}");

    let window = pair.node_end.readable(stored, &node.region).await.unwrap();
    let had = pair.client_end.read(client.empty(len), &client.region, window.remote()).await.unwrap();
    assert_eq!(&had.slot[..], pattern(len, seed), "read: {len}");
    window.withdraw().await.unwrap();
}

#[test]
fn what_is_written_is_read_back() {
    in_guest(async {
        for kind in KINDS {
            let pair = pair(kind, slow()).await;
            for (i, len) in [MIB, MIB, MIB, MIB, 1, 3, 4095, 4097, 65_537, 2 * MIB + 123].into_iter().enumerate() {
                write_and_read_back(&pair, len, i as u64).await;
            }
            let stats = pair.client.nic.stats();
            assert_eq!((stats.reads, stats.writes, stats.deaths), (10, 10, 0));
            assert_eq!(stats.read_bytes, (6 * MIB + 123 + 1 + 3 + 4095 + 4097 + 65_537) as u64);
            assert_eq!(stats.read_bytes, stats.written_bytes);
            pair.finish().await;
        }
    });
}

#[test]
fn many_parts_and_many_tasks_at_a_time() {
    in_guest(async {
        // Far fewer requests than there are parts, so that everything has to wait for its turn.
        let options = EndpointOptions { transfers: 4, chunk_bytes: 10_000, ..slow() };
        let pair = pair(WindowKind::Type2, options).await;
        let sizes = [100_000, 1, 50_001, 9_999, 10_000, 10_001, 123, 70_000];
        let mut windows = Vec::new();
        for (i, len) in sizes.into_iter().enumerate() {
            let window = pair.node_end.readable(pair.node.filled(len, i as u64), &pair.node.region).await.unwrap();
            windows.push(window);
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
        for (had, from) in [(a.unwrap(), 0), (b.unwrap(), 0), (c.unwrap(), 5)] {
            for (i, buffer) in had.iter().enumerate() {
                assert_eq!(&buffer.slot[..], pattern(sizes[from + i], (from + i) as u64));
            }
        }
        for window in windows {
            window.withdraw().await.unwrap();
        }
        pair.finish().await;
    });
}

#[test]
fn polling_and_the_other_device() {
    in_guest(async {
        let options = EndpointOptions { spin: Duration::from_micros(200), ..slow() };
        let kind = WindowKind::Type2;
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
fn memory_may_straddle_pieces_of_a_region() {
    in_guest(async {
        let node = Side::new("rxe0", WindowKind::Type2, 64 << 10).await;
        let client = Side::new("rxe1", WindowKind::Type2, 64 << 10).await;
        let (node_end, client_end) = connected(&node, &client, &slow()).await;
        let pair = Pair { node, client, node_end, client_end };
        write_and_read_back(&pair, 200_000, 8).await;
        pair.finish().await;
    });
}

/// What a peer may not do kills the connection, and changes nothing; a fresh one works.
#[test]
fn a_window_allows_one_thing_on_its_bytes_and_no_other() {
    in_guest(async {
        for kind in KINDS {
            let mut pair = pair(kind, slow()).await;
            let len = 10_000;

            let window = pair.node_end.readable(pair.node.filled(len, 1), &pair.node.region).await.unwrap();
            let refused = pair.client_end.write(pair.client.filled(len, 2), &pair.client.region, window.remote()).await;
            assert!(refused.as_ref().is_err_and(is_refusal), "{:?}", refused.err());
            assert!(pair.client_end.is_dead(), "the connection is dead after an error");
            let after = pair.client_end.write(pair.client.filled(len, 2), &pair.client.region, window.remote()).await;
            assert!(after.as_ref().is_err_and(is_refusal), "and stays so: {:?}", after.err());
            let kept = window.withdraw().await.unwrap();
            assert_eq!(&kept.slot[..], pattern(len, 1), "nothing was written");
            drop(kept);
            pair.rebuild().await;

            let window = pair.node_end.writable(pair.node.filled(len, 1), &pair.node.region).await.unwrap();
            let (buffer, witness) = pair.client.watched(len);
            let refused = pair.client_end.read(buffer, &pair.client.region, window.remote()).await;
            assert!(refused.as_ref().is_err_and(is_refusal), "{:?}", refused.err());
            assert_eq!(witness.wait().await, vec![0; len], "nothing was read");
            window.withdraw().await.unwrap();

            pair.rebuild().await;
            write_and_read_back(&pair, len, 3).await;
            pair.finish().await;
        }
    });
}

/// The same for bytes beside the window, with windows as the device deserves them.
#[test]
fn a_window_ends_where_its_bytes_end() {
    in_guest(async {
        let mut pair = pair(None, slow()).await;
        let len = 10_000;
        // One byte in front of the window, one behind it, and another key.
        for (shift, more, key) in [(-1, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)] {
            pair.rebuild().await;
            let window = pair.node_end.readable(pair.node.filled(len, 1), &pair.node.region).await.unwrap();
            let range = window.remote();
            let outside = RemoteRange {
                address: range.address.wrapping_add_signed(shift),
                len: range.len + more,
                key: range.key.wrapping_add(key),
            };
            let (buffer, witness) = pair.client.watched(outside.len as usize);
            let refused = pair.client_end.read(buffer, &pair.client.region, outside).await;
            assert!(refused.as_ref().is_err_and(is_refusal), "{shift} {more} {key}: {:?}", refused.err());
            assert!(witness.wait().await.iter().all(|&byte| byte == 0), "nothing was read");
            window.withdraw().await.unwrap();
        }
        pair.rebuild().await;
        write_and_read_back(&pair, len, 3).await;
        pair.finish().await;
    });
}

#[test]
fn a_window_is_good_for_one_connection() {
    in_guest(async {
        let mut pair = pair(WindowKind::Type2, slow()).await;
        let (other_node_end, other_client_end) = connected(&pair.node, &pair.client, &slow()).await;
        let window = pair.node_end.readable(pair.node.filled(5000, 1), &pair.node.region).await.unwrap();
        let stolen = other_client_end.read(pair.client.empty(5000), &pair.client.region, window.remote()).await;
        assert!(stolen.as_ref().is_err_and(is_refusal), "{:?}", stolen.err());
        let had = pair.client_end.read(pair.client.empty(5000), &pair.client.region, window.remote()).await.unwrap();
        assert_eq!(&had.slot[..], pattern(5000, 1));
        drop(had);
        window.withdraw().await.unwrap();
        assert!(other_node_end.close(LONG).await && other_client_end.close(LONG).await);
        pair.rebuild().await;
        pair.finish().await;
    });
}

#[test]
fn a_withdrawn_key_opens_nothing() {
    in_guest(async {
        for kind in KINDS {
            let mut pair = pair(kind, slow()).await;
            let len = 20_000;
            // Withdrawn by its owner, and by being dropped.
            for dropped in [false, true] {
                let mut buffer = pair.node.filled(len, 1);
                let witness = Witness::default();
                buffer.witness = Some(witness.clone());
                let window = pair.node_end.readable(buffer, &pair.node.region).await.unwrap();
                let old = window.remote();
                let had = pair.client_end.read(pair.client.empty(len), &pair.client.region, old).await.unwrap();
                assert_eq!(&had.slot[..], pattern(len, 1), "the key was good");
                drop(had);
                if dropped {
                    drop(window);
                    assert_eq!(witness.wait().await, pattern(len, 1));
                } else {
                    drop(window.withdraw().await.unwrap());
                }
                // The same memory, with other bytes in it.
                let secret = pair.node.filled(len, 99);
                assert_eq!(secret.span().start().as_ptr() as u64, old.address, "the slot was used again");
                let (buffer, witness) = pair.client.watched(len);
                let refused = pair.client_end.read(buffer, &pair.client.region, old).await;
                assert!(refused.as_ref().is_err_and(is_refusal), "{:?}", refused.err());
                assert_eq!(witness.wait().await, vec![0; len], "nothing was read");
                let refused = pair.client_end.write(pair.client.empty(len), &pair.client.region, old).await;
                assert!(refused.is_err());
                assert_eq!(&secret.slot[..], pattern(len, 99), "nothing was written");
                drop(secret);
                pair.rebuild().await;
            }
            pair.finish().await;
        }
    });
}

#[test]
fn windows_are_bounded_and_their_keys_are_used_again_late() {
    in_guest(async {
        for kind in KINDS {
            let pair = pair(kind, EndpointOptions { windows: 2, ..slow() }).await;
            let open = |seed| pair.node_end.readable(pair.node.filled(64, seed), &pair.node.region);
            let (first, second) = (open(1).await.unwrap(), open(2).await.unwrap());
            assert_eq!(open(3).await.err(), Some(Error::TooManyWindows));
            assert_ne!(first.remote().key, second.remote().key);
            first.withdraw().await.unwrap();
            let mut last = second;
            for i in 0..600 {
                let window: Window<Buffer> = open(i).await.unwrap();
                assert_ne!(window.remote().key, last.remote().key);
                if i % 100 == 0 {
                    let had = pair.client_end.read(pair.client.empty(64), &pair.client.region, window.remote()).await;
                    assert_eq!(&had.unwrap().slot[..], pattern(64, i));
                }
                last.withdraw().await.unwrap();
                last = window;
            }
            last.withdraw().await.unwrap();
            pair.finish().await;
        }
    });
}

/// Memory of a transfer that nobody waits for any more is let go of when the transfer is done, and by then it is whole.
#[test]
fn a_dropped_future_does_not_free_memory() {
    in_guest(async {
        let pair = pair(WindowKind::Type2, slow()).await;
        let len = MIB;
        let window = pair.node_end.readable(pair.node.filled(len, 4), &pair.node.region).await.unwrap();
        let (buffer, witness) = pair.client.watched(len);
        {
            let _weather = Weather::new("delay 300ms limit 100000");
            let read = pair.client_end.read(buffer, &pair.client.region, window.remote());
            assert!(timeout(Duration::from_millis(100), read).await.is_err(), "it is under way");
            assert!(witness.last_words().is_none(), "the device has it still");
            assert_eq!(pair.client.nic.stats().reads, 0);
            assert_eq!(witness.wait().await, pattern(len, 4), "it came to its end all the same");
            assert_eq!(pair.client.nic.stats().reads, 1);
        }
        assert!(!pair.client_end.is_dead());
        window.withdraw().await.unwrap();
        pair.finish().await;
    });
}

#[test]
fn a_peer_that_dies_in_a_transfer_is_an_error_in_time() {
    in_guest(async {
        // 33 ms, six times again.
        let options = EndpointOptions { retry_exponent: 13, ..slow() };
        let pair = pair(WindowKind::Type2, options).await;
        let Pair { node, client, node_end, client_end } = pair;
        let len = 32 * MIB;
        let window = node_end.readable(node.filled(len, 4), &node.region).await.unwrap();
        let remote = window.remote();
        let (buffer, witness) = client.watched(len);
        let begin = Instant::now();
        let end = Arc::new(client_end);
        let reader = tokio::spawn({
            let (end, region) = (end.clone(), client.region.clone());
            async move { end.read(buffer, &region, remote).await.map(drop) }
        });
        sleep(Duration::from_millis(50)).await;
        assert!(!reader.is_finished() && witness.last_words().is_none(), "it is under way");
        assert!(node_end.close(LONG).await, "the node lets go of everything");
        drop(window.withdraw().await.unwrap());
        let failed = reader.await.unwrap();
        assert!(matches!(failed, Err(Error::Dead(Death::Failed { .. }))), "{failed:?}");
        assert!(begin.elapsed() < LONG, "before its deadline");
        witness.wait().await;
        assert!(Arc::into_inner(end).unwrap().close(LONG).await);
        assert_eq!((node.arena.used(), client.arena.used()), (0, 0));
        assert_eq!((node.nic.stats().stuck, client.nic.stats().stuck), (0, 0));
    });
}

#[test]
fn a_deadline_ends_the_waiting_and_then_the_connection() {
    in_guest(async {
        // The device itself would go on for a minute.
        let deadline = Duration::from_millis(500);
        let options = EndpointOptions { retry_exponent: 21, deadline, ..slow() };
        for patient in [true, false] {
            let pair = pair(WindowKind::Type2, options.clone()).await;
            let window = pair.node_end.readable(pair.node.filled(MIB, 4), &pair.node.region).await.unwrap();
            let (buffer, witness) = pair.client.watched(MIB);
            let weather = Weather::new("loss 100%");
            let begin = Instant::now();
            let read = pair.client_end.read(buffer, &pair.client.region, window.remote());
            if patient {
                assert_eq!(read.await.err(), Some(Error::Dead(Death::Deadline)));
                assert!(begin.elapsed() >= deadline && begin.elapsed() < LONG);
            } else {
                // The deadline holds for a transfer that nobody waits for, too.
                assert!(timeout(deadline / 5, read).await.is_err());
            }
            assert_eq!(witness.wait().await, vec![0; MIB], "let go of when the device had no use for it");
            assert_eq!(pair.client_end.death(), Some(Death::Deadline));
            drop(weather);
            window.withdraw().await.unwrap();
            pair.finish().await;
        }
    });
}

#[test]
fn lost_packets_change_nothing() {
    in_guest(async {
        let pair = pair(WindowKind::Type2, slow()).await;
        {
            let weather = Weather::new("loss 2%");
            let mut seed = 0;
            while seed < 2 || weather.packets_lost() == 0 {
                write_and_read_back(&pair, MIB / 4, seed).await;
                seed += 1;
            }
        }
        pair.finish().await;
    });
}

#[test]
fn what_cannot_be_done_is_refused() {
    in_guest(async {
        let pair = pair(WindowKind::Type2, slow()).await;
        let (node, client) = (&pair.node, &pair.client);
        let remote = RemoteRange { address: 4096, len: 100, key: 1 };
        let foreign = pair.client_end.read(node.empty(100), &client.region, remote).await;
        assert_eq!(foreign.err(), Some(Error::NotRegistered), "memory of another arena");
        let foreign = pair.client_end.read(node.empty(100), &node.region, remote).await;
        assert_eq!(foreign.err(), Some(Error::NotRegistered), "a region of another device");
        let foreign = pair.node_end.readable(client.empty(100), &node.region).await;
        assert_eq!(foreign.err(), Some(Error::NotRegistered));
        let longer = pair.client_end.read(client.empty(101), &client.region, remote).await;
        assert!(matches!(longer, Err(Error::Invalid(_))));
        let none = pair.client_end.read_all(Vec::<(Buffer, RemoteRange)>::new(), &client.region).await;
        assert!(matches!(none, Err(Error::Invalid(_))));

        let lonely = Endpoint::new(&client.nic, slow()).unwrap();
        let early = lonely.read(client.empty(100), &client.region, remote).await;
        assert_eq!(early.err(), Some(Error::NotConnected));
        assert_eq!(lonely.readable(client.empty(100), &client.region).await.err(), Some(Error::NotConnected));
        assert!(!lonely.is_dead() && lonely.close(LONG).await);
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
        assert!(!pair.client_end.is_dead() && !pair.node_end.is_dead(), "none of this hurt the connection");
        write_and_read_back(&pair, 100, 1).await;
        pair.finish().await;
    });
}

/// A runtime that ends takes its connections with it, and their memory comes back.
#[test]
fn the_end_of_the_runtime_lets_go_of_everything() {
    in_guest(async {});
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let (arenas, witness, stats) = runtime.block_on(async {
        let pair = pair(WindowKind::Type2, slow()).await;
        let window = pair.node_end.readable(pair.node.filled(32 * MIB, 4), &pair.node.region).await.unwrap();
        let (buffer, witness) = pair.client.watched(32 * MIB);
        let arenas = [pair.node.arena.clone(), pair.client.arena.clone()];
        let nics = [pair.node.nic.clone(), pair.client.nic.clone()];
        let flag = ended.clone();
        tokio::spawn(async move {
            let _ = pair.client_end.read(buffer, &pair.client.region, window.remote()).await;
            flag.store(true, Ordering::SeqCst);
            drop((pair, window));
        });
        sleep(Duration::from_millis(50)).await;
        (arenas, witness, nics)
    });
    assert!(!ended.load(Ordering::SeqCst), "the transfer is under way");
    runtime.shutdown_timeout(LONG);
    assert!(witness.last_words().is_some());
    assert_eq!(arenas.map(|arena| arena.used()), [0, 0]);
    for nic in stats {
        assert_eq!((nic.stats().endpoints, nic.stats().windows, nic.stats().stuck), (0, 0, 0));
    }
}

/// The whole way of a page: a put by one-sided writes, sealed after its window is withdrawn and its checksum is right; then a get
/// under a lease, checked again at the far end.
#[test]
fn a_page_is_put_and_had_under_leases() {
    in_guest(async {
        for kind in KINDS {
            let pair = pair(kind, slow()).await;
            let part_bytes = 300_000;
            let parts = [pattern(part_bytes, 1), pattern(part_bytes, 2), pattern(part_bytes, 3)];
            let page: Vec<u8> = parts.concat();
            let checksum = crc32fast::hash(&page);

            // The node reserves a slot, and tells where and with which key. 20 bytes on the wire.
            let reserved = pair.node.empty(page.len());
            let put_lease = pair.node_end.writable(reserved, &pair.node.region).await.unwrap();
            let grant = put_lease.remote().encode();

            // The client writes the parts, in any order, all at once.
            let grant = RemoteRange::decode(&grant).unwrap();
            let writes = [2, 0, 1].map(|i| {
                let mut buffer = pair.client.empty(part_bytes);
                buffer.slot.copy_from_slice(&parts[i]);
                (buffer, grant.part((i * part_bytes) as u64, part_bytes as u64).unwrap())
            });
            pair.client_end.write_all(writes.into(), &pair.client.region).await.unwrap();

            // It says so, with the checksum. The node withdraws first, so that nothing changes any more; then it looks.
            let slot = put_lease.withdraw().await.unwrap();
            assert_eq!(crc32fast::hash(&slot.slot), checksum, "sealed");

            // Two clients (here one, twice) get it under leases of their own, which can be given back in any order.
            let sealed = Arc::new(slot);
            let first = pair.node_end.readable(Sealed(sealed.clone()), &pair.node.region).await.unwrap();
            let second = pair.node_end.readable(Sealed(sealed.clone()), &pair.node.region).await.unwrap();
            for lease in [second, first] {
                let had =
                    pair.client_end.read(pair.client.empty(page.len()), &pair.client.region, lease.remote()).await;
                assert_eq!(crc32fast::hash(&had.unwrap().slot), checksum);
                lease.withdraw().await.unwrap();
            }
            assert_eq!(Arc::strong_count(&sealed), 1, "no lease is left");
            drop(sealed);
            pair.finish().await;
        }
    });
}

/// A page that nobody writes any more.
struct Sealed(Arc<Buffer>);

// SAFETY: shared and not mutable, and the memory lives as long as this.
unsafe impl Bytes for Sealed {
    fn span(&self) -> Span {
        self.0.span()
    }
}
