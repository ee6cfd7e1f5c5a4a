//! The pages that may go, by class and age.
//!
//! Always true: an offered page stands in exactly one cell, that of its class and of the span that its age was in
//! when it was last looked at; its `span` says which. Within a cell pages stand roughly oldest first. `occupied` has
//! a bit for each cell that is not empty, at the cell's rank.

use super::Page;
use super::classes::{CLASSES, SPANS, span_of, span_start};
use crate::policy::Slot;

/// No page.
pub(super) const NONE: u32 = u32::MAX;
/// The span of a page that is in no cell.
pub(super) const NOT_OFFERED: u8 = u8::MAX;

const CELLS: usize = CLASSES * SPANS;
/// How far from an end a page's place in its cell is looked for.
const WALK_MAX: usize = 8;
/// Looks at a span per length of it.
const SWEEPS_PER_SPAN: u64 = 4;

#[derive(Debug, Clone, Copy)]
struct Cell {
    oldest: u32,
    youngest: u32,
}

#[derive(Debug)]
pub(super) struct Cells {
    cells: Vec<Cell>,
    pages_of_span: [u32; SPANS],
    next_sweep: [u64; SPANS],
    next_sweep_of_all: u64,
    rank_of: Vec<u16>,
    cell_of: Vec<u16>,
    occupied: Vec<u64>,
}

impl Cells {
    pub(super) fn new() -> Cells {
        let mut cells = Cells {
            cells: vec![Cell { oldest: NONE, youngest: NONE }; CELLS],
            pages_of_span: [0; SPANS],
            next_sweep: [0; SPANS],
            next_sweep_of_all: 0,
            rank_of: vec![0; CELLS],
            cell_of: vec![0; CELLS],
            occupied: vec![0; CELLS.div_ceil(64)],
        };
        cells.rank(&[0.0; CELLS]);
        cells
    }

    /// Orders the cells by worth, those worth the same by age, older first. Worths stand by span, then class.
    pub(super) fn rank(&mut self, worth: &[f32]) {
        let mut order: Vec<u16> = (0..CELLS as u16).collect();
        order.sort_by(|a, b| worth[*a as usize].total_cmp(&worth[*b as usize]).then(b.cmp(a)));
        self.occupied.fill(0);
        for (rank, cell) in order.iter().enumerate() {
            self.rank_of[*cell as usize] = rank as u16;
            if self.cells[*cell as usize].oldest != NONE {
                self.occupied[rank / 64] |= 1 << (rank % 64);
            }
        }
        self.cell_of = order;
    }

    /// The oldest page of the cell of least worth.
    pub(super) fn least_worth(&self) -> Option<Slot> {
        let word = self.occupied.iter().position(|word| *word != 0)?;
        let rank = word * 64 + self.occupied[word].trailing_zeros() as usize;
        Some(Slot(self.cells[self.cell_of[rank] as usize].oldest))
    }

    /// The page that was not asked for the longest.
    pub(super) fn oldest(&self, pages: &[Page]) -> Option<Slot> {
        let span = (0..SPANS).rev().find(|span| self.pages_of_span[*span] > 0)?;
        let heads = self.cells[span * CLASSES..][..CLASSES].iter().map(|cell| cell.oldest);
        let oldest = heads.filter(|head| *head != NONE).min_by_key(|head| {
            let page = &pages[*head as usize];
            (page.run, std::cmp::Reverse(page.position))
        })?;
        Some(Slot(oldest))
    }

    /// Puts a page into its cell.
    pub(super) fn enter(&mut self, pages: &mut [Page], slot: Slot, now: u64) {
        let page = &mut pages[slot.index()];
        let span = span_of(now.saturating_sub(page.run));
        page.span = span as u8;
        let cell = cell_of(page);
        let older = self.place(pages, cell, pages[slot.index()].run);
        let younger = match older {
            NONE => self.cells[cell].oldest,
            older => pages[older as usize].next,
        };
        pages[slot.index()].previous = older;
        pages[slot.index()].next = younger;
        self.link(pages, cell, older, slot.0, younger);
        self.pages_of_span[span] += 1;
        self.mark(cell);
    }

    /// Takes a page out of its cell.
    pub(super) fn leave(&mut self, pages: &mut [Page], slot: Slot) {
        let page = pages[slot.index()];
        let cell = cell_of(&page);
        match page.previous {
            NONE => self.cells[cell].oldest = page.next,
            older => pages[older as usize].next = page.next,
        }
        match page.next {
            NONE => self.cells[cell].youngest = page.previous,
            younger => pages[younger as usize].previous = page.previous,
        }
        pages[slot.index()].span = NOT_OFFERED;
        self.pages_of_span[page.span as usize] -= 1;
        self.mark(cell);
    }

    /// Moves pages on whose age has left their span, a little late.
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
        for cell in span * CLASSES..(span + 1) * CLASSES {
            while self.cells[cell].oldest != NONE {
                let oldest = self.cells[cell].oldest;
                if now.saturating_sub(pages[oldest as usize].run) < end {
                    break;
                }
                self.leave(pages, Slot(oldest));
                self.enter(pages, Slot(oldest), now);
            }
        }
    }

    /// The page of a cell behind which one of this run belongs, `NONE` for the oldest end.
    fn place(&self, pages: &[Page], cell: usize, run: u64) -> u32 {
        let Cell { oldest, youngest } = self.cells[cell];
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

    fn link(&mut self, pages: &mut [Page], cell: usize, older: u32, page: u32, younger: u32) {
        match older {
            NONE => self.cells[cell].oldest = page,
            older => pages[older as usize].next = page,
        }
        match younger {
            NONE => self.cells[cell].youngest = page,
            younger => pages[younger as usize].previous = page,
        }
    }

    fn mark(&mut self, cell: usize) {
        let rank = self.rank_of[cell] as usize;
        let bit = 1 << (rank % 64);
        if self.cells[cell].oldest == NONE {
            self.occupied[rank / 64] &= !bit;
        } else {
            self.occupied[rank / 64] |= bit;
        }
    }
}

fn cell_of(page: &Page) -> usize {
    page.span as usize * CLASSES + page.class.index()
}
