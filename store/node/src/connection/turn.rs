//! Turns of a connection at the thread that serves it.
//!
//! A lookup takes no wait, so a client that sends one after the other would keep the thread.

/// Keys that a connection looks up before other tasks of its thread go first. They take about half
/// a millisecond.
pub(super) const KEYS_PER_TURN: usize = 1024;

/// Work of a connection since its last turn ended.
#[derive(Debug, Default)]
pub(super) struct Turn {
    keys: usize,
}

impl Turn {
    /// Records that keys were looked up. Lets other tasks go first after [`KEYS_PER_TURN`].
    pub(super) async fn looked_up(&mut self, keys: usize) {
        self.keys += keys;
        if self.keys >= KEYS_PER_TURN {
            self.keys = 0;
            tokio::task::yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn other_tasks_go_first_after_each_turn_of_keys() {
        let mut turn = Turn::default();
        let mut waits = 0;
        for _ in 0..100 {
            let mut looked_up = Box::pin(turn.looked_up(KEYS_PER_TURN / 4));
            if looked_up.as_mut().now_or_never().is_none() {
                waits += 1;
                looked_up.await;
            }
        }
        assert_eq!(waits, 25);
        assert!(turn.looked_up(8 * KEYS_PER_TURN).now_or_never().is_none(), "a large request alone");
    }
}
