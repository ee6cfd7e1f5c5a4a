//! Order of the attempts at named engines.
//!
//! Engines are strangers: any member of the store may claim one, and never answer.
//!
//! Invariants:
//!
//! - Names that were never tried come first, then those whose last attempt is the longest ago. So
//!   engines that hang delay others, and do not keep them out.
//! - The engines of one host have at most their share of the slots.

use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// Backoff after the first failure. It doubles up to [`BACKOFF_MAX`], so that an engine that is
/// down costs few attempts and a quick restart is noticed soon.
const BACKOFF_MIN: Duration = Duration::from_millis(250);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Last failure of a name.
struct Failure {
    at: Instant,
    backoff: Duration,
}

/// Name that waits for its turn.
struct Waiting {
    /// First time that it was a candidate.
    since: Instant,
    failure: Option<Failure>,
}

pub(crate) struct Turns {
    slots: usize,
    slots_per_host: usize,
    waiting: HashMap<String, Waiting>,
    /// Hosts of the attempts that are running, by name.
    running: HashMap<String, String>,
}

impl Turns {
    pub(crate) fn new(slots: usize, slots_per_host: usize) -> Self {
        Self { slots, slots_per_host, waiting: HashMap::new(), running: HashMap::new() }
    }

    /// Forgets the names that `is_known` rejects. A running attempt keeps its slot.
    pub(crate) fn retain(&mut self, is_known: impl Fn(&str) -> bool) {
        self.waiting.retain(|name, _| is_known(name));
    }

    /// Takes slots for at most `most` candidates whose turn it is, in that order. A candidate is
    /// the name and the URL of an engine. Each name returned needs a later [`Turns::ended`].
    pub(crate) fn begin<'a>(
        &mut self,
        candidates: impl IntoIterator<Item = (&'a str, &'a str)>,
        most: usize,
        now: Instant,
    ) -> Vec<String> {
        let mut due = Vec::new();
        for (name, url) in candidates {
            let entry = self.entry(name, now);
            let (since, failure) = (entry.since, entry.failure.as_ref().map(|f| (f.at, f.at + f.backoff)));
            if !self.running.contains_key(name) && failure.is_none_or(|(_, until)| now >= until) {
                due.push((failure.map(|(at, _)| at), since, name, url));
            }
        }
        // `None` comes first. The name decides last: a hostile member chooses it.
        due.sort();
        let mut begun = Vec::new();
        for (_, _, name, url) in due {
            if self.running.len() >= self.slots || begun.len() >= most {
                break;
            }
            let host = host_of(url);
            if self.running.values().filter(|running| **running == host).count() < self.slots_per_host {
                self.running.insert(name.to_string(), host);
                begun.push(name.to_string());
            }
        }
        begun
    }

    /// Gives the slot of `name` back. A name that succeeded starts anew.
    pub(crate) fn ended(&mut self, name: &str, has_succeeded: bool, now: Instant) {
        self.running.remove(name);
        if has_succeeded {
            self.waiting.remove(name);
        } else {
            self.postpone(name, now);
        }
    }

    /// Counts a failure of `name`.
    pub(crate) fn postpone(&mut self, name: &str, now: Instant) {
        let waiting = self.entry(name, now);
        let backoff = waiting.failure.as_ref().map_or(BACKOFF_MIN, |f| (f.backoff * 2).min(BACKOFF_MAX));
        waiting.failure = Some(Failure { at: now, backoff });
    }

    fn entry(&mut self, name: &str, now: Instant) -> &mut Waiting {
        self.waiting.entry(name.to_string()).or_insert(Waiting { since: now, failure: None })
    }
}

/// Host of an engine's URL.
pub(crate) fn host_of(url: &str) -> String {
    let parsed = reqwest::Url::parse(url).ok();
    parsed.and_then(|url| url.host_str().map(str::to_string)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names<'a>(list: &[&'a str]) -> Vec<(&'a str, &'static str)> {
        let hosts = ["http://10.0.0.1:1", "http://10.0.0.2:1", "http://10.0.0.3:1", "http://10.0.0.4:1"];
        list.iter().copied().zip(hosts).collect()
    }

    #[test]
    fn engines_that_fail_with_early_names_do_not_keep_others_out() {
        let mut turns = Turns::new(1, 1);
        let mut now = Instant::now();
        let mut begun = Vec::new();
        for _ in 0..9 {
            for name in turns.begin(names(&["a", "b", "z"]), usize::MAX, now) {
                turns.ended(&name, false, now);
                begun.push(name);
            }
            // All are due again at each turn.
            now += BACKOFF_MAX;
        }
        assert_eq!(begun.concat(), "abzabzabz");
    }

    #[test]
    fn new_names_come_before_failed_ones_in_the_order_of_their_arrival() {
        let mut turns = Turns::new(1, 1);
        let mut now = Instant::now();
        assert_eq!(turns.begin(names(&["k", "z"]), usize::MAX, now), ["k"]);
        turns.ended("k", false, now);
        now += BACKOFF_MAX;
        assert_eq!(turns.begin(names(&["a", "k", "z"]), usize::MAX, now), ["z"]);
        turns.ended("z", false, now);
        now += BACKOFF_MAX;
        assert_eq!(turns.begin(names(&["a", "k", "z"]), usize::MAX, now), ["a"]);
    }

    #[test]
    fn one_host_has_its_share_of_the_slots_only() {
        let mut turns = Turns::new(3, 2);
        let now = Instant::now();
        let hostile = ["a", "b", "c", "d"].map(|name| (name, "http://10.0.0.66:1"));
        let candidates = || hostile.into_iter().chain([("z", "http://10.0.0.1:1"), ("zz", "http://10.0.0.2:1")]);
        assert_eq!(turns.begin(candidates(), usize::MAX, now), ["a", "b", "z"]);
        assert!(turns.begin(candidates(), usize::MAX, now).is_empty(), "attempts are running");
        turns.ended("z", true, now);
        // The name that succeeded is a new one, and comes after all others.
        let later = now + Duration::from_secs(1);
        assert_eq!(turns.begin(candidates(), usize::MAX, later), ["zz"]);
    }

    #[test]
    fn backoff_doubles_up_to_its_maximum() {
        let mut turns = Turns::new(1, 1);
        let mut now = Instant::now();
        let mut backoff = BACKOFF_MIN;
        for _ in 0..10 {
            assert_eq!(turns.begin(names(&["a"]), usize::MAX, now), ["a"]);
            turns.ended("a", false, now);
            assert!(turns.begin(names(&["a"]), usize::MAX, now + backoff - Duration::from_millis(1)).is_empty());
            now += backoff;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
        assert_eq!(backoff, BACKOFF_MAX);
        turns.retain(|_| false);
        assert_eq!(turns.begin(names(&["a"]), usize::MAX, now), ["a"], "a name that returns starts without a backoff");
    }
}
