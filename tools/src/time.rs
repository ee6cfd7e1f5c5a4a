//! Times and durations for people.

use std::time::{SystemTime, UNIX_EPOCH};

/// The wall-clock time, in milliseconds since 1970. A clock before 1970 reads as 0.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A duration in its two largest units. The smaller unit is cut off, not rounded. Below an hour
/// there is only one unit.
pub fn duration_text(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// Time since an event. An event of a clock that is ahead was just now.
pub fn ago(at_unix_ms: u64, now_unix_ms: u64) -> String {
    format!("{} ago", duration_text(now_unix_ms.saturating_sub(at_unix_ms) / 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_two_units_at_most() {
        let texts = [59, 60, 3599, 3600, 86_399, 90_000].map(duration_text);
        assert_eq!(texts, ["59 s", "1 min", "59 min", "1 h 0 min", "23 h 59 min", "1 d 1 h"]);
        assert_eq!([ago(1_000, 61_999), ago(9, 8)], ["1 min ago", "0 s ago"]);
        assert!(unix_ms() > 1_700_000_000_000);
    }
}
