//! Fail points: deliberate defects, each at one place in the code.
//!
//! The simulation activates one fail point at a time and must then find a violated promise. A fail
//! point that no seed finds marks a blind spot of the simulation. The list of all fail points, with
//! the defect that each one stands for, is in `tests/sim/tests/fail_points.rs`; a test there
//! compares it with the source code.
//!
//! Names are stable and have the form `component.defect-in-words`. Without the feature
//! `fail-points` the macro is the constant `false`, so nothing of it remains in the binary.
//!
//! A race point is the same for the thread models: it releases a lock between a check and the
//! action that relies on it. The simulation cannot find it, because it has one thread.

#[cfg(feature = "fail-points")]
thread_local! {
    // A simulation runs on one thread, and several simulations run on threads of one process.
    static ACTIVE: std::cell::Cell<Option<&'static str>> = const { std::cell::Cell::new(None) };
    /// Evaluations of an active fail point with turns since its activation.
    static EVALUATIONS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Evaluates to `true` while the fail point of that name is active on this thread.
///
/// With `1 in n` behind the name, only every n-th evaluation is `true`, for a defect that shows now
/// and then. The count starts with the activation, so a seed replays.
#[macro_export]
macro_rules! fail_point {
    ($name:literal) => {
        $crate::fail::is_active($name)
    };
    ($name:literal, 1 in $turns:literal) => {
        $crate::fail::is_turn($name, $turns)
    };
}

/// Evaluates to `true` while the race point of that name is active on this thread. Only the thread
/// models activate race points.
#[macro_export]
macro_rules! race_point {
    ($name:literal) => {
        $crate::fail::is_active($name)
    };
}

/// The implementation of [`fail_point!`] and [`race_point!`].
#[cfg(feature = "fail-points")]
#[doc(hidden)]
pub fn is_active(name: &'static str) -> bool {
    ACTIVE.get() == Some(name)
}

/// The implementation of [`fail_point!`] and [`race_point!`].
#[cfg(not(feature = "fail-points"))]
#[doc(hidden)]
#[inline(always)]
pub const fn is_active(_name: &'static str) -> bool {
    false
}

/// The implementation of [`fail_point!`] with turns.
#[cfg(feature = "fail-points")]
#[doc(hidden)]
pub fn is_turn(name: &'static str, turns: u64) -> bool {
    if !is_active(name) {
        return false;
    }
    let evaluations = EVALUATIONS.get() + 1;
    EVALUATIONS.set(evaluations);
    evaluations.is_multiple_of(turns)
}

/// The implementation of [`fail_point!`] with turns.
#[cfg(not(feature = "fail-points"))]
#[doc(hidden)]
#[inline(always)]
pub const fn is_turn(_name: &'static str, _turns: u64) -> bool {
    false
}

/// Runs `work` with a fail point active on this thread, and restores the previous state afterwards,
/// also after a panic.
#[cfg(feature = "fail-points")]
pub fn with<T>(name: &'static str, work: impl FnOnce() -> T) -> T {
    struct Restore(Option<&'static str>, u64);
    impl Drop for Restore {
        fn drop(&mut self) {
            ACTIVE.set(self.0);
            EVALUATIONS.set(self.1);
        }
    }
    let _restore = Restore(ACTIVE.replace(Some(name)), EVALUATIONS.replace(0));
    work()
}
