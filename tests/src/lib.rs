//! Real `larder` processes for tests, and the reference they are held against.
//!
//! A [`Process`] is killed when it is dropped. Whatever a test waits for, it waits at most [`PATIENCE`].

mod process;
mod reference;
mod request;

pub use process::{Process, Stack, data_dir, larder, unused_address};
pub use reference::{Reference, tiny_folder};
pub use request::{Answer, Ask, complete, get_json, status_of};

use std::time::Duration;

/// Most time any step of a test waits.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` holds, looking often.
///
/// # Panics
/// If it does not within [`PATIENCE`].
pub async fn eventually<F>(what: &str, mut condition: impl FnMut() -> F)
where
    F: Future<Output = bool>,
{
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "waited in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
