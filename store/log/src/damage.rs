//! The listener for damaged pages.

use larder_format::PageId;
use larder_runtime::sync::RwLock;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

type DamageListener = Arc<dyn Fn(PageId) + Send + Sync>;

#[derive(Default)]
pub(crate) struct DamageReports {
    listener: RwLock<Option<DamageListener>>,
}

impl DamageReports {
    pub(crate) fn set_listener(&self, listener: impl Fn(PageId) + Send + Sync + 'static) {
        *self.listener.write() = Some(Arc::new(listener));
    }

    pub(crate) fn report(&self, id: PageId) {
        // Cloned, because the listener may take long or set another listener.
        let Some(listener) = self.listener.read().clone() else { return };
        // The listener is the caller's code. Its panic must not unwind through a reader or the
        // scrub task.
        if catch_unwind(AssertUnwindSafe(|| listener(id))).is_err() {
            tracing::error!(page = ?id, "L3: the listener for damaged pages panicked; the page is not repaired");
        }
    }
}
