//! Writes, reads, forgets and restarts on real files.

use crate::common::*;
use larder_log::{L3, L3Error};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn written_pages_are_read_before_and_after_reopen() {
    let dir = temp();
    let arena = arena();
    let (l3, report) = open(dir.path(), 8, &arena).await;
    assert!(report.created);
    let sizes = [1, 4095, 4096, 4097, 65_536, 65_537, 300_000];
    for (n, &len) in sizes.iter().enumerate() {
        put(&l3, &arena, n as u32, 10 + n as u64, len).await;
    }
    let known = l3.find(&id(6)).unwrap();
    assert_eq!((known.payload_bytes, known.generation), (300_000, 16));
    for n in 0..sizes.len() as u32 {
        assert_eq!(get(&l3, n).await, Some(10 + u64::from(n)));
    }
    assert_eq!(get(&l3, 99).await, None);
    l3.close().await;
    assert!(matches!(l3.read(&id(0), deadline()).await, Err(L3Error::Closed)));

    let (l3, report) = open(dir.path(), 8, &arena).await;
    assert_eq!((report.created, report.pages, report.torn_records), (false, 7, 0));
    for n in 0..sizes.len() as u32 {
        assert_eq!(get(&l3, n).await, Some(10 + u64::from(n)));
    }
    l3.close().await;
    drop(l3);
    assert_eq!(arena.used(), 0, "all memory came back");
}

/// A segment is not reused while a record of it is held, and the log goes on afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_record_keeps_its_bytes_and_the_log_continues_after_it() {
    let (dir, arena) = (temp(), arena());
    let (l3, _) = open(dir.path(), 3, &arena).await;
    put(&l3, &arena, 0, 1, 300_000).await;
    let held = l3.hold_at(&l3.lookup(&id(0)).unwrap(), deadline()).await.unwrap().unwrap();
    let file = std::fs::File::from(held.open_file().await.unwrap().as_fd().try_clone_to_owned().unwrap());
    let read = || {
        // Whole blocks in aligned memory, as direct I/O needs them.
        let mut bytes = vec![0u8; 300_000usize.next_multiple_of(4096) + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        let end = start + 300_000usize.next_multiple_of(4096);
        file.read_exact_at(&mut bytes[start..end], held.payload_offset()).unwrap();
        bytes[start..start + 300_000].to_vec()
    };
    assert!(held.meta().verify(&id(0), &read()).is_ok());
    // More than the log holds. The writers wait when they need the held segment.
    let writer = tokio::spawn({
        let (l3, arena) = (l3.clone(), arena.clone());
        async move {
            for n in 1..30 {
                put(&l3, &arena, n, 1, 300_000).await;
            }
        }
    });
    eventually("the reclaim of the held segment", || l3.lookup(&id(0)).is_none()).await;
    assert!(held.meta().verify(&id(0), &read()).is_ok(), "the segment was reused under a hold");
    assert!(!writer.is_finished());
    drop(held);
    writer.await.unwrap();
    assert_eq!(get(&l3, 29).await, Some(1));
    l3.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_of_the_process_keeps_written_pages() {
    let (dir, copy, arena) = (temp(), temp(), arena());
    let (l3, _) = open(dir.path(), 8, &arena).await;
    for n in 0..30 {
        put(&l3, &arena, n, 1, 100_000).await;
    }
    copy_as_after_a_crash(dir.path(), copy.path());
    let (again, report) = open(copy.path(), 8, &arena).await;
    assert_eq!((report.pages, report.torn_records), (30, 0));
    for n in 0..30 {
        assert_eq!(get(&again, n).await, Some(1));
    }
    // The original log is dropped without close, and reopened at once.
    drop(l3);
    let (l3, report) = open(dir.path(), 8, &arena).await;
    assert_eq!(report.pages, 30);
    assert_eq!(get(&l3, 29).await, Some(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_never_exceed_the_capacity() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 5, &arena).await;
    for n in 0..300 {
        put(&l3, &arena, n, 1, 60_000).await;
        // A file may get its final name between the listing and the look at it.
        let sizes = std::fs::read_dir(dir.path()).unwrap().map(|entry| match entry.unwrap().metadata() {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => 0,
            Err(error) => panic!("{error}"),
        });
        let files: u64 = sizes.sum();
        assert!(files <= 5 * MIB + 16_384, "{files} bytes");
    }
    let stats = l3.stats();
    assert!(stats.evicted_pages > 200 && stats.pages + stats.evicted_pages == 300, "{stats:?}");
    assert!(stats.bytes_on_device <= stats.bytes_capacity && stats.bytes_used <= stats.bytes_on_device);
    assert_eq!(get(&l3, 299).await, Some(1));
    l3.close().await;
    let (_, report) = open(dir.path(), 5, &arena).await;
    assert!(report.pages >= stats.pages, "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_page_stays_a_miss_until_put_again() {
    let (dir, copy, arena) = (temp(), temp(), arena());
    let (l3, _) = open(dir.path(), 8, &arena).await;
    for n in 0..20 {
        put(&l3, &arena, n, 1, 50_000).await;
    }
    let some: Vec<_> = (0..10).map(id).chain([id(77)]).collect();
    assert_eq!(l3.forget(&some, deadline()).await.unwrap(), 10);
    assert_eq!(l3.forget(&some, deadline()).await.unwrap(), 0);
    put(&l3, &arena, 3, 2, 50_000).await;
    copy_as_after_a_crash(dir.path(), copy.path());
    for l3 in [l3, open(copy.path(), 8, &arena).await.0] {
        for n in 0..20 {
            let expected = if n == 3 { Some(2) } else { (n >= 10).then_some(1) };
            assert_eq!(get(&l3, n).await, expected, "page {n}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn same_put_is_written_once_and_newer_put_replaces_it() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 8, &arena).await;
    put(&l3, &arena, 1, 1, 50_000).await;
    let used = l3.stats().bytes_used;
    put(&l3, &arena, 1, 1, 50_000).await;
    assert_eq!((l3.stats().bytes_used, l3.stats().writes), (used, 1));
    put(&l3, &arena, 1, 2, 70_000).await;
    assert_eq!(get(&l3, 1).await, Some(2));
    l3.close().await;
    let (l3, _) = open(dir.path(), 8, &arena).await;
    assert_eq!(get(&l3, 1).await, Some(2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn directory_is_locked_by_one_log() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 4, &arena).await;
    let refused = L3::open(options(dir.path(), 4), arena.clone()).await.unwrap_err();
    assert!(matches!(refused, L3Error::Open(_)) && refused.to_string().contains("in use"), "{refused}");
    put(&l3, &arena, 1, 1, 9).await;
    l3.close().await;
    open(dir.path(), 4, &arena).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn capacity_may_change_between_starts() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 8, &arena).await;
    for n in 0..80 {
        put(&l3, &arena, n, 1, 60_000).await;
    }
    let forgotten: Vec<_> = (70..75).map(id).collect();
    assert_eq!(l3.forget(&forgotten, deadline()).await.unwrap(), 5);
    l3.close().await;
    let (l3, report) = open(dir.path(), 3, &arena).await;
    assert!(segments(dir.path()).len() <= 3 && report.segments_removed > 0, "{report:?}");
    assert_eq!((get(&l3, 79).await, get(&l3, 72).await, get(&l3, 0).await), (Some(1), None, None));
    for n in 100..140 {
        put(&l3, &arena, n, 1, 60_000).await;
    }
    assert!(segments(dir.path()).len() <= 3);
    l3.close().await;
    let (l3, _) = open(dir.path(), 10, &arena).await;
    assert_eq!(get(&l3, 139).await, Some(1));
    for n in 200..300 {
        put(&l3, &arena, n, 1, 60_000).await;
    }
    assert!(segments(dir.path()).len() > 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_while_segments_are_reclaimed_are_exact_or_a_miss() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 4, &arena).await;
    let readers: Vec<_> = (0..4u32)
        .map(|reader| {
            let l3 = l3.clone();
            tokio::spawn(async move {
                let mut hits = 0;
                let mut turn = reader;
                while l3.find(&id(399)).is_none() {
                    turn = turn.wrapping_mul(1664525).wrapping_add(1013904223);
                    hits += u32::from(get(&l3, (turn >> 8) % 400).await.is_some());
                    tokio::task::yield_now().await;
                }
                hits
            })
        })
        .collect();
    let writers: Vec<_> = (0..4u32)
        .map(|writer| {
            let l3 = l3.clone();
            let arena = arena.clone();
            tokio::spawn(async move {
                for n in (writer..399).step_by(4) {
                    put(&l3, &arena, n, 1, 40_000 + n as usize).await;
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
    put(&l3, &arena, 399, 1, 100).await;
    let mut hits = 0;
    for reader in readers {
        hits += reader.await.unwrap();
    }
    let stats = l3.stats();
    assert!(hits > 0 && stats.evicted_pages > 0, "{hits} hits, {stats:?}");
    assert_eq!((stats.corrupt, stats.io_errors), (0, 0), "nothing was reused under a reader");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passed_deadline_leaks_no_memory() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 4, &arena).await;
    for n in 0..200 {
        let (meta, slot) = page(&arena, n, 1, 100_000);
        let soon = Instant::now() + Duration::from_micros(u64::from(n) * 5);
        match l3.write(meta, slot, soon).await {
            Ok(()) | Err(L3Error::Deadline(_)) => {}
            Err(other) => panic!("{other}"),
        }
        let _ = l3.read(&id(n), Instant::now() + Duration::from_micros(u64::from(n))).await;
    }
    put(&l3, &arena, 1000, 1, 1000).await;
    assert_eq!(get(&l3, 1000).await, Some(1));
    l3.close().await;
    let stats = l3.stats();
    assert_eq!((stats.write_queue_bytes, stats.corrupt), (0, 0));
    drop(l3);
    assert_eq!(arena.used(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_and_inconsistent_pages_are_refused() {
    let dir = temp();
    let arena = arena();
    let (l3, _) = open(dir.path(), 4, &arena).await;
    let (meta, slot) = page(&arena, 1, 1, l3.page_bytes_max() + 1);
    assert!(matches!(l3.write(meta, slot, deadline()).await, Err(L3Error::Append(_))));
    put(&l3, &arena, 2, 1, l3.page_bytes_max()).await;
    assert_eq!(get(&l3, 2).await, Some(1));
    let (meta, _) = page(&arena, 3, 1, 100);
    let (_, slot) = page(&arena, 3, 1, 101);
    assert!(matches!(l3.write(meta, slot, deadline()).await, Err(L3Error::Invalid(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_works_on_tmpfs() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
    let arena = arena();
    let (l3, _) = open(dir.path(), 4, &arena).await;
    for n in 0..100 {
        put(&l3, &arena, n, 1, 60_000).await;
    }
    assert_eq!(get(&l3, 99).await, Some(1));
    l3.close().await;
    let (l3, _) = open(dir.path(), 4, &arena).await;
    assert_eq!(get(&l3, 99).await, Some(1));
}

/// A client maps the arena of its machine. With the log's identity it could forge records.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn identity_of_the_log_stays_out_of_shared_memory() {
    use std::os::unix::fs::FileExt;
    let dir = temp();
    let arena = larder_memory::Arena::with(32 << 20, larder_memory::ArenaSharing::Always).unwrap();
    let file = std::fs::File::from(arena.file().unwrap().try_clone_to_owned().unwrap());
    // Puts, a footer, recovery by headers and by footers, reads, copies and a scrub.
    for round in 0..3 {
        let (l3, _) = open(dir.path(), 4, &arena).await;
        for n in 0..60 {
            put(&l3, &arena, n, round + 1, 60_000).await;
            l3.touch(&[id(n / 2)]);
        }
        let found = (0..60).filter(|&n| l3.find(&id(n)).is_some()).collect::<Vec<u32>>();
        for n in found {
            get(&l3, n).await;
        }
        l3.scrub_now();
        eventually("a pass", || l3.scrub().passes > round).await;
        l3.close().await;
    }
    let identity = &std::fs::read(dir.path().join("larder.sb")).unwrap()[12..28];
    let (_, kept) = page(&arena, 99, 1, 64);
    let mut mapped = vec![0; arena.capacity()];
    file.read_exact_at(&mut mapped, 0).unwrap();
    assert!(mapped.windows(64).any(|window| window == &kept[..]), "pages in the arena are there");
    assert!(!mapped.windows(16).any(|window| window == identity), "a client can read the log's identity");
}
