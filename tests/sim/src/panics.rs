//! Panics count as violations, also those that a runtime catches in a task.
//!
//! Always true: a panic on a thread that runs a seed is found in that seed's report.

use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    static WATCHING: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

fn install() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let watched = WATCHING.with_borrow_mut(|seen| seen.as_mut().map(|seen| seen.push(info.to_string())));
            if watched.is_none() {
                before(info);
            }
        }));
    });
}

/// Runs `work`; the first panic on this thread meanwhile, if there was one, instead of its result.
pub fn watched<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    install();
    WATCHING.set(Some(Vec::new()));
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    let seen = WATCHING.take().unwrap_or_default();
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
    fn panics_are_seen_even_if_somebody_catches_them() {
        let caught = watched(|| drop(panic::catch_unwind(|| panic!("oh no"))));
        assert!(caught.unwrap_err().contains("oh no"));
        assert_eq!(watched(|| 5), Ok(5));
    }
}
