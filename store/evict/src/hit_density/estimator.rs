//! Estimates the hit density of each class at each age.
//!
//! *Sample.* The estimator follows a sample of pages, chosen by hash, from access to access,
//! whether resident or not. So the estimate does not depend on past evictions. Per class and span
//! of ages it counts the pages that were accessed at that age, and the time that pages spent at it.
//! Their ratio is the access rate (the hazard rate). A page that drops out of the sample counts
//! with its time until then.
//!
//! *Generations.* A page is *open* from its access until the reported end of the generation, if an
//! engine reports it. Then its class changes, and the estimator follows it from there. It counts at
//! which age generations end, as it counts accesses.
//!
//! *Priors.* With few observations a rate is pulled towards a prior. The prior is the rate of all
//! positions with the same history, then that of the same access count, then that of all pages.
//! Each is scaled to the observed level. Without any observation, rates fall with age.
//!
//! *Density.* The density of a page is the maximum, over all ages up to which it may be kept, of
//! expected hits divided by expected time (the Gittins index). At the end of its generation an open
//! page goes on as a page of the class without an open generation.
//!
//! *Outlook.* The probability that a page is accessed again at all, up to the highest age of which
//! there are observations. Density ranks pages by how soon they return; a slower tier with room for
//! much more traffic needs to know which of them do.
//!
//! *Decay.* Old counts decay, with a half-life in accesses that grows with the number of resident
//! pages. Ages are times, in ticks.

use super::classes::{CLASSES, Class, HISTORIES, HITS, OPEN_CLASSES, SPANS, classes_of, hits_of, span_of, span_start};
use crate::map_bytes;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

const TRACKED_MAX: usize = 1 << 16;
/// Minimum number of tracked pages per sampled resident page. Below it the sample is halved.
const TRACKED_PER_RESIDENT: usize = 4;
/// Accesses between two updates of the estimate. The interval grows with the age of the cache,
/// within these bounds.
const UPDATE_INTERVAL: std::ops::RangeInclusive<u64> = 1 << 8..=1 << 14;
const HALF_LIFE_MIN: u64 = 1 << 19;
/// Half-life of the counts per resident page, in accesses.
const HALF_LIFE_PER_RESIDENT: u64 = 16;
/// Weight of a prior, in pages. With fewer observations than this, an estimate stays close to that
/// of the next coarser class.
const PRIOR_PAGES: f64 = 20.0;
/// Factor by which the rate falls from span to span where nothing was observed.
const UNSEEN_DECAY: f64 = 0.707;
const SAMPLE_SHIFT: u32 = 24;
/// Probabilities of an access that separate the values of [`Outlook`].
const LIKELY_MIN: f64 = 0.5;
const UNLIKELY_MAX: f64 = 0.125;

type Rates = [f64; SPANS];

/// Probability of another access to a page, as far as the traffic so far can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outlook {
    /// At most an eighth.
    Unlikely,
    /// Between the others, or not known.
    Unclear,
    /// At least a half.
    Likely,
}

impl Outlook {
    fn of(probability: f64) -> Outlook {
        if probability >= LIKELY_MIN {
            Outlook::Likely
        } else if probability <= UNLIKELY_MAX {
            Outlook::Unlikely
        } else {
            Outlook::Unclear
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Tracked {
    since: u64,
    class: Class,
}

#[derive(Debug, Clone, Copy)]
struct Counts {
    /// Pages accessed again at this age.
    requests: Rates,
    /// Pages whose generation ended at this age.
    generation_ends: Rates,
    /// Pages accessed again, or dropped from the sample, or changed their class, at this age. They
    /// passed all earlier spans.
    ends: Rates,
    /// Time that these pages spent in their last span.
    last_time: Rates,
}

#[derive(Debug)]
pub(super) struct DensityEstimator {
    tracked: HashMap<u64, Tracked, BuildHasherDefault<IdentityHasher>>,
    /// Start of each tracking, oldest first. Entries of pages that were accessed again are stale.
    order: VecDeque<(u64, u64)>,
    sample_bits: u32,
    counts: Vec<Counts>,
    density: Vec<f32>,
    /// Indexed as `density`.
    outlook: Vec<Outlook>,
    /// Accesses to all pages.
    accesses: u64,
    updated_at: u64,
    due_at: u64,
}

impl DensityEstimator {
    pub(super) fn new() -> DensityEstimator {
        let none = [0.0; SPANS];
        let none = Counts { requests: none, generation_ends: none, ends: none, last_time: none };
        DensityEstimator {
            tracked: HashMap::default(),
            order: VecDeque::new(),
            sample_bits: 0,
            counts: vec![none; CLASSES],
            density: vec![0.0; CLASSES * SPANS],
            outlook: vec![Outlook::Unclear; CLASSES * SPANS],
            accesses: 0,
            updated_at: 0,
            due_at: *UPDATE_INTERVAL.start(),
        }
    }

    pub(super) fn access(&mut self, hash: u64, class: Class, now: u64) {
        self.accesses += 1;
        if !self.is_sampled(hash) {
            return;
        }
        if let Some(before) = self.tracked.insert(hash, Tracked { since: now, class }) {
            let span = self.counts[before.class.index()].end(now - before.since);
            self.counts[before.class.index()].requests[span] += 1.0;
        }
        self.note_start(hash, now);
    }

    /// Counts the end of the generation of a page's last access. Later calls have no effect before
    /// its next access.
    pub(super) fn generation_ended(&mut self, hash: u64, now: u64) {
        let Some(tracked) = self.tracked.get_mut(&hash).filter(|tracked| !tracked.class.has_ended()) else { return };
        let before = std::mem::replace(tracked, Tracked { since: now, class: tracked.class.ended() });
        let counts = &mut self.counts[before.class.index()];
        let span = counts.end(now - before.since);
        counts.generation_ends[span] += 1.0;
        self.note_start(hash, now);
    }

    fn note_start(&mut self, hash: u64, now: u64) {
        self.order.push_back((now, hash));
        while self.tracked.len() > TRACKED_MAX || self.order.len() > 2 * TRACKED_MAX {
            self.drop_oldest(now);
        }
    }

    pub(super) fn forget(&mut self, hash: u64, now: u64) {
        if let Some(tracked) = self.tracked.remove(&hash) {
            self.counts[tracked.class.index()].end(now - tracked.since);
        }
    }

    pub(super) fn is_due(&self) -> bool {
        self.accesses >= self.due_at
    }

    /// Updates the estimate. Returns densities, indexed by span, then class. Costs a pass over the
    /// tracked pages and over all classes.
    pub(super) fn update(&mut self, now: u64, residents: usize) -> &[f32] {
        if (residents >> self.sample_bits) * TRACKED_PER_RESIDENT > TRACKED_MAX {
            self.halve_sample();
        }
        self.decay(residents);
        let mut counts = self.counts.clone();
        for tracked in self.tracked.values() {
            counts[tracked.class.index()].end(now - tracked.since);
        }
        self.estimate(&counts);
        self.due_at = self.accesses + self.accesses.clamp(*UPDATE_INTERVAL.start(), *UPDATE_INTERVAL.end());
        &self.density
    }

    fn estimate(&mut self, counts: &[Counts]) {
        let observed: Vec<Observed> = counts.iter().map(|counts| Observed::of(counts, &counts.requests)).collect();
        let (open, ended) = observed.split_at(OPEN_CLASSES);
        let requests = smoothed(open);
        // Without reports there are no pages in the other classes, and nothing to compute.
        let reported = counts.iter().any(|counts| counts.generation_ends.iter().any(|count| *count > 0.0));
        let ends: Vec<Observed> = counts[..OPEN_CLASSES]
            .iter()
            .filter(|_| reported)
            .map(|counts| Observed::of(counts, &counts.generation_ends))
            .collect();
        let after_ends = if reported { Some((smoothed(&ends), smoothed(ended))) } else { None };
        let observed_spans = observed_spans(&observed);
        for class in 0..OPEN_CLASSES {
            let mut end = None;
            let mut end_of_all = None;
            if let Some((ends, requests_after)) = &after_ends {
                let (of_ended, first) = density(&requests_after[class], None);
                self.set_density(class + OPEN_CLASSES, &of_ended);
                end = Some((&ends[class], first));
                let (of_ended, all) = probability(&requests_after[class], None, observed_spans);
                self.set_outlook(class + OPEN_CLASSES, &of_ended);
                end_of_all = Some((&ends[class], all));
            }
            let (of_open, _) = density(&requests[class], end);
            self.set_density(class, &of_open);
            let (of_open, _) = probability(&requests[class], end_of_all, observed_spans);
            self.set_outlook(class, &of_open);
        }
    }

    /// Outlook of a page of this class and age, at the last update.
    pub(super) fn outlook(&self, class: Class, age: u64) -> Outlook {
        self.outlook[span_of(age) * CLASSES + class.index()]
    }

    fn set_outlook(&mut self, class: usize, probability: &Rates) {
        for (span, probability) in probability.iter().enumerate() {
            self.outlook[span * CLASSES + class] = Outlook::of(*probability);
        }
    }

    fn set_density(&mut self, class: usize, density: &Rates) {
        for (span, density) in density.iter().enumerate() {
            self.density[span * CLASSES + class] = *density as f32;
        }
    }

    /// Ends of the spans with the first tenth, the first half and the first nine tenths of the gaps
    /// between accesses. `None` without any.
    pub(super) fn gaps(&self) -> Option<[u64; 3]> {
        let mut of_span: Rates = [0.0; SPANS];
        for counts in &self.counts {
            of_span.iter_mut().zip(&counts.requests).for_each(|(sum, count)| *sum += count);
        }
        let all: f64 = of_span.iter().sum();
        let end_of = |share: f64| {
            let mut sum = 0.0;
            let span = of_span.iter().position(|count| {
                sum += count;
                sum >= share * all
            });
            span_start(span.unwrap_or(SPANS - 1) + 1)
        };
        (all > 0.0).then(|| [0.1, 0.5, 0.9].map(end_of))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        map_bytes::<(u64, Tracked)>(self.tracked.capacity())
            + self.order.capacity() * size_of::<(u64, u64)>()
            + self.counts.len() * size_of::<Counts>()
            + self.density.len() * (size_of::<f32>() + size_of::<Outlook>())
    }

    fn is_sampled(&self, hash: u64) -> bool {
        (hash >> SAMPLE_SHIFT) & ((1 << self.sample_bits) - 1) == 0
    }

    fn drop_oldest(&mut self, now: u64) {
        let Some((since, hash)) = self.order.pop_front() else { return };
        if self.tracked.get(&hash).is_some_and(|tracked| tracked.since == since) {
            self.forget(hash, now);
        }
    }

    fn halve_sample(&mut self) {
        self.sample_bits += 1;
        let bits = self.sample_bits;
        let shift = SAMPLE_SHIFT;
        self.tracked.retain(|hash, _| (hash >> shift) & ((1 << bits) - 1) == 0);
        self.order.retain(|(_, hash)| (hash >> shift) & ((1 << bits) - 1) == 0);
        // The counts come from a sample of twice the size.
        self.counts.iter_mut().for_each(|counts| counts.scale(0.5));
    }

    fn decay(&mut self, residents: usize) {
        let half_life = HALF_LIFE_MIN.max(residents as u64 * HALF_LIFE_PER_RESIDENT) as f64;
        let passed = self.accesses - self.updated_at;
        self.updated_at = self.accesses;
        let scale = 1.0 / (1.0 + std::f64::consts::LN_2 * passed as f64 / half_life);
        self.counts.iter_mut().for_each(|counts| counts.scale(scale));
    }
}

impl Counts {
    /// Counts the end of a page's wait, and returns the span of its age.
    fn end(&mut self, age: u64) -> usize {
        let span = span_of(age);
        self.ends[span] += 1.0;
        self.last_time[span] += (age - span_start(span)) as f64;
        span
    }

    fn scale(&mut self, factor: f64) {
        for rates in [&mut self.requests, &mut self.generation_ends, &mut self.ends, &mut self.last_time] {
            rates.iter_mut().for_each(|rate| *rate *= factor);
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Observed {
    /// Accesses, or ends of generations.
    requests: Rates,
    time: Rates,
}

impl Observed {
    fn of(counts: &Counts, requests: &Rates) -> Observed {
        let mut time = counts.last_time;
        let mut passed = 0.0;
        for span in (0..SPANS).rev() {
            time[span] += passed * length(span);
            passed += counts.ends[span];
        }
        Observed { requests: *requests, time }
    }

    const NOTHING: Observed = Observed { requests: [0.0; SPANS], time: [0.0; SPANS] };

    fn sum(parts: &[Observed]) -> Observed {
        let mut sum = Observed::NOTHING;
        parts.iter().for_each(|part| sum.add(part));
        sum
    }

    fn add(&mut self, part: &Observed) {
        for span in 0..SPANS {
            self.requests[span] += part.requests[span];
            self.time[span] += part.time[span];
        }
    }

    fn rates_alone(&self) -> Rates {
        let time: f64 = self.time.iter().sum();
        let mut prior = if time > 0.0 { self.requests.iter().sum::<f64>() / time } else { 1.0 / length(0) };
        std::array::from_fn(|span| {
            let rate = self.rate(span, prior);
            prior = rate * UNSEEN_DECAY;
            rate
        })
    }

    fn rates(&self, prior: &Rates) -> Rates {
        let requests: f64 = self.requests.iter().sum();
        let expected: f64 = (0..SPANS).map(|span| prior[span] * self.time[span]).sum();
        let level = (requests + 1.0) / (expected + 1.0);
        std::array::from_fn(|span| self.rate(span, prior[span] * level))
    }

    fn rate(&self, span: usize, prior: f64) -> f64 {
        let weight = PRIOR_PAGES * length(span);
        (self.requests[span] + prior * weight) / (self.time[span] + weight)
    }
}

/// Rates of all classes, each with its prior.
fn smoothed(observed: &[Observed]) -> Vec<Rates> {
    let of_histories: Vec<Observed> =
        (0..HISTORIES).map(|history| Observed::sum(&observed[classes_of(history)])).collect();
    let mut of_hits = [Observed::NOTHING; HITS];
    of_histories.iter().enumerate().for_each(|(history, observed)| of_hits[hits_of(history)].add(observed));
    let rates_of_all = Observed::sum(&of_hits).rates_alone();
    let rates_of_hits = of_hits.map(|observed| observed.rates(&rates_of_all));
    let mut rates = Vec::with_capacity(observed.len());
    for (history, of_history) in of_histories.iter().enumerate() {
        let rates_of_history = of_history.rates(&rates_of_hits[hits_of(history)]);
        rates.extend(observed[classes_of(history)].iter().map(|observed| observed.rates(&rates_of_history)));
    }
    rates
}

/// Density per span: the maximum rate of hits from that span on. Also the first interval, in which
/// a page of age 0 is best kept. `ends` has the rate at which generations end, and that interval of
/// the class which pages have from there on.
fn density(rates: &Rates, ends: Option<(&Rates, Interval)>) -> (Rates, Interval) {
    let mut density = [0.0; SPANS];
    // Intervals, built from the last span backwards. A page is best kept to the end of the one it
    // is in, and their densities decrease.
    let mut intervals: Vec<Interval> = Vec::with_capacity(SPANS);
    let mut first = Interval { requests: 0.0, time: 0.0, passes: 1.0 };
    for span in (0..SPANS).rev() {
        let end = ends.map(|(ends, after)| (ends[span], after));
        let mut interval = Interval::of(rates[span], end, length(span));
        while let Some(next) = intervals.pop_if(|next| next.density() >= interval.density()) {
            interval = interval.then(&next);
        }
        density[span] = interval.density();
        intervals.push(interval);
        first = interval;
    }
    (density, first)
}

/// Number of spans, from the first on, at which enough pages of any class were observed.
fn observed_spans(observed: &[Observed]) -> usize {
    let time_at = |span: usize| observed.iter().map(|class| class.time[span]).sum::<f64>();
    (0..SPANS).rfind(|&span| time_at(span) >= PRIOR_PAGES * length(span)).map_or(0, |span| span + 1)
}

/// Probability of an access per span: from that span to the end of the first `spans` ones. Also the
/// interval of all these. `ends` is as for [`density`], with that interval of the class after the
/// end.
fn probability(rates: &Rates, ends: Option<(&Rates, Interval)>, spans: usize) -> (Rates, Interval) {
    let mut probability = [0.0; SPANS];
    let mut rest = Interval { requests: 0.0, time: 0.0, passes: 1.0 };
    for span in (0..spans).rev() {
        let end = ends.map(|(ends, after)| (ends[span], after));
        rest = Interval::of(rates[span], end, length(span)).then(&rest);
        probability[span] = rest.requests;
    }
    (probability, rest)
}

#[derive(Debug, Clone, Copy)]
struct Interval {
    requests: f64,
    time: f64,
    /// Probability that the page passes the interval without an access or an end.
    passes: f64,
}

impl Interval {
    /// At constant rates of accesses and of ends, each followed by an interval. The form without an
    /// exponential gives the same results on every machine.
    fn of(rate: f64, end: Option<(f64, Interval)>, length: f64) -> Interval {
        let (ends, after) = end.map_or((0.0, None), |(ends, after)| (ends, Some(after)));
        let passes = 1.0 / (1.0 + (rate + ends) * length);
        let time = passes * length;
        let [more_requests, more_time] = after.map_or([0.0; 2], |after| [after.requests, after.time]);
        Interval { requests: time * (rate + ends * more_requests), time: time * (1.0 + ends * more_time), passes }
    }

    fn then(&self, next: &Interval) -> Interval {
        Interval {
            requests: self.requests + self.passes * next.requests,
            time: self.time + self.passes * next.time,
            passes: self.passes * next.passes,
        }
    }

    fn density(&self) -> f64 {
        self.requests / self.time
    }
}

fn length(span: usize) -> f64 {
    (span_start(span + 1) - span_start(span)) as f64
}

#[derive(Debug, Default)]
pub(super) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
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
    fn page_that_returns_soon_is_denser_than_one_that_does_not() {
        let soon = Class(0);
        let never = Class(1);
        let mut estimator = DensityEstimator::new();
        for round in 0..2000u64 {
            let now = (1 << 32) + 2 * round;
            estimator.access(round % 100, soon, now);
            estimator.access((1 << 20) + round, never, now + 1);
        }
        let density = estimator.update((1 << 32) + 4000, 100);
        assert!(density[soon.index()] > 10.0 * density[never.index()]);
    }

    #[test]
    fn gaps_are_those_of_the_traffic() {
        let mut estimator = DensityEstimator::new();
        assert_eq!(estimator.gaps(), None);
        let mut now = 0;
        for number in 0..100u64 {
            now += if number % 4 == 0 { span_start(20) } else { span_start(10) };
            estimator.access(0, Class(0), now);
        }
        assert_eq!(estimator.gaps(), Some([span_start(11), span_start(11), span_start(21)]));
    }

    #[test]
    fn page_of_a_long_generation_waits_for_its_end() {
        let (open, ended) = (Class(0), Class(0).ended());
        let mut estimator = DensityEstimator::new();
        let [generation, pause] = [span_start(16), span_start(8)];
        let mut now = 1 << 32;
        for round in 0..4000u64 {
            let page = round % 4;
            // Four pages in turn: each answer takes as long as the pauses of the others.
            now += if page == 0 { generation } else { 1 };
            estimator.generation_ended((page + 1) % 4, now);
            estimator.access(page, open, now + pause);
            // The second report of one generation has no effect.
            estimator.generation_ended((page + 1) % 4, now + pause);
            now += pause;
        }
        let density = estimator.update(now, 100);
        let at = |class: Class, span: usize| density[span * CLASSES + class.index()];
        assert!(at(ended, 0) > 2.0 * at(open, 0), "{} {}", at(ended, 0), at(open, 0));
    }

    #[test]
    fn end_of_a_generation_leads_to_the_value_after_it() {
        let (soon, never) = ([1e-3; SPANS], [1e-9; SPANS]);
        let (of_ended, first) = density(&soon, None);
        let without_ends = density(&never, None).0[0];
        let with_ends = density(&never, Some((&[1e-3; SPANS], first))).0[0];
        assert!(with_ends > 1000.0 * without_ends && with_ends < of_ended[0]);
        assert_eq!(density(&never, Some((&[0.0; SPANS], first))).0[0], without_ends);
    }

    #[test]
    fn page_just_before_its_return_is_denser_than_just_after_its_access() {
        let mut rates = [1e-6; SPANS];
        rates[12] = 1e-2;
        let (density, _) = density(&rates, None);
        assert!(density[11] > density[0] && density[12] > density[11] && density[13] < density[0]);
    }

    #[test]
    fn outlook_tells_pages_that_return_late_from_those_that_do_not() {
        let [late, never] = [0, 1].map(Class);
        let mut estimator = DensityEstimator::new();
        assert_eq!(estimator.outlook(late, 0), Outlook::Unclear, "nothing is known");
        let mut now = 1 << 32;
        for round in 0..4000u64 {
            now += span_start(12);
            estimator.access(round % 40, late, now);
            estimator.access((1 << 20) + round, never, now);
        }
        estimator.update(now, 100);
        assert_eq!(estimator.outlook(late, 0), Outlook::Likely);
        assert_eq!(estimator.outlook(never, 0), Outlook::Unlikely);
    }

    #[test]
    fn probability_counts_accesses_after_the_end_of_a_generation() {
        let never = [0.0; SPANS];
        let mut once = never;
        // The odds are 3 to 1 in this span.
        once[5] = 3.0 / length(5);
        let (of_ended, all) = probability(&once, None, 20);
        assert!((of_ended[0] - 0.75).abs() < 1e-9 && of_ended[6] == 0.0, "{of_ended:?}");
        assert_eq!(probability(&once, None, 5).0[0], 0.0, "nothing was observed at that age");
        let mut ends = never;
        ends[2] = 1.0 / length(2);
        let (of_open, _) = probability(&never, Some((&ends, all)), 20);
        assert!((of_open[0] - 0.375).abs() < 1e-9, "half of the generations end, {of_open:?}");
        assert_eq!([0.5, 0.3, 0.125].map(Outlook::of), [Outlook::Likely, Outlook::Unclear, Outlook::Unlikely]);
    }

    #[test]
    fn sample_is_bounded_and_halved() {
        let mut estimator = DensityEstimator::new();
        for page in 0..3 * TRACKED_MAX as u64 {
            estimator.access((page << SAMPLE_SHIFT) | page, Class(0), page);
        }
        assert_eq!(estimator.tracked.len(), TRACKED_MAX);
        estimator.update(3 * TRACKED_MAX as u64, TRACKED_MAX);
        assert_eq!(estimator.sample_bits, 1);
        assert_eq!(estimator.tracked.len(), TRACKED_MAX / 2);
    }
}
