//! Bugs that a simulation plants to see whether it would find them.
//!
//! Always true: without the feature `planted`, [`has`] is `false` and nothing of it is left in the code.

/// A mutation of the core, of L3, of a node, or of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Bug {
    /// Bytes of a page are not checked when they are read from the device.
    SkipCrc,
    /// Nobody checks that the record that was read is the one that was meant.
    SkipIdentity,
    /// A write is acknowledged when it is handed to the device.
    AckBeforeWrite,
    /// A page can be found before its write is done.
    VisibleBeforeWrite,
    /// A segment is written anew while reads of it are under way.
    ReuseUnderRead,
    /// A segment is written anew while writes of it are under way.
    ReuseUnderWrite,
    /// Forgetting writes no tombstone.
    DropTombstone,
    /// Forgetting does not wait for the sync.
    ForgetWithoutSync,
    /// Tombstones are not looked at when the log is found again.
    IgnoreTombstones,
    /// A page forgotten while it is written becomes visible.
    ForgetMissesWrite,
    /// A page that was dropped as damaged needs no tombstone.
    NoDoubt,
    /// A segment's first record is written before its header is durable.
    HeaderNotSynced,
    /// A life number is used twice.
    LifeUsedTwice,
    /// The youngest segment is reclaimed, not the oldest.
    ReclaimYoungest,
    /// An older record replaces a newer one.
    OlderReplacesNewer,
    /// A sync that failed counts as done.
    FailedSyncCounts,
    /// Nothing is synced in the background.
    NeverSync,
    /// A read that nobody waits for is not ended.
    LeakRead,
    /// One more segment than allowed is made.
    OverCapacity,
    /// A footer does not list tombstones.
    FooterWithoutTombstones,
    /// A page is copied though it was forgotten or put anew meanwhile.
    CopyAfterForget,
    /// Forgetting trusts that all records are known, though a segment could not be read to its end.
    BlindForgets,
    /// What is older than a segment that could not be read to its end is served.
    TrustsCutShort,
    /// Nobody looks whether a page is past its time.
    ExpiredIsServed,
    /// A segment without a header is taken for one that holds nothing.
    HeadlessIsNothing,
    /// A segment that was renamed is set aside, and nobody asks what it forgot.
    RenamedIsNotMissed,
    /// What another file was written over is not missed.
    ReplacedIsNotMissed,
    /// A hole is taken for what a crash leaves, wherever it is.
    HolesAreTorn,
    /// Node: a page is sealed though parts are missing.
    SealedIncomplete,
    /// Node: a part is shown though its bytes are not what its checksums say.
    DamagedPartLands,
    /// Node: a page that is there may be put again.
    SecondWriterReplaces,
    /// Node: room of a put that was given up does not come back.
    RoomLeaks,
    /// Node: a reader that waits no more is still counted.
    WaiterLeaks,
    /// Node: forgetting leaves the copy in L2.
    ForgetKeepsL2,
    /// Node: forgetting leaves the copy that is being written to L3, and does not wait for that.
    ForgetMissesWriting,
    /// Node: forgetting leaves out one of several devices.
    ForgetSkipsDevice,
    /// Node: forgetting succeeds though a device could not be opened.
    LeftOutForgets,
    /// Node: a page read from L3 enters L2 though it was forgotten meanwhile.
    LoadAfterForget,
    /// Node: write-back drops pages instead of writing them.
    DirtyDropped,
    /// Node: what only L2 has is not written when the node stops.
    DirtyStays,
    /// Node: a page that left L2 is nowhere until its write to L3 has ended.
    GapBeforeWritten,
    /// Node: what left L2 can still be found there.
    EvictedIsServed,
    /// Node: a copy that a reader found damaged is kept.
    RecheckKeeps,
    /// Node: a second writer hears that its bytes are there, whatever they are.
    CompareBelieves,
    /// Node: L2 serves pages past their time.
    OverIsServed,
    /// Node: quotas do not hold in L2.
    QuotaIgnored,
    /// Node: pins have no end.
    PinsStay,
    /// Wire: a frame is taken whatever its checksum says.
    FrameUnchecked,
    /// Wire: nobody looks whether a frame is the next one.
    FrameOutOfOrder,
    /// Client: a page is had whatever its checksums say.
    ReaderSkipsCrc,
    /// Client: pages in place are released when they are announced.
    ReleasedEarly,
    /// Client: a payload that does not come in time is waited for.
    LandingHasNoEnd,
    /// Client: only the owner is asked to forget.
    ForgetAsksOwner,
    /// Client: forgetting is complete though a node is away.
    ForgetWithoutAll,
    /// Client: bytes that were sent still count as waiting.
    BudgetLeaks,
    /// Connection: a part lands though its bytes are not what its checksums say.
    PartUnchecked,
    /// Connection: a part is taken from the client's memory though the bytes are not what its checksums say.
    LentUnchecked,
    /// Connection: what is read in place is held no longer than the connection lasts.
    HoldsEndEarly,
    /// Connection: releases are not heard.
    ReleaseUnheard,
    /// Connection: leases last as long as the connection.
    LeaseStays,
    /// Connection: a request that is cancelled keeps its puts.
    CancelKeepsPuts,
    /// Connection: puts outlive it.
    PutsOutlive,
    /// Connection: a page is shown in place and not held.
    PlaceNotHeld,
    /// Connection: a range is answered with other chunks of its page.
    OtherChunks,
    /// Client: a range is had whatever its checksums say.
    RangeUnchecked,
    /// Holds: what was forgotten is served from what is held.
    HeldIsServed,
    /// Budget: what has left is still counted.
    ChargeLeaks,
    /// RDMA: memory comes back when a connection dies, not when the device is done with it.
    MemoryBackEarly,
    /// RDMA: memory comes back before the key that opens it is dead.
    WindowBackEarly,
    /// RDMA: windows that were withdrawn stay open.
    WindowStays,
    /// Client: a page is released before it was read by RDMA.
    ReadReleasedEarly,
    /// Client: puts are given up while their parts are being written by RDMA.
    CancelUnderWrite,
}

impl Bug {
    /// Those of the log and of L3.
    pub const CORE: [Bug; 28] = [
        Bug::SkipCrc,
        Bug::SkipIdentity,
        Bug::AckBeforeWrite,
        Bug::VisibleBeforeWrite,
        Bug::ReuseUnderRead,
        Bug::ReuseUnderWrite,
        Bug::DropTombstone,
        Bug::ForgetWithoutSync,
        Bug::IgnoreTombstones,
        Bug::ForgetMissesWrite,
        Bug::NoDoubt,
        Bug::HeaderNotSynced,
        Bug::LifeUsedTwice,
        Bug::ReclaimYoungest,
        Bug::OlderReplacesNewer,
        Bug::FailedSyncCounts,
        Bug::NeverSync,
        Bug::LeakRead,
        Bug::OverCapacity,
        Bug::FooterWithoutTombstones,
        Bug::CopyAfterForget,
        Bug::BlindForgets,
        Bug::TrustsCutShort,
        Bug::ExpiredIsServed,
        Bug::HeadlessIsNothing,
        Bug::RenamedIsNotMissed,
        Bug::ReplacedIsNotMissed,
        Bug::HolesAreTorn,
    ];

    /// Those of a node: L2, puts, write policies, devices.
    pub const NODE: [Bug; 19] = [
        Bug::SealedIncomplete,
        Bug::DamagedPartLands,
        Bug::SecondWriterReplaces,
        Bug::RoomLeaks,
        Bug::WaiterLeaks,
        Bug::ForgetKeepsL2,
        Bug::ForgetMissesWriting,
        Bug::ForgetSkipsDevice,
        Bug::LeftOutForgets,
        Bug::LoadAfterForget,
        Bug::DirtyDropped,
        Bug::DirtyStays,
        Bug::GapBeforeWritten,
        Bug::EvictedIsServed,
        Bug::RecheckKeeps,
        Bug::CompareBelieves,
        Bug::OverIsServed,
        Bug::QuotaIgnored,
        Bug::PinsStay,
    ];

    /// Those of what is between a client and a node, and of the client.
    pub const WIRE: [Bug; 25] = [
        Bug::FrameUnchecked,
        Bug::FrameOutOfOrder,
        Bug::ReaderSkipsCrc,
        Bug::ReleasedEarly,
        Bug::LandingHasNoEnd,
        Bug::ForgetAsksOwner,
        Bug::ForgetWithoutAll,
        Bug::BudgetLeaks,
        Bug::PartUnchecked,
        Bug::LentUnchecked,
        Bug::HoldsEndEarly,
        Bug::ReleaseUnheard,
        Bug::LeaseStays,
        Bug::CancelKeepsPuts,
        Bug::PutsOutlive,
        Bug::PlaceNotHeld,
        Bug::OtherChunks,
        Bug::RangeUnchecked,
        Bug::HeldIsServed,
        Bug::ChargeLeaks,
        Bug::MemoryBackEarly,
        Bug::WindowBackEarly,
        Bug::WindowStays,
        Bug::ReadReleasedEarly,
        Bug::CancelUnderWrite,
    ];
}

#[cfg(feature = "planted")]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Whether this thread runs with the bug.
#[cfg(feature = "planted")]
pub fn has(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Whether this thread runs with the bug: never.
#[cfg(not(feature = "planted"))]
#[inline(always)]
pub const fn has(_bug: Bug) -> bool {
    false
}

/// Runs `work` with a bug on this thread.
#[cfg(feature = "planted")]
pub fn with<T>(bug: Bug, work: impl FnOnce() -> T) -> T {
    let before = PLANTED.replace(Some(bug));
    let result = work();
    PLANTED.set(before);
    result
}
