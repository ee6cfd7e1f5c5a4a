//! Keeps the stored epoch ahead of the generations that a long-lived node gives.
//!
//! A start has 2^31 generations at least, which 100,000 puts per second use up in 6 hours. The next
//! epoch is stored when half of that is left. If it cannot be stored until the end, the node
//! refuses puts.
#![allow(clippy::disallowed_methods, reason = "no simulation gives so many generations")]

use super::{IdentityPlace, NextIdentity};
use crate::state::NodeState;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Generations that are left when the next epoch is stored.
const LEFT_MIN: u64 = 1 << 30;
/// Time between two looks. A node gives far fewer generations in it than [`LEFT_MIN`].
const INTERVAL: Duration = Duration::from_secs(10);

/// Stores the next epoch whenever few generations are left, until `stop`.
pub(crate) async fn keep_ahead<P>(state: Arc<NodeState>, mut identity: NextIdentity<P>, stop: CancellationToken)
where
    P: IdentityPlace + Send + 'static,
{
    let mut has_failed = false;
    while stop.run_until_cancelled(tokio::time::sleep(INTERVAL)).await.is_some() {
        let left = state.store.puts().generations_left();
        if left >= LEFT_MIN {
            continue;
        }
        let raising = tokio::task::spawn_blocking(move || {
            let raised = identity.raise_stored_epoch();
            (identity, raised)
        });
        let Ok((same, raised)) = raising.await else { return };
        identity = same;
        match raised {
            Ok(end) => state.store.puts().extend_generations(end),
            // Once: the next look tries again.
            Err(error) => {
                if !std::mem::replace(&mut has_failed, true) {
                    report(&error, left);
                }
            }
        }
    }
}

fn report(error: &io::Error, left: u64) {
    tracing::error!(
        %error, left,
        "cannot store the next epoch of this node; it refuses puts once no generation is left; check the directory of its identity [LRD0110]"
    );
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use futures::FutureExt;

    #[test]
    fn next_start_has_none_of_the_generations_that_were_given_ahead() {
        let dir = tempfile::tempdir().unwrap();
        let next = || NextIdentity::new(vec![IdentityDirectory(dir.path().into())], 100, &mut rand::rng());
        let store = |next: &mut NextIdentity<IdentityDirectory>| {
            let mut devices = Devices::of(Vec::new()).unwrap();
            let stored = next.store_above_generations(&mut devices).now_or_never().expect("no log to wait for");
            stored.unwrap().0
        };
        let mut first = next();
        let before = store(&mut first);
        let ends = [first.raise_stored_epoch().unwrap(), first.raise_stored_epoch().unwrap()];
        assert!(generation_end(before.generation_first(&mut rand::rng())) < ends[0] && ends[0] < ends[1]);
        let again = store(&mut next());
        assert!(again.generation_first(&mut rand::rng()) > ends[1]);
        // Without the places, nothing is allowed.
        std::fs::remove_dir_all(dir.path()).unwrap();
        std::fs::write(dir.path(), b"").unwrap();
        assert!(first.raise_stored_epoch().is_err());
        std::fs::remove_file(dir.path()).unwrap();
    }
}
