use crate::{Door, Tenure, attach, read_only};
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
    let (attached, (guest, tenure)) = tokio::join!(attach(&far), admit(&door, &arena, BYTES as u64));
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
    let (attached, _) = tokio::join!(attach(&far), admit(&door, &arena, BYTES as u64 + 4096));
    assert_eq!(attached.unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    assert!(attach(&name("nobody")).await.is_err());
}

#[test]
fn what_is_handed_over_cannot_be_written() {
    let arena = arena();
    let shown = std::fs::File::from(read_only(arena.as_fd()).unwrap());
    assert!((&shown).write_all(b"x").is_err());
}
