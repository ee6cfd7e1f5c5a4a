//! A value that tasks wait on.
//!
//! Always true: waiters wake in the order in which they began to wait. Those of tokio's watch channel wake in a random one,
//! with which no run of a simulation could be repeated.

#![forbid(unsafe_code)]

use parking_lot::Mutex;
use tokio::sync::Notify;

/// A value, and a bell that rings whenever it changes.
#[derive(Debug, Default)]
pub struct Bell<T> {
    value: Mutex<T>,
    rung: Notify,
}

impl<T> Bell<T> {
    /// With this value.
    pub fn new(value: T) -> Bell<T> {
        Bell { value: Mutex::new(value), rung: Notify::new() }
    }

    /// Looks at the value. It is locked meanwhile.
    pub fn look<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.value.lock())
    }

    /// Changes the value and rings.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.value.lock());
        self.rung.notify_waiters();
        result
    }

    /// Waits until the value is `wanted`, which says what to answer then. It is asked now and after every change.
    pub async fn wait<R>(&self, mut wanted: impl FnMut(&T) -> Option<R>) -> R {
        loop {
            // Hears of every change from here on.
            let rung = self.rung.notified();
            if let Some(answer) = self.look(&mut wanted) {
                return answer;
            }
            rung.await;
        }
    }
}

impl<T: Clone> Bell<T> {
    /// The value.
    pub fn now(&self) -> T {
        self.value.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn block_on(work: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work);
    }

    #[test]
    fn all_who_wait_wake_in_the_order_in_which_they_came() {
        block_on(async {
            let (bell, order) = (Arc::new(Bell::new(0)), Arc::new(Mutex::new(Vec::new())));
            let waiters: Vec<_> = (0..40)
                .map(|number| {
                    let (bell, order) = (bell.clone(), order.clone());
                    tokio::spawn(async move {
                        bell.wait(|&value| (value == 2).then_some(())).await;
                        order.lock().push(number);
                    })
                })
                .collect();
            for _ in 0..2 {
                tokio::task::yield_now().await;
                assert!(order.lock().is_empty(), "not yet");
                bell.change(|value| *value += 1);
            }
            for waiter in waiters {
                waiter.await.unwrap();
            }
            assert!(order.lock().iter().copied().eq(0..40));
        });
    }

    #[test]
    fn who_comes_late_need_not_wait() {
        block_on(async {
            let bell = Bell::new(7);
            assert_eq!(bell.wait(|&value| (value > 5).then_some(value)).await, 7);
            assert_eq!((bell.now(), bell.look(|value| value + 1)), (7, 8));
        });
    }
}
