//! What becomes of a request when it is due.

use super::{Flight, SimDevice};
use crate::dice::Dice;
use crate::faults::Faults;
use crate::world::World;
use larder_device::Operation;
use larder_format::disk::BLOCK_BYTES;
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

pub(super) fn place_of(flight: &Flight) -> (u32, u64) {
    (flight.segment, offset_of(&flight.operation))
}

/// Where a write goes, and its bytes as they are in memory now.
pub(super) fn bytes_of(operation: &Operation) -> Option<(u64, Vec<u8>)> {
    let Operation::Write { offset, block, payload } = operation else { return None };
    let mut bytes = block.as_ref().map_or_else(Vec::new, |block| block.to_vec());
    if let Some((slot, range)) = payload {
        bytes.extend_from_slice(&slot.whole()[range.clone()]);
    }
    Some((*offset, bytes))
}

/// A place that cannot be read while the node starts, and the kind of failure, if this start has one.
pub(super) fn bad_place(world: &World, number: usize, dice: &mut Dice) -> Option<(u32, u64, &'static str)> {
    let rate = world.faults.lock().bad_place;
    if !dice.chance(rate) {
        return None;
    }
    let (segment, at) = world.disks[number].lock().any_place(dice)?;
    world.fault("bad place", [u64::from(segment), at, 0]);
    Some((segment, at, if dice.chance(500_000) { "read error" } else { "short read" }))
}

impl SimDevice {
    pub(super) fn serve(
        &self,
        segment: u32,
        operation: &mut Operation,
        covers: u64,
        bad_place: Option<(u32, u64, &'static str)>,
        dice: &mut Dice,
    ) -> io::Result<()> {
        let faults = *self.world.faults.lock();
        if self.disk().lock().is_broken(self.world.now_ms()) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        match operation {
            Operation::Read { offset, range, .. } => {
                let reach = *offset..*offset + range.len() as u64;
                let bad = bad_place.filter(|(bad, at, _)| *bad == segment && reach.contains(at));
                self.read(segment, operation, bad.map(|bad| bad.2), &faults, dice)
            }
            Operation::Write { .. } => self.write(segment, operation, &faults, dice),
            Operation::Sync => self.sync(segment, covers, &faults, dice),
        }
    }

    fn read(
        &self,
        segment: u32,
        operation: &mut Operation,
        bad: Option<&'static str>,
        faults: &Faults,
        dice: &mut Dice,
    ) -> io::Result<()> {
        let Operation::Read { offset, slot, range } = operation else { return Ok(()) };
        let mut place = (segment, *offset);
        let misdirected = dice.chance(faults.misdirected_read);
        let elsewhere = misdirected.then(|| self.disk().lock().any_place(dice)).flatten();
        if let Some(elsewhere) = elsewhere {
            self.read_lies("misdirected read", segment, *offset, range.len());
            place = (elsewhere.0, elsewhere.1 / BLOCK_BYTES as u64 * BLOCK_BYTES as u64);
        }
        let target = &mut slot.whole()[range.clone()];
        let fails = [("read error", faults.read_error), ("short read", faults.short_read)];
        let failure = fails.into_iter().find(|(_, rate)| dice.chance(*rate)).map(|(what, _)| what).or(bad);
        let moved = match failure {
            Some(_) => dice.below(target.len() as u64) as usize,
            None => target.len(),
        };
        let disk = self.disk().lock();
        match disk.read(place.0, place.1, moved) {
            Some(bytes) => target[..moved].copy_from_slice(bytes),
            // A misdirected read may reach behind the end: it finds noise.
            None if place != (segment, *offset) => dice.fill(&mut target[..moved]),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        drop(disk);
        if dice.chance(faults.read_flip) && moved > 0 {
            let (byte, bit) = (dice.below(moved as u64) as usize, dice.below(8));
            target[byte] ^= 1 << bit;
            self.read_lies("read flip", segment, *offset, range.len());
        }
        match failure {
            None => Ok(()),
            Some(what) => {
                self.world.fault(what, [u64::from(segment), *offset, 0]);
                Err(match what {
                    "short read" => io::ErrorKind::UnexpectedEof.into(),
                    _ => io::Error::from_raw_os_error(EIO),
                })
            }
        }
    }

    /// A read that lies while the node starts may hide records from it.
    fn read_lies(&self, what: &'static str, segment: u32, offset: u64, len: usize) {
        self.world.fault(what, [u64::from(segment), offset, 0]);
        if self.starting.load(Ordering::Relaxed) {
            self.disk().lock().note_hidden(segment, offset, len);
        }
    }

    fn write(&self, segment: u32, operation: &mut Operation, faults: &Faults, dice: &mut Dice) -> io::Result<()> {
        let Operation::Write { offset, block, payload } = operation else { return Ok(()) };
        let offset = *offset;
        if let Some((slot, _)) = payload.as_ref().filter(|_| dice.chance(faults.write_flip)) {
            let byte = slot.arena_offset() + dice.below(slot.capacity() as u64) as usize;
            self.world.fault("write flip", [byte as u64, 0, 0]);
            // SAFETY: the simulation has one thread, and nobody holds a reference into the slot across an await; here
            // there is none either.
            unsafe { self.arena.flip_bit(byte, dice.below(8) as u32) };
        }
        let mut pieces: Vec<&[u8]> = Vec::with_capacity(2);
        pieces.extend(block.as_ref().map(|block| &block[..]));
        pieces.extend(payload.as_ref().map(|(slot, range)| &slot.whole()[range.clone()]));
        let mut disk = self.disk().lock();
        let numbers = [u64::from(segment), offset, 0];
        let mut result = Ok(());
        if dice.chance(faults.write_error) {
            self.world.fault("write error", numbers);
            let kept = [0, 500_000, 1_000_000][dice.below(3) as usize];
            disk.write_some(segment, offset, &pieces.concat(), kept, dice);
            result = Err(io::Error::from_raw_os_error(EIO));
        } else if dice.chance(faults.lost_write) {
            self.world.fault("lost write", numbers);
            disk.note_lie(segment, offset);
        } else if dice.chance(faults.misdirected_write)
            && let Some((elsewhere, at)) = disk.any_place(dice)
        {
            self.world.fault("misdirected write", [u64::from(elsewhere), at, 0]);
            let at = at / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
            disk.note_lie(segment, offset);
            disk.note_lie(elsewhere, at);
            disk.write(elsewhere, at, &pieces);
        } else if !disk.write(segment, offset, &pieces) {
            result = Err(io::Error::from_raw_os_error(EIO));
        }
        if dice.chance(faults.disk_flip)
            && let Some((flipped, at)) = disk.any_place(dice)
        {
            self.world.fault("disk flip", [u64::from(flipped), at, 0]);
            disk.flip(flipped, at, dice.below(8));
        }
        result
    }

    fn sync(&self, segment: u32, covers: u64, faults: &Faults, dice: &mut Dice) -> io::Result<()> {
        let mut disk = self.disk().lock();
        if dice.chance(faults.sync_error) {
            self.world.fault("sync error", [u64::from(segment), covers, 0]);
            disk.sync_fails(segment, covers, dice);
            return Err(io::Error::from_raw_os_error(EIO));
        }
        if !dice.chance(faults.sync_lie) {
            disk.sync(segment, covers);
        }
        Ok(())
    }
}
