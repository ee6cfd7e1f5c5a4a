//! Buckets of evictable pages, by class and age.
//!
//! Invariants:
//! - An offered page is in exactly one bucket: that of its class, and of the span of its age at the
//!   last sweep.
//! - Within a bucket pages are roughly in order of age, oldest first.
//! - `occupied` has a bit for each bucket that is not empty, at the bucket's rank. So the first set
//!   bit is the bucket of lowest density.

use super::Page;
use super::classes::{CLASSES, Class, SPANS, span_of, span_start};
use crate::policy::Slot;

pub(super) const NONE: u32 = u32::MAX;
pub(super) const NOT_OFFERED: u16 = u16::MAX;

const BUCKETS: usize = CLASSES * SPANS;
const _: () = assert!(BUCKETS < NOT_OFFERED as usize);
/// Steps of the search for a page's position in its bucket, from either end. It bounds the cost;
/// the order is approximate.
const WALK_MAX: usize = 8;
/// Sweeps of a span per length of that span.
const SWEEPS_PER_SPAN: u64 = 4;

#[derive(Debug, Clone, Copy)]
struct Bucket {
    oldest: u32,
    youngest: u32,
}

#[derive(Debug)]
pub(super) struct AgeBuckets {
    buckets: Vec<Bucket>,
    pages_of_span: [u32; SPANS],
    next_sweep: [u64; SPANS],
    next_sweep_of_all: u64,
    rank_of: Vec<u16>,
    bucket_of: Vec<u16>,
    occupied: Vec<u64>,
}

impl AgeBuckets {
    pub(super) fn new() -> AgeBuckets {
        let mut buckets = AgeBuckets {
            buckets: vec![Bucket { oldest: NONE, youngest: NONE }; BUCKETS],
            pages_of_span: [0; SPANS],
            next_sweep: [0; SPANS],
            next_sweep_of_all: 0,
            rank_of: vec![0; BUCKETS],
            bucket_of: vec![0; BUCKETS],
            occupied: vec![0; BUCKETS.div_ceil(64)],
        };
        buckets.rank(&[0.0; BUCKETS]);
        buckets
    }

    /// Ranks the buckets by density, and among equals by age, older first. `density` is indexed by
    /// span, then class. The last span, of ages above nine hours, goes first: demoted pages are in
    /// it.
    pub(super) fn rank(&mut self, density: &[f32]) {
        // Densities are not negative, so their bits order as they do.
        let key = |bucket: usize| {
            let density = if bucket / CLASSES == SPANS - 1 { 0.0 } else { density[bucket] };
            u64::from(density.to_bits()) << 16 | (BUCKETS - 1 - bucket) as u64
        };
        let mut keys: Vec<u64> = (0..BUCKETS).map(key).collect();
        keys.sort_unstable();
        let order: Vec<u16> = keys.iter().map(|key| (BUCKETS - 1) as u16 - *key as u16).collect();
        self.occupied.fill(0);
        for (rank, bucket) in order.iter().enumerate() {
            self.rank_of[*bucket as usize] = rank as u16;
            if self.buckets[*bucket as usize].oldest != NONE {
                self.occupied[rank / 64] |= 1 << (rank % 64);
            }
        }
        self.bucket_of = order;
    }

    pub(super) fn lowest_density(&self) -> Option<Slot> {
        Some(Slot(self.buckets[usize::from(self.bucket_of[self.lowest_rank()?])].oldest))
    }

    /// Returns `true` if a page of this class that arrives now ranks below all offered pages.
    pub(super) fn ranks_below_all(&self, class: Class) -> bool {
        self.lowest_rank().is_some_and(|lowest| usize::from(self.rank_of[class.index()]) < lowest)
    }

    fn lowest_rank(&self) -> Option<usize> {
        let word = self.occupied.iter().position(|word| *word != 0)?;
        Some(word * 64 + self.occupied[word].trailing_zeros() as usize)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        BUCKETS * (size_of::<Bucket>() + 2 * size_of::<u16>()) + self.occupied.len() * 8
    }

    pub(super) fn oldest(&self, pages: &[Page]) -> Option<Slot> {
        let span = (0..SPANS).rev().find(|span| self.pages_of_span[*span] > 0)?;
        let heads = self.buckets[span * CLASSES..][..CLASSES].iter().map(|bucket| bucket.oldest);
        let oldest = heads.filter(|head| *head != NONE).min_by_key(|head| {
            let page = &pages[*head as usize];
            (page.run, std::cmp::Reverse(page.position))
        })?;
        Some(Slot(oldest))
    }

    /// A youngest page, for a policy that chooses badly.
    #[cfg(test)]
    pub(super) fn newest(&self, pages: &[Page]) -> Option<Slot> {
        let span = (0..SPANS).find(|span| self.pages_of_span[*span] > 0)?;
        let youngest = self.buckets[span * CLASSES..][..CLASSES].iter().map(|bucket| bucket.youngest);
        let youngest = youngest.filter(|page| *page != NONE);
        youngest.max_by_key(|page| (pages[*page as usize].run, pages[*page as usize].position)).map(Slot)
    }

    pub(super) fn enter(&mut self, pages: &mut [Page], slot: Slot, now: u64) {
        let page = &mut pages[slot.index()];
        let span = span_of(now.saturating_sub(page.run));
        let bucket = span * CLASSES + page.class().index();
        page.bucket = bucket as u16;
        let older = self.insertion_point(pages, bucket, pages[slot.index()].run);
        let younger = match older {
            NONE => self.buckets[bucket].oldest,
            older => pages[older as usize].next,
        };
        pages[slot.index()].previous = older;
        pages[slot.index()].next = younger;
        self.link(pages, bucket, older, slot.0, younger);
        self.pages_of_span[span] += 1;
        self.update_occupied(bucket);
    }

    pub(super) fn leave(&mut self, pages: &mut [Page], slot: Slot) {
        let page = pages[slot.index()];
        let bucket = usize::from(page.bucket);
        match page.previous {
            NONE => self.buckets[bucket].oldest = page.next,
            older => pages[older as usize].next = page.next,
        }
        match page.next {
            NONE => self.buckets[bucket].youngest = page.previous,
            younger => pages[younger as usize].previous = page.previous,
        }
        pages[slot.index()].bucket = NOT_OFFERED;
        self.pages_of_span[bucket / CLASSES] -= 1;
        self.update_occupied(bucket);
    }

    /// Moves pages whose age has outgrown their span. Each span is swept a few times per its
    /// length, so pages move a little late.
    pub(super) fn advance(&mut self, pages: &mut [Page], now: u64) {
        if now < self.next_sweep_of_all {
            return;
        }
        for span in 0..SPANS - 1 {
            if now >= self.next_sweep[span] {
                let length = span_start(span + 1) - span_start(span);
                self.next_sweep[span] = now + length / SWEEPS_PER_SPAN;
                if self.pages_of_span[span] > 0 {
                    self.sweep(pages, span, now);
                }
            }
        }
        self.next_sweep_of_all = self.next_sweep[..SPANS - 1].iter().copied().min().unwrap_or(0);
    }

    fn sweep(&mut self, pages: &mut [Page], span: usize, now: u64) {
        let end = span_start(span + 1);
        for bucket in span * CLASSES..(span + 1) * CLASSES {
            while self.buckets[bucket].oldest != NONE {
                let oldest = self.buckets[bucket].oldest;
                if now.saturating_sub(pages[oldest as usize].run) < end {
                    break;
                }
                self.leave(pages, Slot(oldest));
                self.enter(pages, Slot(oldest), now);
            }
        }
    }

    /// The page after which a page of this run belongs, `NONE` for the oldest end.
    fn insertion_point(&self, pages: &[Page], bucket: usize, run: u64) -> u32 {
        let Bucket { oldest, youngest } = self.buckets[bucket];
        let mut at = youngest;
        for _ in 0..WALK_MAX {
            if at == NONE || pages[at as usize].run < run {
                return at;
            }
            at = pages[at as usize].previous;
        }
        let mut older = NONE;
        let mut at = oldest;
        for _ in 0..WALK_MAX {
            if at == NONE || pages[at as usize].run >= run {
                break;
            }
            older = at;
            at = pages[at as usize].next;
        }
        older
    }

    fn link(&mut self, pages: &mut [Page], bucket: usize, older: u32, page: u32, younger: u32) {
        match older {
            NONE => self.buckets[bucket].oldest = page,
            older => pages[older as usize].next = page,
        }
        match younger {
            NONE => self.buckets[bucket].youngest = page,
            younger => pages[younger as usize].previous = page,
        }
    }

    fn update_occupied(&mut self, bucket: usize) {
        let rank = self.rank_of[bucket] as usize;
        let bit = 1 << (rank % 64);
        if self.buckets[bucket].oldest == NONE {
            self.occupied[rank / 64] &= !bit;
        } else {
            self.occupied[rank / 64] |= bit;
        }
    }
}
