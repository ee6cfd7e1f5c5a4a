use crate::{Door, Lender, Lent, Memory, Tenure, attach, read_only};
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::UnixStream;

const BYTES: usize = 1 << 20;

fn name(test: &str) -> String {
    format!("larder-test-{}-{test}", std::process::id())
}

/// A file as an arena is one.
fn arena() -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&(0..BYTES).map(|at| (at / 4096) as u8).collect::<Vec<u8>>()).unwrap();
    file
}

async fn admit(door: &Door, arena: &std::fs::File, bytes: u64) -> (UnixStream, Tenure) {
    let guest = door.accept().await.unwrap();
    let tenure = Tenure::begin(&guest, read_only(arena.as_fd()).unwrap().as_fd(), bytes).await.unwrap();
    (guest, tenure)
}

#[tokio::test]
async fn bytes_are_read_in_place_and_the_tenure_lasts_as_long_as_anybody_can_look() {
    let (door, arena) = (Door::open(&name("tenure")).unwrap(), arena());
    let far = name("tenure");
    let (attached, (guest, tenure)) = tokio::join!(attach(&far, None), admit(&door, &arena, BYTES as u64));
    let (stream, window) = attached.unwrap();
    let released = Arc::new(AtomicUsize::new(0));
    let hold = |offset, len| {
        let released = released.clone();
        window.hold(offset, len, move || {
            released.fetch_add(1, Ordering::Relaxed);
        })
    };
    let held = hold(8192, 5000).unwrap();
    assert!(held[..4096].iter().all(|&byte| byte == 2) && held[4096..].iter().all(|&byte| byte == 3));
    assert!(hold(0, BYTES).is_some() && released.load(Ordering::Relaxed) == 1);
    for (offset, len) in [(1, BYTES), (u64::MAX, 1), (BYTES as u64 + 1, 0), (8, usize::MAX)] {
        assert!(hold(offset, len).is_none(), "{offset} {len}");
    }
    let mut over = std::pin::pin!(tenure.over());
    // Neither the end of the connection nor that of the window ends it while bytes are held.
    drop((stream, guest, window));
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut over).await.is_err());
    assert_eq!(held[0], 2);
    drop(held);
    tokio::time::timeout(Duration::from_secs(5), over).await.expect("over when the last bytes are let go of");
    assert_eq!(released.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn an_arena_longer_than_its_file_is_refused() {
    let (door, arena) = (Door::open(&name("long")).unwrap(), arena());
    let far = name("long");
    let (attached, _) = tokio::join!(attach(&far, None), admit(&door, &arena, BYTES as u64 + 4096));
    assert_eq!(attached.unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    assert!(attach(&name("nobody"), None).await.is_err());
}

#[test]
fn what_is_handed_over_cannot_be_written() {
    let arena = arena();
    let shown = std::fs::File::from(read_only(arena.as_fd()).unwrap());
    assert!((&shown).write_all(b"x").is_err());
}

#[tokio::test]
async fn what_a_guest_lends_is_read_and_what_says_nothing_lends_nothing() {
    let (door, arena, far) = (Door::open(&name("lent")).unwrap(), arena(), name("lent"));
    let memory = Memory::new(10_000).unwrap();
    let mut block = memory.allocate(5000).unwrap();
    block.fill(7);
    let admitting = async {
        let (guest, _tenure) = admit(&door, &arena, BYTES as u64).await;
        Lent::receive(&guest).await.unwrap()
    };
    let (attached, lent) = tokio::join!(attach(&far, Some(&memory)), admitting);
    let (stream, lent) = (attached.unwrap().0, lent.expect("it lends"));
    let mut seen = vec![0; 5000];
    lent.read(block.offset(), &mut seen).unwrap();
    assert!(seen.iter().all(|&byte| byte == 7));
    let length = memory.span().1 as u64;
    for offset in [length - 4999, length, u64::MAX] {
        assert!(lent.read(offset, &mut seen).is_err(), "from {offset}");
    }
    // As long as it is looked at, it is there.
    drop((stream, block, memory));
    lent.read(0, &mut seen).unwrap();

    let admitting = async {
        let (guest, _tenure) = admit(&door, &arena, BYTES as u64).await;
        Lent::receive(&guest).await.unwrap()
    };
    let come = async {
        let (mut stream, _) = attach(&far, None).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"LRDR\x01 is how a frame begins").await.unwrap();
        stream
    };
    let (_stream, none) = tokio::join!(come, admitting);
    assert!(none.is_none());
}
