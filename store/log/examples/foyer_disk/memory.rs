//! Heap of a store per value.

use super::stores::{Kind, Result, Store};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

const VALUES: u64 = 200_000;
const SIZE: usize = 4096;
const CAPACITY: usize = 4 << 30;

pub struct Counting;

static HELD_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of this method, which is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        HELD_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of this method, which is the same.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of this method, which is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn held_bytes() -> f64 {
    HELD_BYTES.load(Ordering::Relaxed) as f64
}

pub async fn run(dir: &Path) -> Result<()> {
    for kind in [Kind::Log, Kind::Foyer] {
        let _ = std::fs::remove_dir_all(dir);
        let before = held_bytes();
        let empty = Store::open(kind, dir, CAPACITY).await?;
        let of_empty = held_bytes() - before;
        for number in 0..VALUES {
            empty.write(number, SIZE).await?;
        }
        empty.settle().await;
        empty.close().await?;
        let before = held_bytes();
        let full = Store::open(kind, dir, CAPACITY).await?;
        let of_full = held_bytes() - before;
        let mut found = 0;
        for number in 0..VALUES {
            found += u64::from(full.read(number, SIZE).await? == Some(true));
        }
        let each = (of_full - of_empty) / found as f64;
        println!("{:<6} {found} values of {SIZE} bytes: {each:.1} bytes of heap per value", kind.name());
        full.close().await?;
    }
    let _ = std::fs::remove_dir_all(dir);
    Ok(())
}
