//! The services through which simulated code meets the outside world.
//!
//! A simulation repeats a run from its seed only if nothing else influences that run. Code that
//! runs in the simulation therefore takes time, wake-ups and randomness from here and nowhere else;
//! `store/clippy.toml` forbids the alternatives.
//!
//! - [`Clock`] and [`now`]: wall-clock time for times to live, monotonic time for deadlines.
//!   [`SteppedClock`] lets a replay set the former.
//! - [`OrderedWatch`]: a value that tasks wait on, with a fixed wake-up order.
//! - [`random`]: seeds and generators.
//! - [`LogLimit`]: log lines that clients cause, bounded in number.
//! - [`AgeOrder`]: keys in the order of their ages.
//! - [`fail_point!`]: deliberate defects that the simulation must find.
//! - [`lock`]: locks that ignore poison.
//!
//! [`sync`] is the same for the thread models: locks and tasks that a model interleaves.
#![forbid(unsafe_code)]

mod age_order;
mod clock;
pub mod fail;
pub mod lock;
mod log_limit;
pub mod random;
pub mod sync;
mod watch;

pub use age_order::AgeOrder;
pub use clock::{Clock, SteppedClock, now};
pub use log_limit::{LOG_INTERVAL, LogLimit};
pub use watch::OrderedWatch;
