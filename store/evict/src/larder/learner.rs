//! What pages of a class are worth at an age.
//!
//! A sample of pages, chosen by hash, is followed from request to request, whether resident or not; so what is learnt
//! does not depend on what was evicted. Per class and span of ages two things are counted: pages that were asked for
//! at that age, and the time that pages spent at it. Their ratio is the rate at which such pages are asked for. Pages
//! that fall out of the sample count with the time until then.
//!
//! Where little was seen, rates lean on those of all pages of any position that are else alike, those on all with as
//! many requests, and those on all pages, scaled to the level of what was seen; where nothing was, they fall with age.
//!
//! The worth of a page is the most that can be had from keeping it: over all ages up to which it may be kept, the
//! largest ratio of expected requests to expected time (the index of Gittins).
//!
//! Old counts fade, with a half-life that grows with the number of resident pages.

use super::classes::{CLASSES, Class, HITS, SPANS, TRAILS, classes_of, hits_of, span_of, span_start};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Most pages followed.
const FOLLOWED_MAX: usize = 1 << 16;
/// Pages followed per resident page of the sample, at least: else the sample is thinned out.
const FOLLOWED_PER_RESIDENT: usize = 4;
/// Accesses from one learning to the next, at least and at most.
const LEARN_EVERY: std::ops::RangeInclusive<u64> = 1 << 8..=1 << 13;
/// Half-life of counts, in accesses, at least.
const HALF_LIFE_MIN: u64 = 1 << 19;
/// Half-life of counts, in accesses per resident page, at least.
const HALF_LIFE_PER_RESIDENT: u64 = 16;
/// Pages' worth of weight of what a rate leans on.
const LEAN_PAGES: f64 = 20.0;
/// How rates fall from span to span where nothing was seen.
const UNSEEN_FALL: f64 = 0.707;
/// The sample is chosen by the bits from here on.
const SAMPLE_SHIFT: u32 = 24;

type Rates = [f64; SPANS];

#[derive(Debug, Clone, Copy)]
struct Followed {
    since: u64,
    class: Class,
}

#[derive(Debug, Clone, Copy)]
struct Counts {
    /// Asked for again at this age.
    requests: Rates,
    /// Asked for again, or out of the sample, at this age; so all earlier spans were passed.
    ends: Rates,
    /// Time of those in the span of their end.
    last_time: Rates,
}

#[derive(Debug)]
pub(super) struct Learner {
    followed: HashMap<u64, Followed, BuildHasherDefault<AsItIs>>,
    /// Since when they are followed, oldest first; some entries are out of date.
    order: VecDeque<(u64, u64)>,
    sample_bits: u32,
    counts: Vec<Counts>,
    worth: Vec<f32>,
    first_at: Option<u64>,
    learnt_at: u64,
    due_at: u64,
}

impl Learner {
    pub(super) fn new() -> Learner {
        let none = Counts { requests: [0.0; SPANS], ends: [0.0; SPANS], last_time: [0.0; SPANS] };
        Learner {
            followed: HashMap::default(),
            order: VecDeque::new(),
            sample_bits: 0,
            counts: vec![none; CLASSES],
            worth: vec![0.0; CLASSES * SPANS],
            first_at: None,
            learnt_at: 0,
            due_at: 0,
        }
    }

    /// A page was asked for, and is of this class now.
    pub(super) fn access(&mut self, hash: u64, class: Class, now: u64) {
        if self.first_at.is_none() {
            self.first_at = Some(now);
            self.due_at = now + LEARN_EVERY.start();
        }
        if !self.is_sampled(hash) {
            return;
        }
        if let Some(before) = self.followed.insert(hash, Followed { since: now, class }) {
            let span = self.counts[before.class.index()].end(now - before.since);
            self.counts[before.class.index()].requests[span] += 1.0;
        }
        self.order.push_back((now, hash));
        while self.followed.len() > FOLLOWED_MAX || self.order.len() > 2 * FOLLOWED_MAX {
            self.drop_oldest(now);
        }
    }

    /// A page is gone for good.
    pub(super) fn forget(&mut self, hash: u64, now: u64) {
        if let Some(followed) = self.followed.remove(&hash) {
            self.counts[followed.class.index()].end(now - followed.since);
        }
    }

    /// Whether it is time to learn.
    pub(super) fn is_due(&self, now: u64) -> bool {
        now >= self.due_at
    }

    /// Worths by span, then class.
    pub(super) fn learn(&mut self, now: u64, residents: usize) -> &[f32] {
        if (residents >> self.sample_bits) * FOLLOWED_PER_RESIDENT > FOLLOWED_MAX {
            self.thin_out();
        }
        self.fade(now, residents);
        let mut counts = self.counts.clone();
        for followed in self.followed.values() {
            counts[followed.class.index()].end(now - followed.since);
        }
        let seen: Vec<Seen> = counts.iter().map(Seen::of).collect();
        self.weigh(&seen);
        let age = now - self.first_at.unwrap_or(now);
        self.due_at = now + age.clamp(*LEARN_EVERY.start(), *LEARN_EVERY.end());
        &self.worth
    }

    fn weigh(&mut self, seen: &[Seen]) {
        let of_trails: Vec<Seen> = (0..TRAILS).map(|trail| Seen::sum(&seen[classes_of(trail)])).collect();
        let mut of_hits = [Seen::NOTHING; HITS];
        of_trails.iter().enumerate().for_each(|(trail, seen)| of_hits[hits_of(trail)].add(seen));
        let rates_of_all = Seen::sum(&of_hits).rates_alone();
        let rates_of_hits = of_hits.map(|seen| seen.rates(&rates_of_all));
        for (trail, of_trail) in of_trails.iter().enumerate() {
            let rates_of_trail = of_trail.rates(&rates_of_hits[hits_of(trail)]);
            for class in classes_of(trail) {
                let worth = worth(&seen[class].rates(&rates_of_trail));
                for (span, worth) in worth.iter().enumerate() {
                    self.worth[span * CLASSES + class] = *worth as f32;
                }
            }
        }
    }

    fn is_sampled(&self, hash: u64) -> bool {
        (hash >> SAMPLE_SHIFT) & ((1 << self.sample_bits) - 1) == 0
    }

    fn drop_oldest(&mut self, now: u64) {
        let Some((since, hash)) = self.order.pop_front() else { return };
        if self.followed.get(&hash).is_some_and(|followed| followed.since == since) {
            self.forget(hash, now);
        }
    }

    fn thin_out(&mut self) {
        self.sample_bits += 1;
        let (bits, shift) = (self.sample_bits, SAMPLE_SHIFT);
        self.followed.retain(|hash, _| (hash >> shift) & ((1 << bits) - 1) == 0);
        self.order.retain(|(_, hash)| (hash >> shift) & ((1 << bits) - 1) == 0);
        // The counts are of twice the sample.
        self.counts.iter_mut().for_each(|counts| counts.scale(0.5));
    }

    fn fade(&mut self, now: u64, residents: usize) {
        let half_life = HALF_LIFE_MIN.max(residents as u64 * HALF_LIFE_PER_RESIDENT) as f64;
        let passed = now - self.learnt_at.max(self.first_at.unwrap_or(now));
        self.learnt_at = now;
        let scale = 1.0 / (1.0 + std::f64::consts::LN_2 * passed as f64 / half_life);
        self.counts.iter_mut().for_each(|counts| counts.scale(scale));
    }
}

impl Counts {
    /// The span in which a page's wait ended.
    fn end(&mut self, age: u64) -> usize {
        let span = span_of(age);
        self.ends[span] += 1.0;
        self.last_time[span] += (age - span_start(span)) as f64;
        span
    }

    fn scale(&mut self, factor: f64) {
        for rates in [&mut self.requests, &mut self.ends, &mut self.last_time] {
            rates.iter_mut().for_each(|rate| *rate *= factor);
        }
    }
}

/// Requests at each age, and time spent at it.
#[derive(Debug, Clone, Copy)]
struct Seen {
    requests: Rates,
    time: Rates,
}

impl Seen {
    fn of(counts: &Counts) -> Seen {
        let mut time = counts.last_time;
        let mut passed = 0.0;
        for span in (0..SPANS).rev() {
            time[span] += passed * length(span);
            passed += counts.ends[span];
        }
        Seen { requests: counts.requests, time }
    }

    const NOTHING: Seen = Seen { requests: [0.0; SPANS], time: [0.0; SPANS] };

    fn sum(parts: &[Seen]) -> Seen {
        let mut sum = Seen::NOTHING;
        parts.iter().for_each(|part| sum.add(part));
        sum
    }

    fn add(&mut self, part: &Seen) {
        for span in 0..SPANS {
            self.requests[span] += part.requests[span];
            self.time[span] += part.time[span];
        }
    }

    fn rates_alone(&self) -> Rates {
        let time: f64 = self.time.iter().sum();
        let mut lean = if time > 0.0 { self.requests.iter().sum::<f64>() / time } else { 1.0 / length(0) };
        std::array::from_fn(|span| {
            let rate = self.rate(span, lean);
            lean = rate * UNSEEN_FALL;
            rate
        })
    }

    fn rates(&self, lean: &Rates) -> Rates {
        let requests: f64 = self.requests.iter().sum();
        let expected: f64 = (0..SPANS).map(|span| lean[span] * self.time[span]).sum();
        let level = (requests + 1.0) / (expected + 1.0);
        std::array::from_fn(|span| self.rate(span, lean[span] * level))
    }

    fn rate(&self, span: usize, lean: f64) -> f64 {
        let weight = LEAN_PAGES * length(span);
        (self.requests[span] + lean * weight) / (self.time[span] + weight)
    }
}

/// Per span: the most requests per time from there on.
fn worth(rates: &Rates) -> Rates {
    let mut worth = [0.0; SPANS];
    // From the last span back: stretches that each are best kept to their end, ever less worth.
    let mut stretches: Vec<Stretch> = Vec::with_capacity(SPANS);
    for span in (0..SPANS).rev() {
        let mut stretch = Stretch::of(rates[span], length(span));
        while let Some(next) = stretches.pop_if(|next| next.worth() >= stretch.worth()) {
            stretch = stretch.then(&next);
        }
        worth[span] = stretch.worth();
        stretches.push(stretch);
    }
    worth
}

/// What is to be expected, per page that enters a stretch of ages.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    requests: f64,
    time: f64,
    /// Part that passes it.
    passes: f64,
}

impl Stretch {
    /// At a constant rate, in the form that needs no exponential: results are the same everywhere.
    fn of(rate: f64, length: f64) -> Stretch {
        let passes = 1.0 / (1.0 + rate * length);
        Stretch { requests: 1.0 - passes, time: passes * length, passes }
    }

    fn then(&self, next: &Stretch) -> Stretch {
        Stretch {
            requests: self.requests + self.passes * next.requests,
            time: self.time + self.passes * next.time,
            passes: self.passes * next.passes,
        }
    }

    fn worth(&self) -> f64 {
        self.requests / self.time
    }
}

fn length(span: usize) -> f64 {
    (span_start(span + 1) - span_start(span)) as f64
}

/// Keys are hashes already.
#[derive(Debug, Default)]
pub(super) struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = (self.0 << 8) | u64::from(*byte));
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_returns_soon_is_worth_more_than_what_does_not() {
        let (soon, never) = (Class(0), Class(1));
        let mut learner = Learner::new();
        for round in 0..2000u64 {
            let now = (1 << 32) + 2 * round;
            learner.access(round % 100, soon, now);
            learner.access((1 << 20) + round, never, now + 1);
        }
        let worth = learner.learn((1 << 32) + 4000, 100);
        assert!(worth[soon.index()] > 10.0 * worth[never.index()]);
    }

    #[test]
    fn a_page_just_before_its_return_is_worth_more_than_one_just_after_its_request() {
        let mut rates = [1e-6; SPANS];
        rates[12] = 1e-2;
        let worth = worth(&rates);
        assert!(worth[11] > worth[0] && worth[12] > worth[11] && worth[13] < worth[0]);
    }

    #[test]
    fn the_sample_is_bounded_and_thinned_out() {
        let mut learner = Learner::new();
        for page in 0..3 * FOLLOWED_MAX as u64 {
            learner.access((page << SAMPLE_SHIFT) | page, Class(0), page);
        }
        assert_eq!(learner.followed.len(), FOLLOWED_MAX);
        learner.learn(3 * FOLLOWED_MAX as u64, FOLLOWED_MAX);
        assert_eq!(learner.sample_bits, 1);
        assert_eq!(learner.followed.len(), FOLLOWED_MAX / 2);
    }
}
