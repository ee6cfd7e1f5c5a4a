//! Reports of the eviction policy to the logs.

use super::Devices;
use larder_evict::Outlook;
use larder_format::PageId;
use larder_log::Worth;

impl Devices {
    /// Reports hits in L2 with what the eviction policy expects of the pages. The logs keep those
    /// that are likely to return before others.
    pub(crate) fn rank(&self, pages: &[(PageId, Outlook)]) {
        let worth = |outlook| match outlook {
            Outlook::Unlikely => Worth::Low,
            Outlook::Unclear => Worth::Usual,
            Outlook::Likely => Worth::High,
        };
        let pages: Vec<(PageId, Worth)> = pages.iter().map(|&(id, outlook)| (id, worth(outlook))).collect();
        self.devices.iter().for_each(|device| device.l3.rank(&pages));
    }
}
