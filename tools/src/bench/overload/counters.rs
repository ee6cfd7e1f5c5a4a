//! Counters of the load generator.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Outcomes of operations, in pages unless stated otherwise.
        #[derive(Default)]
        pub struct LoadTotals {
            $($(#[$doc])* pub $name: u64,)+
        }

        /// Live counters behind [`LoadTotals`]. All accesses are relaxed: the counters order no
        /// other memory.
        #[derive(Default)]
        pub struct LoadCounters {
            $(pub $name: AtomicU64,)+
            /// Operations that have begun and not ended. A reset leaves it.
            pub in_flight: AtomicUsize,
        }

        impl LoadCounters {
            pub fn reset(&self) {
                $(self.$name.store(0, Ordering::Relaxed);)+
            }

            pub fn totals(&self) -> LoadTotals {
                LoadTotals { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Verified bytes of gets that arrived before the deadline.
    read_bytes,
    /// Bytes of puts that ended before the deadline.
    put_bytes,
    read_pages,
    put,
    busy,
    /// Pages that the node answered with a miss, because it gave up at the deadline.
    missed,
    /// Pages that arrived after the deadline.
    late_reads,
    /// Pages whose put ended after the deadline.
    late_puts,
    wrong,
    operations,
    connections_lost,
}

impl LoadTotals {
    pub fn bytes(&self) -> u64 {
        self.read_bytes + self.put_bytes
    }
}

pub fn add(count: &AtomicU64, more: usize) {
    count.fetch_add(more as u64, Ordering::Relaxed);
}
