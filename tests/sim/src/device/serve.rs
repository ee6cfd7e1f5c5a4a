//! Execution of a request when it is due, with the faults that the seed injects.

use super::{InFlight, SimDevice};
use crate::faults::Faults;
use crate::random::RandomSource;
use crate::world::World;
use larder_format::disk::BLOCK_BYTES;
use larder_io::Operation;
use std::io;
use std::sync::atomic::Ordering;

const EIO: i32 = 5;

pub(super) fn name_of(operation: &Operation) -> &'static str {
    match operation {
        Operation::Read { .. } => "read",
        Operation::Write { .. } => "write",
        Operation::Sync => "sync",
    }
}

pub(super) fn offset_of(operation: &Operation) -> u64 {
    match operation {
        Operation::Read { offset, .. } | Operation::Write { offset, .. } => *offset,
        Operation::Sync => 0,
    }
}

pub(super) fn location_of(request: &InFlight) -> (u32, u64) {
    (request.segment, offset_of(&request.operation))
}

/// Offset of a write, and its bytes as they are in memory now. Memory that was reused too early
/// shows up as wrong bytes.
pub(super) fn bytes_of(operation: &Operation) -> Option<(u64, Vec<u8>)> {
    let Operation::Write { offset, block, payload } = operation else { return None };
    let mut bytes = block.as_ref().map_or_else(Vec::new, |block| block.to_vec());
    if let Some((slot, range)) = payload {
        bytes.extend_from_slice(&slot.whole()[range.clone()]);
    }
    Some((*offset, bytes))
}

pub(super) fn bad_sector(world: &World, number: usize, random: &mut RandomSource) -> Option<(u32, u64, &'static str)> {
    let rate = world.faults.lock().bad_sector;
    if !random.chance(rate) {
        return None;
    }
    let (segment, at) = world.disks[number].lock().random_location(random)?;
    world.fault("bad sector", [u64::from(segment), at, 0]);
    Some((segment, at, if random.chance(500_000) { "read error" } else { "short read" }))
}

impl SimDevice {
    pub(super) fn serve(
        &self,
        segment: u32,
        operation: &mut Operation,
        covered_writes: u64,
        bad_sector: Option<(u32, u64, &'static str)>,
        random: &mut RandomSource,
    ) -> io::Result<()> {
        let faults = *self.world.faults.lock();
        if self.disk().lock().is_broken(self.world.now_ms()) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        match operation {
            // Only reads for a shared arena are split, and simulated arenas are not shared.
            Operation::Read { block: Some(_), .. } => Err(io::ErrorKind::Unsupported.into()),
            Operation::Read { offset, range, .. } => {
                let reach = *offset..*offset + range.len() as u64;
                let bad = bad_sector.filter(|(bad, at, _)| *bad == segment && reach.contains(at));
                self.read(segment, operation, bad.map(|bad| bad.2), &faults, random)
            }
            Operation::Write { .. } => self.write(segment, operation, &faults, random),
            Operation::Sync => self.sync(segment, covered_writes, &faults, random),
        }
    }

    fn read(
        &self,
        segment: u32,
        operation: &mut Operation,
        bad: Option<&'static str>,
        faults: &Faults,
        random: &mut RandomSource,
    ) -> io::Result<()> {
        let Operation::Read { offset, slot, range, .. } = operation else { return Ok(()) };
        let mut place = (segment, *offset);
        let misdirected = random.chance(faults.misdirected_read);
        let elsewhere = misdirected.then(|| self.disk().lock().random_location(random)).flatten();
        if let Some(elsewhere) = elsewhere {
            self.note_silent_read_fault("misdirected read", segment, *offset, range.len());
            place = (elsewhere.0, elsewhere.1 / BLOCK_BYTES as u64 * BLOCK_BYTES as u64);
        }
        let target = &mut slot.whole()[range.clone()];
        let fails = [("read error", faults.read_error), ("short read", faults.short_read)];
        let failure = fails.into_iter().find(|(_, rate)| random.chance(*rate)).map(|(name, _)| name).or(bad);
        let moved = match failure {
            Some(_) => random.below(target.len() as u64) as usize,
            None => target.len(),
        };
        let disk = self.disk().lock();
        match disk.read(place.0, place.1, &mut target[..moved]) {
            true => {}
            // A misdirected read may pass the end of its segment. It returns noise there.
            false if place != (segment, *offset) => random.fill(&mut target[..moved]),
            false => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        drop(disk);
        if random.chance(faults.read_flip) && moved > 0 {
            let byte = random.below(moved as u64) as usize;
            let bit = random.below(8);
            target[byte] ^= 1 << bit;
            self.note_silent_read_fault("read flip", segment, *offset, range.len());
        }
        match failure {
            None => Ok(()),
            Some(name) => {
                self.world.fault(name, [u64::from(segment), *offset, 0]);
                Err(match name {
                    "short read" => io::ErrorKind::UnexpectedEof.into(),
                    _ => io::Error::from_raw_os_error(EIO),
                })
            }
        }
    }

    /// Records a silent read fault. During recovery it may hide records from the node.
    fn note_silent_read_fault(&self, name: &'static str, segment: u32, offset: u64, len: usize) {
        self.world.fault(name, [u64::from(segment), offset, 0]);
        if self.starting.load(Ordering::Relaxed) {
            self.disk().lock().note_hidden(segment, offset, len);
        }
    }

    fn write(
        &self,
        segment: u32,
        operation: &mut Operation,
        faults: &Faults,
        random: &mut RandomSource,
    ) -> io::Result<()> {
        let Operation::Write { offset, block, payload } = operation else { return Ok(()) };
        let offset = *offset;
        if let Some((slot, _)) = payload.as_ref().filter(|_| random.chance(faults.write_flip)) {
            let byte = slot.arena_offset() + random.below(slot.capacity() as u64) as usize;
            self.world.fault("write flip", [byte as u64, 0, 0]);
            // SAFETY: the simulation runs on one thread, and no task holds a reference into the
            // slot across an await. This function holds none either.
            unsafe { self.arena.flip_bit(byte, random.below(8) as u32) };
        }
        let mut pieces: Vec<&[u8]> = Vec::with_capacity(2);
        pieces.extend(block.as_ref().map(|block| &block[..]));
        pieces.extend(payload.as_ref().map(|(slot, range)| &slot.whole()[range.clone()]));
        let mut disk = self.disk().lock();
        let numbers = [u64::from(segment), offset, 0];
        let mut result = Ok(());
        if random.chance(faults.write_error) {
            self.world.fault("write error", numbers);
            let kept = [0, 500_000, 1_000_000][random.below(3) as usize];
            disk.write_some(segment, offset, &pieces.concat(), kept, random);
            result = Err(io::Error::from_raw_os_error(EIO));
        } else if random.chance(faults.lost_write) {
            self.world.fault("lost write", numbers);
            disk.note_silent_fault(segment, offset);
        } else if random.chance(faults.misdirected_write)
            && let Some((elsewhere, at)) = disk.random_location(random)
        {
            self.world.fault("misdirected write", [u64::from(elsewhere), at, 0]);
            let at = at / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
            disk.note_silent_fault(segment, offset);
            disk.note_silent_fault(elsewhere, at);
            disk.write(elsewhere, at, &pieces);
        } else if !disk.write(segment, offset, &pieces) {
            result = Err(io::Error::from_raw_os_error(EIO));
        }
        if random.chance(faults.disk_flip)
            && let Some((flipped, at)) = disk.random_location(random)
        {
            self.world.fault("disk flip", [u64::from(flipped), at, 0]);
            disk.flip(flipped, at, random.below(8));
        }
        result
    }

    fn sync(&self, segment: u32, covered_writes: u64, faults: &Faults, random: &mut RandomSource) -> io::Result<()> {
        let mut disk = self.disk().lock();
        if random.chance(faults.sync_error) {
            self.world.fault("sync error", [u64::from(segment), covered_writes, 0]);
            disk.sync_fails(segment, covered_writes, random);
            return Err(io::Error::from_raw_os_error(EIO));
        }
        if !random.chance(faults.sync_ignored) {
            disk.sync(segment, covered_writes);
        }
        Ok(())
    }
}
