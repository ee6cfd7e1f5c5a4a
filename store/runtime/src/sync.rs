//! Locks, atomics and tasks of code whose threads are modelled.
//!
//! In production these are the locks of [`lock`](crate::lock), the atomics of std, and the tasks of
//! tokio. With the feature `shuttle` they are those of [shuttle](https://docs.rs/shuttle), which
//! chooses at each of their calls the thread that runs next. So the models check the code that
//! ships, not a copy.
//!
//! Rules for modelled code:
//! - A lock that is held while another lock of this module is taken must itself be from here. All
//!   threads of a model share one thread of the system, so a foreign lock would block them all.
//! - Shuttle runs every atomic operation in one total order. It finds wrong interleavings, and no
//!   wrong memory ordering.

/// True in a thread model.
pub const MODELLED: bool = cfg!(feature = "shuttle");

#[cfg(not(feature = "shuttle"))]
mod production {
    pub use crate::lock::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
    pub use std::sync::atomic;
    use tokio::runtime::Handle;

    /// Runs `task` on the runtime, detached. With the feature `shuttle`, runs it as a task of the
    /// model.
    pub fn spawn(runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) {
        runtime.spawn(task);
    }
}

#[cfg(feature = "shuttle")]
mod modelled {
    use shuttle::sync::{LockResult, PoisonError};
    pub use shuttle::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard, atomic};
    use tokio::runtime::Handle;

    // A panic fails the model anyway, so poison says nothing new.
    fn ignore_poison<G>(result: LockResult<G>) -> G {
        result.unwrap_or_else(PoisonError::into_inner)
    }

    #[derive(Debug, Default)]
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Mutex<T> {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            ignore_poison(self.0.lock())
        }

        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    #[derive(Debug, Default)]
    pub struct RwLock<T>(shuttle::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub fn new(value: T) -> RwLock<T> {
            RwLock(shuttle::sync::RwLock::new(value))
        }

        pub fn read(&self) -> RwLockReadGuard<'_, T> {
            ignore_poison(self.0.read())
        }

        pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
            self.0.try_read().ok()
        }

        pub fn write(&self) -> RwLockWriteGuard<'_, T> {
            ignore_poison(self.0.write())
        }

        pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
            self.0.try_write().ok()
        }
    }

    pub fn spawn(_runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) {
        // Dropping the handle detaches the task.
        drop(shuttle::future::spawn(task));
    }
}

#[cfg(feature = "shuttle")]
pub use modelled::*;
#[cfg(not(feature = "shuttle"))]
pub use production::*;
