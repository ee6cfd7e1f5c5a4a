//! A device whose process has no descriptor left. The limit applies to the whole process, so this
//! file has one test.

use larder_io::{Device, FileDevice, RingOptions, is_out_of_descriptors};
use larder_memory::Arena;
use std::fs::File;

const SEGMENT_BYTES: u64 = 1 << 20;

/// Opens files until the process may open no more.
fn take_all_descriptors() -> Vec<File> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls read or write a live rlimit.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = 256;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
    let mut files = Vec::new();
    loop {
        match File::open("/dev/null") {
            Ok(file) => files.push(file),
            Err(error) => {
                assert!(is_out_of_descriptors(&error), "{error}");
                return files;
            }
        }
    }
}

#[tokio::test]
async fn segments_are_created_from_the_reserve_and_removed_without_a_descriptor() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let arena = Arena::new(1 << 20).unwrap();
    let device = FileDevice::open(dir.path(), arena, RingOptions::new("test", 64)).unwrap();
    let create = |segment| device.create(segment, SEGMENT_BYTES, vec![7; 4096]);
    create(0).await.unwrap();
    let files = take_all_descriptors();
    for segment in 1..=4 {
        create(segment).await.unwrap_or_else(|error| panic!("segment {segment} from the reserve: {error}"));
    }
    let mut failed = 5;
    let error = loop {
        match create(failed).await {
            Ok(()) => failed += 1,
            Err(error) => break error,
        }
        assert!(failed < 32, "the reserve ends");
    };
    assert!(is_out_of_descriptors(&error), "{error}");
    // The log takes writes later only if it knows that the file is gone.
    device.remove(failed).await.unwrap();
    drop(files);
    create(failed).await.unwrap();
    assert_eq!(device.segments().await.unwrap(), (0..=failed).collect::<Vec<_>>());
    // The reserve is full again.
    let files = take_all_descriptors();
    create(failed + 1).await.unwrap();
    drop(files);
    device.close().await;
}
