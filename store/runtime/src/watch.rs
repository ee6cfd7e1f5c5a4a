//! A value that tasks wait on.

use crate::sync::Mutex;
use tokio::sync::Notify;

/// A value with tasks that wait for it to change.
///
/// Waiters wake in the order in which they began to wait. The waiters of tokio's `watch` channel
/// wake in random order, which would make a simulation impossible to repeat.
#[derive(Debug, Default)]
pub struct OrderedWatch<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T> OrderedWatch<T> {
    /// Creates a watch that holds `value`.
    pub fn new(value: T) -> OrderedWatch<T> {
        OrderedWatch { value: Mutex::new(value), changed: Notify::new() }
    }

    /// Calls `read` with the value. The value stays locked during the call, so `read` must not
    /// block and must not use this watch.
    pub fn with<R>(&self, read: impl FnOnce(&T) -> R) -> R {
        read(&self.value.lock())
    }

    /// Changes the value and wakes all waiters. The same restrictions hold as for
    /// [`with`](Self::with).
    pub fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.value.lock());
        self.changed.notify_waiters();
        result
    }

    /// Waits until `condition` returns `Some`, and returns that.
    ///
    /// The condition is evaluated once at the start and again after every change.
    pub async fn wait_for<R>(&self, mut condition: impl FnMut(&T) -> Option<R>) -> R {
        loop {
            // Registered before the value is read: a change in between would otherwise be missed.
            let changed = self.changed.notified();
            if let Some(answer) = self.with(&mut condition) {
                return answer;
            }
            changed.await;
        }
    }
}

impl<T: Clone> OrderedWatch<T> {
    /// Returns a copy of the value.
    pub fn get(&self) -> T {
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
    fn waiters_wake_in_the_order_in_which_they_began_to_wait() {
        block_on(async {
            let watch = Arc::new(OrderedWatch::new(0));
            let order = Arc::new(Mutex::new(Vec::new()));
            let waiters: Vec<_> = (0..40)
                .map(|number| {
                    let watch = watch.clone();
                    let order = order.clone();
                    tokio::spawn(async move {
                        watch.wait_for(|&value| (value == 2).then_some(())).await;
                        order.lock().push(number);
                    })
                })
                .collect();
            for _ in 0..2 {
                tokio::task::yield_now().await;
                assert!(order.lock().is_empty(), "woken too early");
                watch.update(|value| *value += 1);
            }
            for waiter in waiters {
                waiter.await.unwrap();
            }
            assert!(order.lock().iter().copied().eq(0..40));
        });
    }

    #[test]
    fn wait_returns_at_once_if_the_condition_already_holds() {
        block_on(async {
            let watch = OrderedWatch::new(7);
            assert_eq!(watch.wait_for(|&value| (value > 5).then_some(value)).await, 7);
            assert_eq!(watch.get(), 7);
            assert_eq!(watch.with(|value| value + 1), 8);
        });
    }
}
