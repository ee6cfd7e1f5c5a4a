//! Capture of panics, including those that the runtime catches in a task.
//!
//! Invariant: a panic on a thread that runs a seed appears in the report of that seed.

use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    static PANICS: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

fn install() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let catch_panics = PANICS.with_borrow_mut(|seen| seen.as_mut().map(|seen| seen.push(info.to_string())));
            if catch_panics.is_none() {
                before(info);
            }
        }));
    });
}

/// Runs `work` and returns its result, or the first panic on this thread while it ran. That
/// includes panics that the runtime caught in a task.
pub fn catch_panics<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    install();
    PANICS.set(Some(Vec::new()));
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    let seen = PANICS.take().unwrap_or_default();
    match (seen.into_iter().next(), result) {
        (Some(panic), _) => Err(panic),
        (None, Ok(result)) => Ok(result),
        (None, Err(_)) => Err("a panic without a message".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caught_panics_are_reported() {
        let caught = catch_panics(|| drop(panic::catch_unwind(|| panic!("expected"))));
        assert!(caught.unwrap_err().contains("expected"));
        assert_eq!(catch_panics(|| 5), Ok(5));
    }
}
