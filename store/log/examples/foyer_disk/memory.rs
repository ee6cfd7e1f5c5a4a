//! Heap of a store per value.

use crate::heap::held_bytes;
use crate::stores::{Kind, Result, Store};
use std::path::Path;

const VALUES: u64 = 200_000;
const SIZE: usize = 4096;
const CAPACITY: usize = 4 << 30;

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
        let each = (of_full as f64 - of_empty as f64) / found as f64;
        println!("{:<6} {found} values of {SIZE} bytes: {each:.1} bytes of heap per value", kind.name());
        full.close().await?;
    }
    let _ = std::fs::remove_dir_all(dir);
    Ok(())
}
