//! Order of the attempts at named engines.
//!
//! Engines are strangers: any member of the store may claim one, and never answer.
//!
//! Invariants:
//!
//! - The name that has waited longest comes first: since its last failure, or since its arrival.
//!   Names that arrive later do not delay it: before its turn, others have at most one attempt
//!   for each name known when its wait began. So neither engines that hang nor ever new names
//!   keep others out.
//! - The engines of one host have at most their share of the slots.
//! - Engines that were confirmed lately go first, and have slots that others cannot take. A
//!   stranger may name silent ports of their host, and cannot confirm them. The other engines have
//!   as many slots of their own: a stranger may have been confirmed, and be silent since.

use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// Backoff after the first failure. It doubles up to [`BACKOFF_MAX`], so that an engine that is
/// down costs few attempts and a quick restart is noticed soon.
const BACKOFF_MIN: Duration = Duration::from_millis(250);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Engine to try.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate<'a> {
    pub(crate) name: &'a str,
    pub(crate) url: &'a str,
    /// It was confirmed lately, with the same description.
    pub(crate) is_known: bool,
}

impl<'a> From<(&'a str, &'a str)> for Candidate<'a> {
    fn from((name, url): (&'a str, &'a str)) -> Self {
        Candidate { name, url, is_known: false }
    }
}

/// Attempt that is running. It counts against all slots. Among those with the same `is_known`, it
/// also counts against the share of its host.
struct Attempt {
    host: String,
    is_known: bool,
}

/// Last failure of a name. The name is due again when `backoff` has passed since `at`.
struct Failure {
    at: Instant,
    backoff: Duration,
}

/// Name that waits for its turn.
struct Waiting {
    /// First time that it was a candidate.
    arrived: Instant,
    failure: Option<Failure>,
}

impl Waiting {
    /// Start of the wait, and `true` after a failure: of two waits that began at the same time, the
    /// name that was never tried goes first.
    fn since(&self) -> (Instant, bool) {
        self.failure.as_ref().map_or((self.arrived, false), |failure| (failure.at, true))
    }

    fn is_due(&self, now: Instant) -> bool {
        self.failure.as_ref().is_none_or(|failure| now >= failure.at + failure.backoff)
    }
}

/// Slots for attempts, and the names that wait for them. A name stays in the table until it
/// succeeds or [`Turns::retain`] rejects it.
pub(crate) struct Turns {
    slots: usize,
    slots_per_host: usize,
    /// Slots that only known engines take, and number of those that only others take.
    reserved: usize,
    waiting: HashMap<String, Waiting>,
    /// By name.
    running: HashMap<String, Attempt>,
}

impl Turns {
    pub(crate) fn new(slots: usize, slots_per_host: usize) -> Self {
        Self { slots, slots_per_host, reserved: 0, waiting: HashMap::new(), running: HashMap::new() }
    }

    /// Leaves this number of slots to known engines, and as many to the others. The number must be
    /// lower than that of the slots, or no attempt would ever begin.
    pub(crate) fn with_reserved(self, reserved: usize) -> Self {
        Self { reserved, ..self }
    }

    /// Forgets the names that `is_known` rejects. A running attempt keeps its slot. A name that
    /// returns starts without a backoff.
    pub(crate) fn retain(&mut self, is_known: impl Fn(&str) -> bool) {
        self.waiting.retain(|name, _| is_known(name));
    }

    /// Takes slots for at most `most` candidates whose turn it is, in that order. Each name
    /// returned needs a later [`Turns::ended`].
    pub(crate) fn begin<'a>(
        &mut self,
        candidates: impl IntoIterator<Item = impl Into<Candidate<'a>>>,
        most: usize,
        now: Instant,
    ) -> Vec<String> {
        let mut due = Vec::new();
        for candidate in candidates {
            let Candidate { name, url, is_known } = candidate.into();
            let waiting = self.entry(name, now);
            let (since, is_due) = (waiting.since(), waiting.is_due(now));
            if is_due && !self.running.contains_key(name) {
                due.push((!is_known, since, name, url));
            }
        }
        // The name decides last: a hostile member chooses it.
        due.sort();
        let mut begun = Vec::new();
        for (is_unknown, _, name, url) in due {
            if self.running.len() >= self.slots || begun.len() >= most {
                break;
            }
            let attempt = Attempt { host: host_of(url), is_known: !is_unknown };
            let alike = self.running.values().filter(|other| other.is_known == attempt.is_known);
            let of_host = alike.clone().filter(|other| other.host == attempt.host);
            if alike.count() < self.slots - self.reserved && of_host.count() < self.slots_per_host {
                self.running.insert(name.to_string(), attempt);
                begun.push(name.to_string());
            }
        }
        begun
    }

    /// Gives the slot of `name` back. A name that succeeded starts anew. One that failed waits for
    /// its backoff: 250 ms, doubled with each further failure, up to 5 s.
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
        self.waiting.entry(name.to_string()).or_insert(Waiting { arrived: now, failure: None })
    }
}

/// Host of an engine's URL. Empty for a URL that is not valid or names no host. All such engines
/// share the slots of one host.
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
    fn names_come_in_the_order_in_which_their_waits_began() {
        let mut turns = Turns::new(1, 1);
        let mut now = Instant::now();
        assert_eq!(turns.begin(names(&["k", "z"]), usize::MAX, now), ["k"]);
        turns.ended("k", false, now);
        now += BACKOFF_MAX;
        // Of the two that wait since the beginning, the one that was never tried.
        assert_eq!(turns.begin(names(&["a", "k", "z"]), usize::MAX, now), ["z"]);
        turns.ended("z", false, now + Duration::from_millis(1));
        now += BACKOFF_MAX;
        for expected in ["k", "a", "z"] {
            assert_eq!(turns.begin(names(&["a", "k", "z"]), usize::MAX, now), [expected]);
            turns.ended(expected, true, now);
        }
    }

    /// Each name known gets its turn after at most one attempt per name known when its wait began.
    /// A backoff can only delay it by its own length.
    #[test]
    fn fresh_names_do_not_keep_a_failed_name_out() {
        for fresh_per_turn in [1, 3, 16] {
            let mut turns = Turns::new(1, 1);
            let mut now = Instant::now();
            let mut known = vec!["z".to_string()];
            let mut turns_of_z = Vec::new();
            let mut known_at_failure = known.len();
            for turn in 0..200 {
                let candidates = known.iter().map(|name| (name.as_str(), "http://10.0.0.1:1"));
                let begun = turns.begin(candidates, usize::MAX, now);
                assert_eq!(begun.len(), 1, "a turn goes to somebody");
                turns.ended(&begun[0], false, now);
                if begun[0] == "z" {
                    let waited = turn - turns_of_z.last().copied().unwrap_or(turn);
                    assert!(waited <= known_at_failure, "{waited} turns, with {known_at_failure} names");
                    turns_of_z.push(turn);
                    known_at_failure = known.len();
                } else {
                    // Its owner withdraws it, so that the table has room for the next ones.
                    known.retain(|name| *name != begun[0]);
                }
                // They sort before all others.
                known.extend((0..fresh_per_turn).map(|number| format!("a{turn:03}-{number}")));
                turns.retain(|name| known.iter().any(|known| known == name));
                now += BACKOFF_MAX;
            }
            assert!(turns_of_z.len() > 2, "{fresh_per_turn}: {turns_of_z:?}");
        }
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
    fn known_engine_waits_for_no_silent_ports_of_its_host_or_of_others() {
        let mut turns = Turns::new(4, 2).with_reserved(1);
        let now = Instant::now();
        let silent = ["a", "b", "c"].map(|name| Candidate::from((name, "http://10.0.0.1:1")));
        assert_eq!(turns.begin(silent, usize::MAX, now), ["a", "b"]);
        let others = [Candidate::from(("d", "http://10.0.0.2:1")), Candidate::from(("e", "http://10.0.0.3:1"))];
        assert_eq!(turns.begin(others, usize::MAX, now), ["d"], "the last slot is reserved");
        let known = Candidate { name: "z", url: "http://10.0.0.1:9", is_known: true };
        assert_eq!(turns.begin(silent.into_iter().chain(others).chain([known]), usize::MAX, now), ["z"]);
        turns.ended("d", false, now);
        assert_eq!(turns.begin(others, usize::MAX, now), ["e"], "the known one has a slot of its own");
        turns.ended("z", true, now);
        let last = [Candidate::from(("f", "http://10.0.0.4:1"))];
        assert!(turns.begin(last, usize::MAX, now).is_empty(), "it may return");
        assert_eq!(turns.begin([known], usize::MAX, now), ["z"]);
    }

    #[test]
    fn engines_that_fall_silent_after_their_confirmation_do_not_keep_a_new_one_out() {
        let mut turns = Turns::new(4, 2).with_reserved(1);
        let now = Instant::now();
        let urls = ["http://10.0.0.1:1", "http://10.0.0.2:1", "http://10.0.0.3:1", "http://10.0.0.4:1"];
        let silent = ["a", "b", "c", "d"].into_iter().zip(urls);
        let silent = silent.map(|(name, url)| Candidate { name, url, is_known: true });
        let new = Candidate::from(("z", "http://10.0.0.9:1"));
        assert_eq!(turns.begin(silent.clone().chain([new]), usize::MAX, now), ["a", "b", "c", "z"]);
        turns.ended("z", false, now);
        assert!(turns.begin(silent, usize::MAX, now).is_empty(), "the last slot is for engines like z");
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
