//! Record of a workload, and the judgement of a node that starts after a power cut.
//!
//! Invariants:
//! - The versions of a page grow. A version is put only when no older one can be served any more,
//!   or when the log had evicted it.
//! - An event that begins an operation precedes its request; one that ends it follows the answer.
//!
//! A power cut lies between two marks of the write log. All events before the first mark have
//! certainly happened, and none after the second one.

/// A page: its kind, and its number in it.
pub type Page = (usize, usize);

#[derive(Debug, Clone, Copy)]
pub enum Event {
    PutBegun {
        page: Page,
        version: u64,
        bytes: u64,
    },
    /// The node reported that the page was on the device, and synced.
    Durable {
        page: Page,
        version: u64,
    },
    ForgetBegun {
        page: Page,
    },
    /// The node acknowledged that versions below this one are forgotten.
    Forgotten {
        page: Page,
        below: u64,
    },
    /// A start of the node takes a new segment.
    Restart,
}

/// Bytes that may be put after a page before the log may evict it. Copies at most double the
/// writes, and the log holds four times as much.
pub const RETAINED_BYTES: u64 = 4 << 20;
/// Largest part of a segment that a restart leaves unused.
const RESTART_BYTES: u64 = 1 << 20;

/// Allowed states of a page after a power cut.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Expected {
    /// Number of versions whose put had begun.
    pub newest: u64,
    forgotten_below: u64,
    /// Acknowledged durable version, which must be present.
    pub must_have: Option<u64>,
}

/// End of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Version(u64),
    /// Bytes of no version.
    OtherBytes,
    Miss,
    /// The node did not say whether it has the page.
    Refused,
}

impl Found {
    pub fn version(self) -> Option<u64> {
        if let Found::Version(version) = self { Some(version) } else { None }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Violation {
    WrongBytes,
    NeverPut,
    Forgotten,
    Lost,
    /// Might hide any other violation.
    Refused,
}

impl Expected {
    pub fn judge(&self, found: Found) -> Result<(), Violation> {
        match found {
            Found::OtherBytes => Err(Violation::WrongBytes),
            Found::Refused => Err(Violation::Refused),
            Found::Version(version) if version == 0 || version > self.newest => Err(Violation::NeverPut),
            Found::Version(version) if version < self.forgotten_below => Err(Violation::Forgotten),
            found if self.must_have.is_some() && found.version() != self.must_have => Err(Violation::Lost),
            _ => Ok(()),
        }
    }

    /// A forgotten version could return, so this page tests the promise about them.
    pub fn has_forgotten(&self) -> bool {
        self.forgotten_below > 1
    }
}

#[derive(Debug, Default)]
pub struct Record {
    events: Vec<Event>,
}

impl Record {
    pub fn push(&mut self, event: Event) {
        self.events.push(event);
    }

    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Allowed states of `page` when the first `certain` events have happened, and at most the
    /// first `possible` ones.
    pub fn expected(&self, page: Page, certain: usize, possible: usize) -> Expected {
        let mut expected = Expected::default();
        // Bytes written since the put of the durable version.
        let mut bytes_since = 0;
        let mut versions_put = Vec::new();
        for (index, event) in self.events[..possible].iter().enumerate() {
            match *event {
                Event::PutBegun { page: put, version, bytes } => {
                    bytes_since += bytes;
                    if put == page {
                        expected.newest = version;
                        versions_put.push((version, bytes_since));
                    }
                }
                Event::Restart => bytes_since += RESTART_BYTES,
                Event::Durable { page: durable, version } if durable == page && index < certain => {
                    expected.must_have = Some(version);
                }
                Event::ForgetBegun { page: forgotten } if forgotten == page => expected.must_have = None,
                Event::Forgotten { page: forgotten, below } if forgotten == page && index < certain => {
                    expected.forgotten_below = below;
                }
                _ => {}
            }
        }
        // A newer version replaces the durable one as soon as it is on the device.
        expected.must_have = expected.must_have.filter(|version| {
            let put = versions_put.iter().find(|(put, _)| put == version);
            expected.newest == *version && put.is_some_and(|(_, at)| bytes_since - at <= RETAINED_BYTES)
        });
        expected
    }
}

#[cfg(test)]
mod tests {
    use super::Found::{Miss, OtherBytes, Refused, Version};
    use super::*;

    const PAGE: Page = (0, 0);

    fn record() -> Record {
        let put = |page, version| Event::PutBegun { page, version, bytes: 1 << 20 };
        let mut record = Record::default();
        for event in [
            put(PAGE, 1),
            Event::Durable { page: PAGE, version: 1 },
            Event::ForgetBegun { page: PAGE },
            Event::Forgotten { page: PAGE, below: 2 },
            put(PAGE, 2),
            Event::Durable { page: PAGE, version: 2 },
        ] {
            record.push(event);
        }
        record
    }

    #[test]
    fn durable_page_must_be_present_until_its_deletion_begins() {
        let record = record();
        let expected = |certain, possible| record.expected(PAGE, certain, possible);
        assert_eq!(expected(0, 1).judge(Miss), Ok(()));
        assert_eq!(expected(0, 1).judge(Version(1)), Ok(()));
        assert_eq!(expected(0, 0).judge(Version(1)), Err(Violation::NeverPut));
        assert_eq!(expected(1, 2).judge(Miss), Ok(()), "the acknowledgement may come after the cut");
        assert_eq!(expected(2, 2).judge(Miss), Err(Violation::Lost));
        assert_eq!(expected(2, 2).judge(Version(1)), Ok(()));
        assert_eq!(expected(2, 3).judge(Miss), Ok(()), "the deletion may have begun before the cut");
    }

    #[test]
    fn wrong_bytes_and_refusals_are_violations_of_any_page() {
        for events in 0..=record().len() {
            let expected = record().expected(PAGE, events, events);
            assert_eq!(expected.judge(OtherBytes), Err(Violation::WrongBytes));
            assert_eq!(expected.judge(Refused), Err(Violation::Refused));
            assert_eq!(expected.judge(Version(expected.newest + 1)), Err(Violation::NeverPut));
        }
    }

    #[test]
    fn forgotten_version_must_not_return_once_that_is_acknowledged() {
        let record = record();
        assert_eq!(record.expected(PAGE, 3, 4).judge(Version(1)), Ok(()));
        assert_eq!(record.expected(PAGE, 4, 4).judge(Version(1)), Err(Violation::Forgotten));
        assert_eq!(record.expected(PAGE, 4, 5).judge(Version(2)), Ok(()));
        assert_eq!(record.expected(PAGE, 6, 6).judge(Version(1)), Err(Violation::Forgotten));
        assert_eq!(record.expected(PAGE, 6, 6).judge(Miss), Err(Violation::Lost));
    }

    #[test]
    fn page_may_be_evicted_after_enough_other_puts_and_restarts() {
        let mut record = record();
        for event in [Event::Restart, Event::PutBegun { page: (1, 0), version: 1, bytes: RETAINED_BYTES - (1 << 20) }] {
            record.push(event);
            assert_eq!(record.expected(PAGE, 6, record.len()).judge(Miss), Err(Violation::Lost));
        }
        record.push(Event::Restart);
        assert_eq!(record.expected(PAGE, 6, record.len()).judge(Miss), Ok(()));
    }
}
