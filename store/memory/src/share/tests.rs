use super::{ArenaListener, ArenaSession, PeerMemory, PeerMemoryFile, SharedMemory, attach, read_only};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::UnixStream;

const BYTES: usize = 1 << 20;

fn name(test: &str) -> String {
    format!("larder-test-{}-{test}", std::process::id())
}

/// A file whose byte at each offset is the number of its page, like an arena with known content.
fn arena() -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&(0..BYTES).map(|at| (at / 4096) as u8).collect::<Vec<u8>>()).unwrap();
    file
}

async fn admit(listener: &ArenaListener, arena: &std::fs::File, bytes: u64) -> (UnixStream, ArenaSession) {
    let peer = listener.accept().await.unwrap();
    let session = ArenaSession::start(&peer, read_only(arena.as_fd()).unwrap().as_fd(), bytes).await.unwrap();
    (peer, session)
}

#[tokio::test]
async fn session_lasts_until_the_last_held_bytes_are_dropped() {
    let listener = ArenaListener::open(&name("session")).unwrap();
    let arena = arena();
    let address = name("session");
    let (attached, (peer, session)) = tokio::join!(attach(&address, None), admit(&listener, &arena, BYTES as u64));
    let (stream, map) = attached.unwrap();
    let released = Arc::new(AtomicUsize::new(0));
    let hold = |offset, len| {
        let released = released.clone();
        map.hold(offset, len, move || {
            released.fetch_add(1, Ordering::Relaxed);
        })
    };
    let held = hold(8192, 5000).unwrap();
    assert!(held[..4096].iter().all(|&byte| byte == 2) && held[4096..].iter().all(|&byte| byte == 3));
    assert!(hold(0, BYTES).is_some() && released.load(Ordering::Relaxed) == 1);
    for (offset, len) in [(1, BYTES), (u64::MAX, 1), (BYTES as u64 + 1, 0), (8, usize::MAX)] {
        assert!(hold(offset, len).is_none(), "{offset} {len}");
    }
    let mut over = std::pin::pin!(session.ended());
    // Neither the end of the connection nor that of the map ends the session while bytes are held.
    drop((stream, peer, map));
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut over).await.is_err());
    assert_eq!(held[0], 2);
    drop(held);
    tokio::time::timeout(Duration::from_secs(5), over).await.expect("the session ends with the last held bytes");
    assert_eq!(released.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn files_reach_the_caller_that_expects_their_number() {
    let listener = ArenaListener::open(&name("files")).unwrap();
    let (arena, address) = (arena(), name("files"));
    let (attached, (_peer, session)) = tokio::join!(attach(&address, None), admit(&listener, &arena, BYTES as u64));
    let (_stream, map) = attached.unwrap();
    let file = |text: &str| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    };
    let read = |descriptor: OwnedFd| {
        let mut bytes = [0; 3];
        std::fs::File::from(descriptor).read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    };
    let (first, second) = (map.expect_files(1).unwrap(), map.expect_files(2).unwrap());
    assert!(first.take().unwrap().is_empty());
    let (a, b) = (file("abc"), file("def"));
    session.send_files(2, &[b.as_fd(), a.as_fd()]).unwrap();
    session.send_files(7, &[a.as_fd()]).unwrap();
    session.send_files(1, &[a.as_fd()]).unwrap();
    let texts = |files: Vec<OwnedFd>| files.into_iter().map(read).collect::<Vec<String>>();
    assert_eq!(texts(first.take().unwrap()), ["abc"]);
    assert_eq!(texts(second.take().unwrap()), ["def", "abc"]);
    assert!(second.take().unwrap().is_empty());
    // A peer that receives nothing does not fill the kernel with descriptors.
    let sent = (0..1000).take_while(|number| session.send_files(*number, &[a.as_fd(); 16]).is_ok()).count();
    assert!((1..100).contains(&sent), "{sent}");
    drop((first, second, map));
    tokio::time::timeout(Duration::from_secs(60), session.ended()).await.expect("no process has the session");
}

#[tokio::test]
async fn arena_longer_than_its_file_is_refused() {
    let listener = ArenaListener::open(&name("long")).unwrap();
    let arena = arena();
    let address = name("long");
    let (attached, _) = tokio::join!(attach(&address, None), admit(&listener, &arena, BYTES as u64 + 4096));
    assert_eq!(attached.unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    assert!(attach(&name("missing"), None).await.is_err());
}

#[test]
fn handed_over_file_is_read_only() {
    let arena = arena();
    let shown = std::fs::File::from(read_only(arena.as_fd()).unwrap());
    assert!((&shown).write_all(b"x").is_err());
}

#[tokio::test]
async fn node_reads_shared_memory_of_a_client_that_offers_it() {
    let (listener, arena, address) = (ArenaListener::open(&name("shared")).unwrap(), arena(), name("shared"));
    let memory = SharedMemory::new(10_000).unwrap();
    let mut block = memory.allocate(5000).unwrap();
    block.fill(7);
    let admitting = async {
        let (peer, _session) = admit(&listener, &arena, BYTES as u64).await;
        PeerMemoryFile::receive(&peer).await.unwrap()
    };
    let (attached, shared) = tokio::join!(attach(&address, Some(&memory)), admitting);
    let (stream, shared) = (attached.unwrap().0, shared.expect("the client shares memory"));
    let mut seen = vec![0; 5000];
    shared.read(block.offset(), &mut seen).unwrap();
    assert!(seen.iter().all(|&byte| byte == 7));
    let length = memory.span().1 as u64;
    for offset in [length - 4999, length, u64::MAX] {
        assert!(shared.read(offset, &mut seen).is_err(), "from {offset}");
    }
    // The file stays readable while the node holds its descriptor.
    drop((stream, block, memory));
    shared.read(0, &mut seen).unwrap();

    let admitting = async {
        let (peer, _session) = admit(&listener, &arena, BYTES as u64).await;
        PeerMemoryFile::receive(&peer).await.unwrap()
    };
    let connect_without_memory = async {
        let (mut stream, _) = attach(&address, None).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"LRDR\x01 starts a frame").await.unwrap();
        stream
    };
    let (_stream, none) = tokio::join!(connect_without_memory, admitting);
    assert!(none.is_none());
}
