//! Checks of the model that hold after each step.

use super::*;

impl Model {
    /// Reads the pages that moved to a copy of before the last crash, as clients would.
    pub(super) fn drop_torn_copies(&mut self) {
        for n in 0..IDS {
            let found = self.log.find(&id(n), 0).filter(|entry| self.unverified.contains(&entry.number));
            if found.is_some_and(|entry| self.read(&entry).is_err())
                && let Some(record) = record_of(&self.log, &id(n))
            {
                self.log.drop_damaged(record);
                self.doubtful.insert(id(n));
            }
        }
    }

    pub(super) fn check_live(&mut self) -> Result<(), String> {
        self.drop_torn_copies();
        for n in 0..IDS {
            let found = self.log.find(&id(n), self.now_ms);
            // A put that replaced the pinned one may have expired already.
            self.check_pin(n, self.log.find(&id(n), 0).as_ref())?;
            let Some(entry) = found else { continue };
            let &(owner, planned, expires) = self.puts.get(&entry.generation).ok_or("a page that was never put")?;
            let forgotten = self.forgotten.get(&n).copied().unwrap_or(0);
            if owner != n || !self.completed.contains(&entry.generation) || planned < forgotten {
                return Err(format!("page {n}: found {entry:?}, forgotten at {forgotten}"));
            }
            if expires != entry.expires_unix_ms || (expires != 0 && expires <= self.now_ms) {
                return Err(format!("page {n}: found {entry:?} at {} ms, its time was {expires}", self.now_ms));
            }
            self.read(&entry)?;
        }
        self.check_quotas()?;
        self.check_scrub()?;
        match self.disk.segments().len() as u32 <= self.segments_max {
            true => Ok(()),
            false => Err("more segments than allowed".into()),
        }
    }

    fn check_pin(&mut self, n: u8, found: Option<&Entry>) -> Result<(), String> {
        let Some(&generation) = self.pinned.get(&n) else { return Ok(()) };
        let expires = self.puts[&generation].2;
        let over = expires != 0 && expires <= self.now_ms;
        match found {
            _ if over => {
                self.pinned.remove(&n);
            }
            None => return Err(format!("page {n} was pinned as put {generation} and is gone")),
            // A newer put inherits the pin, if there is room for it.
            Some(entry) if entry.generation != generation => {
                let is_pinned = record_of(&self.log, &id(n)).map(|record| self.log.retention.pin_of(record.slot));
                let bytes = self.log.retention.pinned_bytes() + record_bytes(entry.payload_bytes as usize) as u64;
                self.pinned.remove(&n);
                if is_pinned == Some(Pin::Hard) {
                    self.pinned.insert(n, entry.generation);
                } else if bytes <= self.log.pinned_bytes_max() {
                    return Err(format!("page {n} was pinned as put {generation}, and {entry:?} is not"));
                }
            }
            Some(_) => {}
        }
        Ok(())
    }

    fn check_quotas(&self) -> Result<(), String> {
        for (&namespace, &quota) in &self.quotas {
            let of_it = |n: &u8| n % 2 == namespace;
            let entries = (0..IDS).filter(of_it).filter_map(|n| self.log.find(&id(n), 0));
            let bytes: u64 = entries.map(|entry| record_bytes(entry.payload_bytes as usize) as u64).sum();
            if bytes > quota && !self.quota_pinned.contains(&namespace) {
                return Err(format!("namespace {namespace} takes {bytes} bytes of {quota}"));
            }
        }
        Ok(())
    }

    /// A scrub pass meets each page once, in order.
    fn check_scrub(&self) -> Result<(), String> {
        let mut after = None;
        let mut met = 0;
        while let Some(mut list) = self.log.scrub_list(after) {
            list.sort(&self.log.index.entries);
            let steps = std::iter::repeat_with(|| self.log.scrub_next(&mut list, 3 * BLOCK_BYTES as u64));
            for (record, entry) in steps.take_while(|pages| !pages.is_empty()).flatten() {
                let at = (entry.place.epoch, entry.place.offset);
                if after.is_some_and(|after| after >= at) || self.log.index.entries.at(record.slot) != Some(entry) {
                    return Err(format!("{entry:?} was scrubbed after {after:?}"));
                }
                (after, met) = (Some(at), met + 1);
            }
            after = Some(list.next_segment());
        }
        match met == self.log.counts().pages {
            true => Ok(()),
            false => Err(format!("{met} pages were scrubbed of {}", self.log.counts().pages)),
        }
    }
}
